"""A traced program as one flat graph of operations.

Inner jaxprs (jit, remat, custom derivatives, scan, while, cond, shard_map) are opened: each operation knows how
often it runs, its module, phase and source line, and which operations its operands come from.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from mpjax._audit import source_locations
from mpjax._audit.source_locations import FORWARD, Line
from mpjax._precision.module_scope import OUTPUT_SCOPE, Classes

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


class Value:
    """A value of the program.

    Attributes:
      aval: its shape and dtype.
      op: the operation that makes it; None for an input or a constant.
      uses: the operations that take it.
      const: its numbers, if it is a constant.
      name: the path among the arguments, if it is an input.
      given: the argument, if it is an input.
    """

    __slots__ = ("aval", "const", "given", "name", "op", "uses")

    def __init__(
        self,
        aval: Any,
        op: "Op | None" = None,
        const: Any = None,
        name: str | None = None,
        given: Any = None,
    ) -> None:
        self.aval = aval
        self.op = op
        self.uses: list[Op] = []
        self.const = const
        self.name = name
        self.given = given

    @property
    def dtype(self) -> Any:
        return getattr(self.aval, "dtype", None)

    @property
    def shape(self) -> tuple[int, ...]:
        return getattr(self.aval, "shape", ())

    @property
    def nbytes(self) -> int:
        itemsize = getattr(self.dtype, "itemsize", 0)
        return math.prod(d for d in self.shape if isinstance(d, int)) * itemsize

    def __str__(self) -> str:
        return f"{getattr(self.dtype, 'name', self.dtype)}[{','.join(map(str, self.shape))}]"


class Op:
    """An operation of the program.

    Attributes:
      name: its primitive.
      eqn: its equation.
      ins: operands.
      outs: results.
      stack: the whole name stack.
      count: how often it runs in one call of the program, on all devices.
      devices: how many devices it runs on at once, in a sharded function.
      call: the equation around it (jit, scan), of which the source line is asked if its own is not known.
      path: module path, and the scopes within it; empty for the model itself and for plain functions. It starts with
        the class of the model if the program has several.
      module: the path as a policy map matches it.
      model: the class of the model; empty if unknown.
      phase: forward, backward or optimizer.
      live: whether a result or an effect of the program depends on it.
      glue: whether it stands for what enters or leaves an inner jaxpr and computes nothing.
    """

    __slots__ = (
        *(
            "call",
            "count",
            "devices",
            "eqn",
            "glue",
            "ins",
            "live",
            "model",
            "module",
            "name",
            "outs",
            "path",
        ),
        *("phase", "stack"),
    )

    def __init__(
        self, name: str, eqn: Any, ins: list[Value], stack: str, count: int, call: "Op | None", glue: bool
    ) -> None:
        self.name = name
        self.eqn = eqn
        self.ins = ins
        self.outs: list[Value] = []
        self.stack = stack
        self.count = count
        self.devices = 1
        self.call = call
        self.glue = glue
        self.live = False
        self.path = self.module = self.model = ""
        self.phase = FORWARD
        for value in ins:
            value.uses.append(self)

    @property
    def line(self) -> Line:
        """The user's source line; if all of the program is installed, that of the package that it belongs to."""
        return next(
            (line for choose in source_locations.LINES if (line := self._line(choose)) is not None), Line()
        )

    @property
    def full_precision(self) -> bool:
        return source_locations.scope(self.stack).full_precision

    @property
    def handed_over(self) -> bool:
        """Whether it is the cast by which a module under a policy hands over a result."""
        return OUTPUT_SCOPE in self.stack

    @property
    def out(self) -> Value:
        return self.outs[0]

    def _line(self, choose: Callable[[list[Line]], Line | None]) -> Line | None:
        op: Op | None = self
        while op is not None:
            found = choose(source_locations.frames(op.eqn.source_info.traceback))
            if found is not None:
                return found
            op = op.call
        return None


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan or while loop: how often it runs, None if not known, and (start, carry, next carry) of each carry."""

    length: int | None
    carries: tuple[tuple[Value, Value, Value], ...]


@dataclasses.dataclass(frozen=True)
class LostConstant:
    """A Python or numpy number that became infinite or zero when it was cast to 16 bits in tracing.

    `frames` are those of the program that ran then, the innermost first.
    """

    number: float
    overflow: bool
    frames: tuple[Line, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced program.

    Attributes:
      ops: all operations, glue included, each after those it depends on.
      inputs: the leaves of the arguments.
      outputs: the leaves of the results.
      args: the arguments, abstract.
      out: the results, abstract.
      loops: all loops.
      lost: numbers that did not survive a cast in tracing.
      root: the class of the model, which paths leave out; None without or with several models.
      classes: those of the modules that are known, by path, for each class of a model.
      jaxpr: what was read.
    """

    ops: list[Op]
    inputs: list[Value]
    outputs: list[Value]
    args: tuple[Any, ...]
    out: Any
    loops: list[Loop]
    lost: list[LostConstant]
    root: str | None
    classes: Classes
    jaxpr: Any

    def computing(self) -> Iterator[Op]:
        """The operations that compute something that is used."""
        return (op for op in self.ops if op.live and not op.glue)

    def products(self) -> list[Op]:
        return [op for op in self.computing() if op.name in PRODUCTS]
