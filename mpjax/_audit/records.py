"""What an audit finds, as plain numbers and texts: the parts that `mpjax.Audit` is made of."""

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import TypeVar

from mpjax._audit.source_locations import Line

K = TypeVar("K", bound=Hashable)

ERROR, WARNING, NOTE = SEVERITIES = ("error", "warning", "note")


@dataclasses.dataclass(frozen=True)
class Matmuls:
    """Matmuls and convolutions of one module in one phase whose operands have the same dtypes.

    Attributes:
      module: `/`-joined path; empty for the model itself and for plain functions.
      phase: "forward", "backward" or "optimizer".
      operands: their dtype; of two dtypes both, as in "bfloat16 × float32".
      count: how often such a matmul runs, each step of a loop counted.
      flops: multiplications and additions of all of them.
    """

    module: str
    phase: str
    operands: str
    count: int
    flops: int


@dataclasses.dataclass(frozen=True)
class Casts:
    """Casts of one module in one phase from one floating format to another.

    Attributes:
      module: `/`-joined path.
      phase: "forward", "backward" or "optimizer".
      before: the dtype that is cast.
      after: the dtype it is cast to.
      count: how often such a cast runs.
      bytes: what all of them write, unless the compiler fuses them into what follows.
    """

    module: str
    phase: str
    before: str
    after: str
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Saved:
    """What the forward pass of one module makes and the backward pass takes, in bytes on all devices."""

    module: str
    dtype: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something about the precision of a program that someone should look at.

    Attributes:
      kind: one of the kinds in docs/audit.md, such as "silent-upcast".
      severity: "error", "warning" or "note".
      module: path of the module; empty for the model itself and for plain functions.
      phase: "forward", "backward" or "optimizer".
      file: the source file; empty if unknown.
      line: the line in it.
      message: what was found.
      shapes: the values it is about, such as `float32[16,128] × bfloat16[128,64]`.
      share: the part of the program's FLOPs (of matmuls) or bytes (of results) that it concerns, from 0 to 1.
      share_of: "FLOPs" or "bytes".
      count: how many operations of the program it stands for.
      why: why it matters.
      fix: what to do.
    """

    kind: str
    severity: str
    module: str
    phase: str
    file: str
    line: int
    message: str
    shapes: str
    share: float
    share_of: str
    count: int
    why: str
    fix: str

    @property
    def where(self) -> str:
        """File and line as a person would type them."""
        return str(Line(self.file, self.line))

    def __str__(self) -> str:
        where = f"{self.module or '(model)'}, {self.phase}, {self.where}"
        times = f", {self.count} times" if self.count > 1 else ""
        return (
            f"{self.severity}: {self.kind} in {where}\n"
            f"  {self.message}\n"
            f"  {self.shapes}{times}: {percentage(self.share)} of the {self.share_of}\n"
            f"  Why it matters: {self.why}\n"
            f"  What to do: {self.fix}"
        )


@dataclasses.dataclass(frozen=True)
class Lowering:
    """Operand dtypes of the matmuls of a program, before and after lowering for a platform.

    Attributes:
      platform: what it was lowered for.
      traced: how many matmuls of the traced program take which operands, each written once however often a loop
        runs it.
      lowered: the same of the StableHLO.
    """

    platform: str
    traced: dict[str, int]
    lowered: dict[str, int]

    @property
    def differences(self) -> dict[str, tuple[int, int]]:
        """From operand dtypes to how many matmuls were traced and how many lowered, where these differ."""
        names = sorted(self.traced | self.lowered)
        pairs = {n: (self.traced.get(n, 0), self.lowered.get(n, 0)) for n in names}
        return {n: (before, after) for n, (before, after) in pairs.items() if before != after}


@dataclasses.dataclass(frozen=True)
class Records:
    """All that an audit holds.

    Attributes:
      name: of the function.
      matmuls: matmuls and convolutions by module, phase and operand dtypes.
      casts: casts by module, phase and dtypes.
      saved: bytes saved for the backward pass by module and dtype.
      operations: how many operations of any kind the program has, by module and phase.
      findings: what is wrong, the most severe first.
      lowering: the matmuls for another platform, if one was asked for.
    """

    name: str
    matmuls: tuple[Matmuls, ...]
    casts: tuple[Casts, ...]
    saved: tuple[Saved, ...]
    operations: tuple[tuple[str, str, int], ...]
    findings: tuple[Finding, ...]
    lowering: Lowering | None = None

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of matmuls and convolutions by operand dtypes."""
        return summed((m.operands, m.flops) for m in self.matmuls)

    @property
    def total_flops(self) -> int:
        """FLOPs of all matmuls and convolutions."""
        return sum(m.flops for m in self.matmuls)

    @property
    def cast_bytes(self) -> int:
        """Bytes that casts write."""
        return sum(c.bytes for c in self.casts)

    @property
    def saved_bytes(self) -> dict[str, int]:
        """Bytes saved for the backward pass by dtype."""
        return summed((s.dtype, s.bytes) for s in self.saved)

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of all modules that have operations, in the order in which they first run."""
        return tuple(dict.fromkeys(module for module, _, _ in self.operations))


def summed(pairs: Iterable[tuple[K, int]]) -> dict[K, int]:
    """The sum of the numbers of each key."""
    total: dict[K, int] = defaultdict(int)
    for key, n in pairs:
        total[key] += n
    return dict(total)


def percentage(share: float) -> str:
    """A share as a percentage that does not round a small one to zero."""
    return "<0.1 %" if 0 < share < 0.001 else f"{100 * share:.1f} %"
