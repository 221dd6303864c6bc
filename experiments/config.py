"""What can be asked for on the command line. tyro turns these classes into options and `--help`."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.errors import UsageError
from experiments.models import GPTSize, ResNetSize


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData:
    """Text to train on."""

    path: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """A file, read as bytes; by default the documentation that ships with Python."""
    validation: float = 0.1
    """Share of the text, at its end, that is held out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitsData:
    """Handwritten digits of scikit-learn, 1797 images of 8x8 pixels."""

    shift: int = 1
    """Training images are moved by up to that many pixels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What decides how a model is trained."""

    steps: int
    """Training steps."""
    batch_size: int
    """Sequences or images per step."""
    lr: float
    """Peak learning rate of AdamW."""
    accumulate_steps: int = 1
    """Microbatches per step, whose gradients are averaged; must divide the batch size."""
    warmup_steps: int = 50
    """Steps in which the learning rate rises to its peak, before a cosine takes it down."""
    final_lr: float = 0.05
    """Learning rate at the end, as a share of its peak."""
    weight_decay: float = 0.05
    """Weight decay of AdamW."""
    clip: float = 1.0
    """Largest norm of the gradient; larger ones are scaled down to it."""
    seed: int = 0
    """Decides on initial weights, batches and dropout."""
    eval_every: int
    """Steps from one validation to the next."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTTraining(Training):
    """Byte-level transformer (flax.nnx) on text."""

    model: GPTSize = dataclasses.field(default_factory=GPTSize)
    data: TextData = dataclasses.field(default_factory=TextData)
    steps: int = 1100
    batch_size: int = 16
    lr: float = 2e-3
    eval_every: int = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetTraining(Training):
    """Residual network with batch norm (flax.linen) on handwritten digits."""

    model: ResNetSize = dataclasses.field(default_factory=ResNetSize)
    data: DigitsData = dataclasses.field(default_factory=DigitsData)
    steps: int = 400
    batch_size: int = 64
    lr: float = 4e-3
    eval_every: int = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a single run adds: its precision and its directory."""

    policy: str = "auto"
    """A string such as p=f32,c=bf16,o=f32; auto for the fastest on this backend; or a JSON file with a map."""
    loss_scale: str = "auto"
    """auto (dynamic if anything computes in float16), none, a number, or dynamic."""
    out: Path
    """Directory for config.json, metrics.jsonl, checkpoints/ and plots/."""
    resume: Literal["auto", "must", "never"] = "auto"
    """Go on from the last checkpoint: auto: if there is one; must: fail without one; never: replace the run."""
    checkpoint_every: int = 200
    """Steps from one checkpoint to the next; the last three stay, and the best by validation loss."""
    log_every: int = 10
    """Steps between reads of the metrics, for which the host waits."""
    audit: bool = False
    """Print in which precision the train step runs, and what is wrong with it; do not train."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """What happens when training diverges: the loss, or in spite of the loss scale the gradients, are not finite."""

    on_divergence: Literal["raise", "fallback"] = "raise"
    """raise: end with an error; fallback: go on from the last good checkpoint under --fallback-policy."""
    fallback_policy: str = "float32"
    """What --on-divergence fallback goes on under, as --policy takes it."""
    max_skipped: int = 20
    """Number of skipped steps in a row that counts as divergence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """What a run is trained on; it may be resumed on another mesh."""

    mesh: str = ""
    """Such as data=4,model=2: data cuts the batch, fsdp batch and parameters, model parameters; else one device."""
    virtual_devices: int | None = None
    """Split this CPU into that many devices, to try a mesh."""
    processes: str = "1"
    """Processes of this run, each started with the same command; auto asks Cloud TPU, SLURM or MPI."""
    process_id: int | None = None
    """Number of this process, from 0; only process 0 prints and writes."""
    coordinator: str | None = None
    """Address at which process 0 can be reached, such as 10.0.0.1:1234."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTRun(GPTTraining, Run, Divergence, Devices):
    """Train a byte-level transformer (flax.nnx) on the documentation that ships with Python."""

    out: Path = Path("runs/gpt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetRun(ResNetTraining, Run, Divergence, Devices):
    """Train a residual network with batch norm (flax.linen) on handwritten digits."""

    out: Path = Path("runs/resnet")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison adds."""

    seeds: int = 1
    """Runs per policy, with seeds --seed, --seed + 1, and so on; more give a mean and a spread."""
    gate: tuple[str, ...] = ()
    """Such as loss=1% rate=10% bytes=-20%: how much worse than float32 a mixed policy may be, else exit 1."""
    out: Path
    """Directory for results.json and compare.png."""
    log_every: int = 10
    """Steps between reads of the metrics, for which the host waits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTComparison(GPTTraining, Comparison):
    """Compare policies on a byte-level transformer (flax.nnx)."""

    steps: int = 300
    out: Path = Path("runs/compare-gpt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetComparison(ResNetTraining, Comparison):
    """Compare policies on a residual network with batch norm (flax.linen)."""

    steps: int = 200
    out: Path = Path("runs/compare-resnet")


RUNS: dict[str, Any] = {"gpt": GPTRun, "resnet": ResNetRun}
COMPARISONS: dict[str, Any] = {"gpt": GPTComparison, "resnet": ResNetComparison}


def parse(commands: dict[str, Any], argv: Sequence[str], prog: str, description: str) -> Any:
    """Returns the options of one of several commands.

    Args:
      commands: from a command's name to the class of its options.
      argv: the command line after the program's name.
      prog: how the program is called.
      description: what `--help` says first.

    Raises:
      UsageError: if a value is out of its range.
    """
    options = tyro.extras.subcommand_cli_from_dict(
        commands, args=list(argv), prog=prog, description=description
    )
    check(options)
    return options


def check(options: Any) -> None:
    """Raises a UsageError that names the first option whose value is out of its range."""
    for name in _COUNTS & vars(options).keys():
        _require(name, getattr(options, name) >= 1, getattr(options, name), "at least 1")
    _require("lr", 0 < options.lr < math.inf, options.lr, "a positive number such as 3e-3")
    _require("clip", options.clip > 0, options.clip, "positive; a large one never clips")
    _require("warmup_steps", options.warmup_steps >= 0, options.warmup_steps, "at least 0")
    _require("weight_decay", options.weight_decay >= 0, options.weight_decay, "at least 0")
    _require("final_lr", 0 <= options.final_lr <= 1, options.final_lr, "from 0 to 1")
    _require("seed", options.seed >= 0, options.seed, "at least 0")
    if options.batch_size % options.accumulate_steps:
        raise UsageError(
            f"--batch-size {options.batch_size} cannot be cut into --accumulate-steps "
            f"{options.accumulate_steps} equal microbatches; make the one a multiple of the other"
        )
    _check_model(options.model)


_COUNTS = {
    "steps",
    "batch_size",
    "accumulate_steps",
    "eval_every",
    "checkpoint_every",
    "log_every",
    "seeds",
    "max_skipped",
}


def _check_model(size: GPTSize | ResNetSize) -> None:
    for field in dataclasses.fields(size):
        value = getattr(size, field.name)
        if isinstance(value, int):
            _require(f"model.{field.name}", value >= 1, value, "at least 1")
    if isinstance(size, GPTSize):
        _require("model.dropout", 0 <= size.dropout < 1, size.dropout, "from 0 to below 1")
        if size.width % size.heads:
            raise UsageError(
                f"--model.width {size.width} cannot be divided among --model.heads {size.heads}; "
                "make the width a multiple of the heads"
            )


def _require(name: str, holds: bool, value: object, expected: str) -> None:
    if not holds:
        raise UsageError(f"--{name.replace('_', '-')} must be {expected}, got {value}")
