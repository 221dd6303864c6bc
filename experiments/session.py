"""One run of `train`: opens its directory, trains or goes on, and says how it ended."""

import json
import logging
import os
import shlex
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import chex
import jax
from rich.console import Console
from rich.text import Text

import mpjax
from experiments import config, loop, measure, plots, precision, processes
from experiments.errors import Failure, UsageError
from experiments.interrupt import Stop
from experiments.logging import Display, MetricsFile, read_metrics, summary_table
from experiments.placement import Placement, make_mesh
from experiments.recovery import NO_SPACE, Fallback, Recovery
from experiments.rundir import RunDirectory, to_plain, write_json
from experiments.tasks import Task, make_optimizer, make_task
from mpjax.checkpoint import CheckpointError, Checkpoints, CheckpointWarning
from mpjax.divergence import DivergenceError, DivergenceMonitor, find_nonfinite


class Session:
    """A run, from its options to its exit status.

    Attributes:
      directory: where it writes its results.
      task: model and data.
      state: before the next step, on the devices of `placement`.
      fallback: the policy and step with which it goes on after it diverged, if it did.
    """

    task: Task
    state: mpjax.TrainState
    key: jax.Array
    fallback: Fallback | None = None

    def __init__(self, options: config.GPTRun | config.ResNetRun, argv: Sequence[str]) -> None:
        """Makes the model and opens the directory.

        Args:
          options: what to train, and how.
          argv: the command line that they were parsed from, to tell how to resume.

        Raises:
          UsageError: if a policy, the data, the mesh or the directory cannot be used.
        """
        self.options, self.argv = options, list(argv)
        processes.set_up(options)
        self.console = Console(quiet=not processes.is_main())
        policies = precision.resolve_policy(options.policy)
        loss_scale = precision.resolve_loss_scale(options.loss_scale, policies)
        self.fallback_policies = precision.resolve_policy(options.fallback_policy, "--fallback-policy")
        self.placement = Placement(make_mesh(options.mesh, options.batch_size, options.accumulate_steps))
        self._adopt(policies, loss_scale)
        self.model = "gpt" if isinstance(options, config.GPTRun) else "resnet"
        self.resolved = {
            "model": self.model,
            "policy": precision.policy_to_json(policies),
            "loss_scale": precision.loss_scale_to_json(loss_scale),
        }
        self.directory = RunDirectory(options.out)
        # The resolved policy comes first, as what people look for.
        settings = self.resolved | to_plain(options) | self.resolved
        settings |= {"data.sha256": self.task.fingerprint}
        processes.on_main(lambda: self.directory.open(settings, options.resume))

    def run(self) -> int:
        """Trains to the end, or until it is asked to stop, and returns the exit status.

        Raises:
          Failure: if training diverged or the disk is full.
          UsageError: if the checkpoints belong to another run.
        """
        # orbax's own account of a failed save; ours is shorter.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self._say = self._print
        stop = Stop(lambda text: self._say(text), self.options.log_every)
        try:
            with stop, warnings.catch_warnings(), self._open_checkpoints() as checkpoints:
                warnings.simplefilter("always", CheckpointWarning)
                warnings.showwarning = lambda message, *args, **kwargs: self._say(f"warning: {message}")
                try:
                    return self._run(Recovery(checkpoints), stop)
                except jax.errors.JaxRuntimeError as e:
                    if jax.process_count() == 1:
                        raise
                    self._give_up(e)
        except OSError as e:
            if e.errno not in NO_SPACE:
                raise
            raise Failure(
                f"'{self.options.out}' cannot be written to ({e.strerror}); free some space, then go on from the "
                f"last checkpoint with:\n  {command_to_go_on(self.argv)}"
            ) from None

    def _give_up(self, error: jax.errors.JaxRuntimeError) -> NoReturn:
        """Ends this process when another one is gone."""
        processes.give_up(
            f"process {jax.process_index()} could not go on, most likely as another process of this run is gone "
            f"({str(error).splitlines()[0]}). Start all of them again to go on from the last checkpoint:\n"
            f"  {command_to_go_on(self.argv)}"
        )

    def _open_checkpoints(self) -> Checkpoints:
        try:
            return Checkpoints(self.directory.checkpoints, keep=3, keep_best=1, metric="val_loss")
        except CheckpointError as e:
            raise UsageError(str(e)) from None

    def _run(self, recovery: Recovery, stop: Stop) -> int:
        if fallback := recovery.fallback():
            self._adopt_fallback(fallback)
        self.state, self.key = recovery.resume(self.state, self.key)
        if self._start == self.options.steps and self.directory.summary.exists():
            return self._show_finished()
        while True:
            try:
                outcome, sizes = self._train(recovery, stop)
                break
            except DivergenceError as e:
                if self.options.on_divergence == "raise" or self.fallback is not None:
                    raise Failure(f"{e}\n{self._other_ways()}") from None
                self._fall_back(recovery, e)
        problem = recovery.settle()
        if processes.is_main():
            plots.plot_run(read_metrics(self.directory.metrics), self.directory.plots)
        if outcome.finished:
            return self._finish(outcome, sizes)
        return self._tell_how_to_go_on(outcome, stop.status, problem)

    @property
    def _start(self) -> int:
        return int(self.state.step)

    def _adopt(self, policies: mpjax.PolicyMap, loss_scale: mpjax.LossScale) -> None:
        """Takes up a policy: with a new state, as before the first step."""
        self.task, state = _make(self.options, policies, loss_scale)
        self.state = self.placement.state(state)
        self.key = self.placement.key(jax.random.key(self.options.seed))

    def _adopt_fallback(self, fallback: Fallback) -> None:
        self.fallback = fallback
        self._adopt(self.fallback_policies, mpjax.loss_scale_for(self.fallback_policies))

    def _fall_back(self, recovery: Recovery, error: DivergenceError) -> None:
        """Goes back to the last good checkpoint, and on from there under the fallback policy."""
        policy = precision.policy_to_json(self.fallback_policies)
        self._adopt_fallback(
            {"policy": policy, "diverged_at": error.divergence.step, "reason": error.divergence.reason}
        )
        self.state, self.key = recovery.last_good(self.state, self.key)
        assert self.fallback is not None
        self.fallback["from_step"] = self._start
        self._print(f"{error}\nGoing back to step {self._start}, and on under the fallback policy {policy}.")

    def _train(self, recovery: Recovery, stop: Stop) -> tuple[loop.Outcome, dict[str, int]]:
        options, start = self.options, self._start
        sizes = measure.sizes(self.task, self.state, options.accumulate_steps, self.key)
        display = Display(self.console, options.steps, self.task.unit, start)
        policy = precision.policy_to_json(self.task.policies)
        shown = policy if isinstance(policy, str) else options.policy
        scale = precision.loss_scale_to_json(self.state.loss_scale)
        mesh = "" if self.placement.mesh is None else f", mesh {self.placement}"
        display.say(
            f"{self.model}: {sizes['parameters']:,} parameters, policy {shown}, "
            f"loss scale {scale}, on {jax.default_backend()}{mesh}"
        )
        if start:
            display.say(f"going on after step {start} of {options.steps} in {options.out}")
        intervals = loop.Intervals(options.log_every, options.eval_every, options.checkpoint_every)
        # Only process 0 writes.
        metrics_path = self.directory.metrics if processes.is_main() else Path(os.devnull)
        with display, MetricsFile(metrics_path, after=start) as metrics:
            self._say = display.say
            before = time.perf_counter()
            step = loop.compile_step(
                self.task, self.state, self.key, options.accumulate_steps, self.placement
            )
            display.say(f"compiled the step in {time.perf_counter() - before:.0f} s")
            try:
                outcome = loop.train(
                    self.task,
                    step,
                    self.state,
                    self.key,
                    seed=options.seed,
                    steps=options.steps,
                    intervals=intervals,
                    observer=_Watch(display, metrics, recovery, self.fallback),
                    placement=self.placement,
                    save=lambda state, validation: recovery.save(state, self.key, validation, self.fallback),
                    check=self._make_check(),
                    stop=stop.after,
                )
            finally:
                self._say = self._print
        return outcome, sizes

    def _make_check(self) -> Callable[[mpjax.TrainState, list[loop.Record]], None]:
        """A check of what was logged that raises if training has diverged, and says where."""
        options = self.options
        monitor = DivergenceMonitor.for_loss_scale(self.state.loss_scale, max_skipped=options.max_skipped)

        def check(state: mpjax.TrainState, records: list[loop.Record]) -> None:
            for record in records:
                if divergence := monitor.observe(record["step"], record):
                    before = record["step"] - 1
                    found = find_nonfinite(
                        self.task.loss,
                        state,
                        self.placement.batch(self.task, options.seed, before),
                        jax.random.fold_in(self.key, before),
                        loss_scale=record["loss_scale"],
                        accumulate_steps=options.accumulate_steps,
                        has_model_state=True,
                    )
                    raise DivergenceError(divergence, found)

        return check

    def _other_ways(self) -> str:
        return (
            "Or go back to the last good checkpoint and on under another policy, with --on-divergence fallback "
            "--fallback-policy float32 and a new --out."
            if self.options.on_divergence == "raise"
            else f"This was under the fallback policy; the last checkpoints are in {self.directory.checkpoints}."
        )

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _show_finished(self) -> int:
        say = f"{self.options.out} is finished; train it anew with --resume never."
        self.console.print(say, highlight=False, soft_wrap=True)
        self.console.print(summary_table(json.loads(self.directory.summary.read_text())))
        return 0

    def _tell_how_to_go_on(self, outcome: loop.Outcome, status: int, problem: str | None) -> int:
        again = f"Go on with:\n  {command_to_go_on(self.argv)}"
        if problem is not None:
            raise Failure(f"{problem} {again}")
        step = int(outcome.state.step)
        self._print(f"Saved step {step} of {self.options.steps} in {self.options.out}. {again}")
        return status

    def _finish(self, outcome: loop.Outcome, sizes: dict[str, int]) -> int:
        summary = self.resolved | outcome.validation | sizes
        summary |= {
            "steps": int(outcome.state.step),
            "skipped": int(outcome.state.skipped),
            "rate": outcome.rate,
            "seconds": outcome.seconds,
            "unit": self.task.unit,
        }
        if self.fallback is not None:
            summary["fallback"] = self.fallback
        params = self.placement.gathered(outcome.state.params)
        if not processes.is_main():
            return 0
        if sample := self.task.sample(params, self.options.seed):
            prompt, written = sample
            self.directory.sample.write_text(prompt + written)
            self.console.rule("held-out text, and how the model goes on", style="dim")
            self.console.print(Text(prompt, style="dim") + Text(written))
            self.console.rule(style="dim")
        # Last, as it marks the run as finished.
        write_json(self.directory.summary, summary)
        self.console.print(summary_table(summary))
        where = f"Curves and numbers: {self.options.out}"
        self.console.print(where, highlight=False, soft_wrap=True)
        return 0


