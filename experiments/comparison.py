"""Runs one model under several policies and collects the results."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
from rich.console import Console

import mpjax
from experiments import config, loop, measure, precision, report
from experiments.errors import UsageError
from experiments.gates import FAILED_STATUS, Gate, parse_gates
from experiments.logging import Display
from experiments.rundir import to_plain, write_json
from experiments.tasks import make_optimizer, make_task

Options = config.GPTComparison | config.ResNetComparison
Results = dict[str, dict[str, Any]]
"""From the name of a contender to what was measured of it."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A precision to train in.

    Attributes:
      name: what tables and pictures call it.
      policy: policy string.
      loss_scale: as `--loss-scale` takes it.
      mixed: whether gates hold for it.
    """

    name: str
    policy: str
    loss_scale: str = "none"
    mixed: bool = False


FLOAT32 = "float32"
CONTENDERS = (
    Contender(FLOAT32, "p=f32,c=f32,o=f32"),
    Contender("bfloat16 mixed", "p=f32,c=bf16,o=f32", mixed=True),
    Contender("float16 mixed, dynamic scale", "p=f32,c=f16,o=f32", "dynamic", mixed=True),
    Contender("float16 mixed, no scale", "p=f32,c=f16,o=f32"),
    Contender("all bfloat16", "p=bf16,c=bf16,o=bf16"),
    Contender("all float16", "p=f16,c=f16,o=f16"),
)
"""The last three show what mixed precision is for: scaled gradients and float32 weights."""


def compare(options: Options) -> int:
    """Trains under every contender, shows the results and returns the exit status of the gates.

    Args:
      options: what to train, how often, and the gates.
    """
    gates = parse_gates(options.gate)
    if options.out.exists() and not options.out.is_dir():
        raise UsageError(f"--out '{options.out}' is a file; give a directory")
    console = Console()
    exact = measure.float32_gradients(make_task(options, mpjax.as_policy_map("float32")))
    results = {c.name: _run_all_seeds(c, options, exact, console) for c in CONTENDERS}
    _show(_content(options, results), options.out, console)
    failures = _failures(gates, results)
    for failure in failures:
        console.print(f"gate failed: {failure}", style="red", highlight=False, soft_wrap=True)
    if gates and not failures:
        console.print("all gates passed", style="green")
    return FAILED_STATUS if failures else 0


def _content(options: Options, results: Results) -> dict[str, Any]:
    """What results.json holds."""
    model = "gpt" if isinstance(options, config.GPTComparison) else "resnet"
    return {
        "model": model,
        "unit": _UNITS[model],
        "options": to_plain(options),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "results": results,
    }


def _show(content: dict[str, Any], out: Path, console: Console) -> None:
    """Writes results.json and compare.png, and prints the table."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "results.json", content)
    report.plot(content, out / "compare.png")
    console.print(report.table(content, roomy=console.width >= 100))
    console.print(report.FOOTNOTE, style="dim")
    where = f"Picture and numbers: {out}/compare.png and results.json"
    console.print(where, highlight=False, soft_wrap=True)


def _failures(gates: list[Gate], results: Results) -> list[str]:
    """A message for each gate that a mixed policy misses."""
    mixed = [c.name for c in CONTENDERS if c.mixed]
    found = [gate.failure(name, results[name], results[FLOAT32]) for gate in gates for name in mixed]
    return [failure for failure in found if failure]


_UNITS = {"gpt": "tokens", "resnet": "images"}


def _run_all_seeds(
    contender: Contender,
    options: Options,
    exact: measure.Gradients,
    console: Console,
) -> dict[str, Any]:
    """Results of one contender: mean and spread over the seeds, and the course of the first."""
    policies = mpjax.as_policy_map(contender.policy)
    loss_scale = precision.resolve_loss_scale(contender.loss_scale, policies)
    task, tx = make_task(options, policies), make_optimizer(options)
    key = jax.random.key(options.seed)
    state = loop.create_state(task, tx, loss_scale, options.seed)
    sizes = measure.sizes(task, state, options.accumulate_steps, key)
    step = loop.compile_step(task, state, key, options.accumulate_steps)
    probe = measure.LossProbe(task, exact)

    runs = []
    for seed in range(options.seed, options.seed + options.seeds):
        console.print(f"{contender.name}, seed {seed}", style="bold", highlight=False)
        state = loop.create_state(task, tx, loss_scale, seed)
        display = Display(console, options.steps, task.unit)
        watch = _Watch(display, probe, key)
        with display:
            outcome = loop.train(
                task,
                step,
                state,
                jax.random.key(seed),
                seed=seed,
                steps=options.steps,
                intervals=loop.Intervals(options.log_every, options.eval_every),
                observer=watch,
            )
        measured = {"rate": outcome.rate, "skipped": int(outcome.state.skipped)}
        runs.append(outcome.validation | measured | watch.shares() | {"curve": watch.curve})
    return sizes | _summary(contender, runs)


def _summary(contender: Contender, runs: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"policy": contender.policy, "loss_scale": contender.loss_scale}
    for name in ("val_loss", "val_accuracy", "rate", "skipped", "zeroed", "lost"):
        values = [_plain(run[name]) for run in runs]
        mean, spread = _plain(np.mean(values)), _plain(np.std(values))
        summary[name] = {"mean": mean, "spread": spread, "values": values}
    return summary | {"curve": runs[0]["curve"]}


class _Watch:
    """Shows the training, records its validation losses and measures what the precision loses.

    Attributes:
      curve: pairs of step and validation loss.
    """

    def __init__(self, display: Display, probe: measure.LossProbe, key: jax.Array) -> None:
        self.curve: list[tuple[int, float]] = []
        self._probes: list[dict[str, float]] = []
        self._display, self._probe, self._key = display, probe, key

    def shares(self) -> dict[str, float]:
        """Means over the validations of what the precision loses."""
        return {name: float(np.mean([p[name] for p in self._probes])) for name in self._probes[0]}

    def logged(self, records: list[loop.Record], rate: float, seconds_left: float) -> None:
        self._display.update(records[-1], rate, seconds_left)
        self.curve += [(r["step"], _plain(r["val_loss"])) for r in records if "val_loss" in r]

    def state_at(self, state: mpjax.TrainState, batch: chex.ArrayTree) -> None:
        self._probes.append(self._probe(state, batch, self._key))


def _plain(x: float | np.floating) -> float:
    return float(x) if math.isfinite(x) else math.nan
