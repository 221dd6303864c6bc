"""One run of `train`: opens its directory, trains or goes on, and says how it ended."""

import json
import shlex
import time
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

import mpjax
from experiments import config, loop, measure, plots, precision
from experiments.checkpoints import Checkpoints
from experiments.errors import UsageError
from experiments.interrupt import STATUS, Interrupt
from experiments.logging import Display, MetricsFile, read_metrics, summary_table
from experiments.rundir import RunDirectory, to_plain, write_json
from experiments.tasks import Task, make_optimizer, make_task


class Session:
    """A run, from its options to its exit status.

    Attributes:
      directory: where it keeps its results.
      task: model and data.
    """

    def __init__(self, options: config.GPTRun | config.ResNetRun, argv: Sequence[str]) -> None:
        """Makes the model and opens the directory.

        Args:
          options: what to train, and how.
          argv: the command line they came from, to tell how to go on.

        Raises:
          UsageError: if a policy, the data or the directory cannot be used.
        """
        self.options, self.argv, self.console = options, list(argv), Console()
        policies = precision.resolve_policy(options.policy)
        loss_scale = precision.resolve_loss_scale(options.loss_scale, policies)
        self.task, self.state = _make(options, policies, loss_scale)
        self.key = jax.random.key(options.seed)
        self.model = "gpt" if isinstance(options, config.GPTRun) else "resnet"
        self.resolved = {
            "model": self.model,
            "policy": precision.policy_to_json(policies),
            "loss_scale": precision.loss_scale_to_json(loss_scale),
        }
        self.directory = RunDirectory(options.out)
        # The resolved policy comes first, as what people look for.
        settings = self.resolved | to_plain(options) | self.resolved
        self.directory.open(settings | {"data.sha256": self.task.fingerprint}, options.resume)

    def run(self) -> int:
        """Trains to the end, or until Ctrl-C, and returns the exit status."""
        checkpoints = Checkpoints(self.directory.checkpoints)
        try:
            if checkpoints.latest is not None:
                self.state, self.key = checkpoints.restore(self.state, self.key)
            if self._start == self.options.steps and self.directory.summary.exists():
                return self._show_finished()
            outcome, sizes = self._train(checkpoints)
        finally:
            checkpoints.close()
        plots.plot_run(read_metrics(self.directory.metrics), self.directory.plots)
        return self._finish(outcome, sizes) if outcome.finished else self._tell_how_to_go_on(outcome)

    @property
    def _start(self) -> int:
        return int(self.state.step)

    def _train(self, checkpoints: Checkpoints) -> tuple[loop.Outcome, dict[str, int]]:
        options, start = self.options, self._start
        sizes = measure.sizes(self.task, self.state, options.accumulate_steps, self.key)
        display = Display(self.console, options.steps, self.task.unit, start)
        policy = self.resolved["policy"]
        shown = policy if isinstance(policy, str) else self.options.policy
        display.say(
            f"{self.model}: {sizes['parameters']:,} parameters, policy {shown}, "
            f"loss scale {self.resolved['loss_scale']}, on {jax.default_backend()}"
        )
        if start:
            display.say(f"going on after step {start} of {options.steps} in {options.out}")
        stopping = Interrupt(lambda: display.say("Stopping after this step; Ctrl-C again ends at once."))
        intervals = loop.Intervals(options.log_every, options.eval_every, options.checkpoint_every)
        with display, stopping, MetricsFile(self.directory.metrics, after=start) as metrics:
            before = time.perf_counter()
            step = loop.compile_step(self.task, self.state, self.key, options.accumulate_steps)
            display.say(f"compiled the step in {time.perf_counter() - before:.0f} s")
            outcome = loop.train(
                self.task,
                step,
                self.state,
                self.key,
                seed=options.seed,
                steps=options.steps,
                intervals=intervals,
                observer=_Watch(display, metrics),
                save=lambda state: checkpoints.save(state, self.key),
                stop=lambda: stopping.requested,
            )
        return outcome, sizes

    def _show_finished(self) -> int:
        say = f"{self.options.out} is finished; train it anew with --resume never."
        self.console.print(say, highlight=False, soft_wrap=True)
        self.console.print(summary_table(json.loads(self.directory.summary.read_text())))
        return 0

    def _tell_how_to_go_on(self, outcome: loop.Outcome) -> int:
        step = int(outcome.state.step)
        self.console.print(
            f"Saved step {step} of {self.options.steps} in {self.options.out}. Go on with:\n"
            f"  {command_to_go_on(self.argv)}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
        return STATUS

    def _finish(self, outcome: loop.Outcome, sizes: dict[str, int]) -> int:
        summary = self.resolved | outcome.validation | sizes
        summary |= {
            "steps": int(outcome.state.step),
            "skipped": int(outcome.state.skipped),
            "rate": outcome.rate,
            "seconds": outcome.seconds,
            "unit": self.task.unit,
        }
        if sample := self.task.sample(outcome.state.params, self.options.seed):
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
    """Shows what the loop reports, and keeps it."""

    def __init__(self, display: Display, metrics: MetricsFile) -> None:
        self._display, self._metrics = display, metrics

    def logged(self, records: list[loop.Record], rate: float, seconds_left: float) -> None:
        self._metrics.write(records)
        self._display.update(records[-1], rate, seconds_left)

    def state_at(self, state: mpjax.TrainState, batch: Any) -> None:
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
    options: Any, policies: mpjax.PolicyMap, loss_scale: mpjax.LossScale
) -> tuple[Task, mpjax.TrainState]:
    """Task and initial state; that is where patterns meet their modules."""
    try:
        task = make_task(options, policies)
        return task, loop.create_state(task, make_optimizer(options), loss_scale, options.seed)
    except UsageError:
        raise
    except ValueError as e:
        raise UsageError(f"--policy '{options.policy}': {e}") from None