class _Watch:
    """Shows and stores what the loop reports."""

    def __init__(
        self, display: Display, metrics: MetricsFile, recovery: Recovery, fallback: Fallback | None
    ) -> None:
        self._display, self._metrics, self._recovery = display, metrics, recovery
        self._marks = {"fallback": 1} if fallback else {}

    def logged(self, records: list[loop.Record], rate: float, seconds_left: float) -> None:
        # No step counts as done before the checkpoint that it comes after is whole: a run that is killed at
        # any moment has told of no more steps than it takes again, one interval.
        self._recovery.settle()
        self._metrics.write([record | self._marks for record in records])
        self._display.update(records[-1], rate, seconds_left)

    def state_at(self, state: mpjax.TrainState, batch: chex.ArrayTree) -> None:
        del state, batch


def print_audit(options: config.GPTRun | config.ResNetRun) -> int:
    """Prints the audit of a run's train step; the status is 1 if it finds errors. Nothing is written.

    Args:
      options: what would be trained, and how.
    """
    policies = precision.resolve_policy(options.policy)
    task, state = _make(options, policies, precision.resolve_loss_scale(options.loss_scale, policies))
    step = loop.make_step(task, options.accumulate_steps)
    found = mpjax.audit(step, state, task.batch(0, 0), jax.random.key(options.seed))
    print(found)
    return 1 if found.errors else 0


def command_to_go_on(argv: Sequence[str]) -> str:
    """The command line that goes on with a run that was stopped.

    Args:
      argv: the one that started it. With `--resume never` it would start it anew.
    """
    arguments, rest = [], list(argv)
    while rest:
        argument = rest.pop(0)
        if argument == "--resume":
            rest = rest[1:]
        elif not argument.startswith("--resume="):
            arguments.append(argument)
    return shlex.join(["python", "-m", "experiments.train", *arguments])


def _make(
    options: config.GPTRun | config.ResNetRun, policies: mpjax.PolicyMap, loss_scale: mpjax.LossScale
) -> tuple[Task, mpjax.TrainState]:
    """Task and initial state; that is where patterns meet their modules."""
    try:
        task = make_task(options, policies)
        return task, loop.create_state(task, make_optimizer(options), loss_scale, options.seed)
    except UsageError:
        raise
    except ValueError as e:
        raise UsageError(f"--policy '{options.policy}': {e}") from None
