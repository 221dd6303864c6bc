"""What can be asked for on the command line of `python -m experiments.bench`."""

import dataclasses
from collections.abc import Callable
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """What every suite takes."""

    out: Path = Path("runs/bench")
    """Directory for SUITE.json and SUITE.png."""
    rounds: int
    """How often each contender is measured, by turns."""
    quick: bool = False
    """Tiny sizes and few rounds: only to see that it runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale(Suite):
    """Dynamic loss scaling on an optimizer-bound float16 MLP: mpjax, hand-written, jmp, Flax, mpx."""

    rounds: int = 25
    layers: int = 16
    """Matrices."""
    width: int = 1024
    """Rows and columns of each."""
    batch: int = 4
    """Examples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT(Suite):
    """The whole step of a GPT in float32, bfloat16 and float16: mpjax, hand-written, Flax, jmp, and PyTorch."""

    rounds: int = 3
    layers: int = 4
    """Blocks."""
    width: int = 512
    """Features."""
    batch: int = 8
    """Sequences."""
    length: int = 256
    """Tokens in each."""
    vocabulary: int = 1024
    """Different tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNet(Suite):
    """The whole step of a residual network in float32, bfloat16 and float16: mpjax, Flax, jmp."""

    rounds: int = 7
    blocks: int = 4
    """Residual blocks."""
    channels: int = 64
    """Channels."""
    batch: int = 32
    """Images."""
    size: int = 16
    """Height and width of an image, in pixels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace(Suite):
    """Time to trace, lower and compile a step: mpjax against Flax with a dtype on each layer."""

    rounds: int = 3
    layers: tuple[int, ...] = (4, 24)
    """Numbers of blocks, scanned and not."""
    binds: int = 2000
    """Operations traced to find what one costs when no policy is active."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling(Suite):
    """What policy, scale and finite check add as parameters and (virtual) devices grow."""

    rounds: int = 7
    parameters: tuple[float, ...] = (1e5, 1e6, 1e7, 1e8, 1e9)
    """Parameter counts; those above --largest are traced and costed, not run."""
    largest: float = 3e7
    """Most parameters that are run."""
    devices: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPU(Suite):
    """A GPT of about 350 M parameters on a GPU: tokens/s, share of the peak, memory, largest batch."""

    rounds: int = 10
    layers: int = 24
    """Blocks."""
    width: int = 1024
    """Features."""
    batch: int = 8
    """Sequences."""
    length: int = 1024
    """Tokens in each."""
    vocabulary: int = 50304
    """Different tokens."""
    largest_batch: bool = True
    """Also double the batch until memory ends."""


SUITES: dict[str, Callable[..., Suite]] = {
    "loss_scale": LossScale,
    "gpt": GPT,
    "resnet": ResNet,
    "trace": Trace,
    "scaling": Scaling,
    "gpu": GPU,
}
TINY: dict[type[Suite], Suite] = {
    LossScale: LossScale(rounds=2, layers=2, width=8, batch=2),
    GPT: GPT(rounds=2, layers=1, width=16, batch=2, length=8, vocabulary=32),
    ResNet: ResNet(rounds=2, blocks=1, channels=4, batch=2, size=4),
    Trace: Trace(rounds=1, layers=(1,), binds=5),
    Scaling: Scaling(rounds=2, parameters=(1e3, 1e5), largest=1e4, devices=(2,)),
    GPU: GPU(rounds=2, layers=1, width=64, batch=1, length=8, vocabulary=32, largest_batch=False),
}
"""What `--quick` makes of each suite."""
