"""Findings about the state of a step: what goes in must come out in the same dtypes."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from mpjax._audit import dataflow
from mpjax._audit.findings import Findings
from mpjax._audit.program import CAST, Op, Program, Value
from mpjax._audit.records import ERROR, NOTE, WARNING
from mpjax._audit.source_locations import OPTIMIZER
from mpjax._precision import dtypes
from mpjax._precision.ops import Trait, with_trait

# By which the next value of a state is made from the last one.
_UPDATES = dataflow.MOVES | dataflow.ADDITIONS | with_trait(Trait.UPDATE) | {"branches", "loop carry"}


def check(found: Findings) -> None:
    """Compares each state of a step with its next value."""
    for path, before, after in states(found.program):
        if before.dtype != after.dtype:
            found.add(
                "state-dtype",
                ERROR,
                after.op,
                f"State '{path}' is {before.dtype} in the arguments and {after.dtype} in the result.",
                f"{before} → {after}",
            )
        elif _is_weak(before) != _is_weak(after):
            now, then = ("weakly", "strongly") if _is_weak(before) else ("strongly", "weakly")
            found.add(
                "state-dtype",
                NOTE,
                after.op,
                f"State '{path}' is {now} typed in the arguments and {then} typed in the result: the second "
                "call is traced again.",
                f"{before} → {after}",
            )
        elif after.is_half and (update := _direct_update(before, after)) is not None:
            found.add(
                "half-update",
                WARNING,
                update,
                f"State '{path}' is stored in {after.dtype.name} and updated by addition.",
                f"{before} → {after}",
            )


@dataclasses.dataclass(frozen=True)
class _Part:
    """A subtree of the arguments or results: where its leaves begin, and its path."""

    tree: Any
    start: int
    path: tuple[Any, ...] = ()

    @functools.cached_property
    def size(self) -> int:
        return len(jax.tree.leaves(self.tree))

    @functools.cached_property
    def structure(self) -> Any:
        return jax.tree.structure(self.tree)

    def children(self) -> list["_Part"]:
        flat, _ = jax.tree_util.tree_flatten_with_path(self.tree, is_leaf=lambda x: x is not self.tree)
        parts, start = [], self.start
        for path, child in flat:
            if path:
                parts.append(_Part(child, start, (*self.path, *path)))
                start += parts[-1].size
        return parts

    def all(self) -> Iterator["_Part"]:
        """It and all that it holds, the whole first."""
        yield self
        for child in self.children():
            yield from child.all()


def states(program: Program) -> Iterator[tuple[str, Value, Value]]:
    """Path, old and new value of what arguments and parts of the result with the same structure hold.

    A tree of gradients has the structure of the parameters too, so one of the new values must be made from the
    old one. Of several parts that do, the one with the dtypes of the argument is its next value.
    """
    results = [part for part in _Part(program.out, 0).all() if part.size]
    taken: set[int] = set()

    def pairs(number: int, old: _Part) -> Iterator[tuple[str, Value, Value]]:
        before = program.inputs[old.start : old.start + old.size]
        found = [
            (new, after)
            for new in results
            if new.size == old.size and new.start not in taken and new.structure == old.structure
            if _has_shapes(after := program.outputs[new.start : new.start + new.size], before)
            if _is_next(program, before, after, is_tree=bool(old.children()))
        ]
        if not found:
            for child in old.children():
                yield from pairs(number, child)
            return
        new, after = min(found, key=lambda pair: _changes(before, pair[1]))
        taken.update(range(new.start, new.start + new.size))
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(old.tree)[0]]
        for path, b, a in zip(paths, before, after, strict=True):
            yield _path((*old.path, *path), number), b, a

    start = 0
    for number, arg in enumerate(program.args):
        part = _Part(arg, start)
        start += part.size
        yield from pairs(number, part)


def _changes(before: list[Value], after: list[Value]) -> int:
    return sum(a.dtype != b.dtype for a, b in zip(after, before, strict=True))


def _has_shapes(after: list[Value], before: list[Value]) -> bool:
    return bool(before) and [v.shape for v in after] == [v.shape for v in before]


def _is_next(program: Program, before: list[Value], after: list[Value], *, is_tree: bool) -> bool:
    """Whether some new value is made from its old one, as a step makes it and not a layer or a pipeline of data."""
    updated = [(a, b) for a, b in zip(after, before, strict=True) if _descends(a, b)]
    if any(a.op is not None and a.op.phase == OPTIMIZER for a, _ in updated):
        return True
    # Without an optimizer, what takes in nothing but the old values only converts them.
    own = {id(v) for v in before}
    others = {id(v) for v in program.inputs} - own
    return is_tree and any(_depends(a, others) for a, _ in updated)


def _depends(value: Value, others: set[int], steps: int = 10_000) -> bool:
    pending, seen = [value], {id(value)}
    for v in pending:
        if id(v) in others:
            return True
        if v.op is not None and len(seen) < steps:
            new = [x for x in v.op.ins if id(x) not in seen]
            seen.update(map(id, new))
            pending += new
    return False


def _descends(after: Value, before: Value, steps: int = 200) -> bool:
    """Whether a value is an update of another: it holds it in full, plus or minus something."""
    pending, seen = [after], {id(after)}
    for value in pending:
        if value is before:
            return True
        if value.op is None or value.op.name not in _UPDATES or len(seen) > steps:
            continue
        for operand in value.op.ins:
            if id(operand) not in seen and not _is_small_part(value.op, operand):
                seen.add(id(operand))
                pending.append(operand)
    return False


def _is_small_part(op: Op, operand: Value) -> bool:
    """Whether less than half of an operand goes in, as of a weight in its decay or of a value in an average."""
    factor = _factor(op, operand)
    return factor is not None and factor < 0.5


def _factor(op: Op, operand: Value) -> float | None:
    """The constant that an operation multiplies an operand by, if it does."""
    if op.name not in ("mul", "div"):
        return None
    others = [dataflow.constant(v) for v in op.ins if v is not operand]
    if not others or others[0] is None or others[0].size != 1 or not others[0].any():
        return None
    factor = abs(float(others[0].reshape(())))
    return 1 / factor if op.name == "div" else factor


def _direct_update(before: Value, after: Value) -> Op | None:
    """The addition that makes the new value from the old one, if it is one, also where a step may be skipped."""
    through = (CAST,)
    pending = [after]
    for value in pending:
        op = dataflow.source(value, through=through).op
        if op is None or len(pending) > 20:
            continue
        if op.name in ("branches", "select_n"):
            pending += op.ins[1:]
        elif (
            op.name in dataflow.ADDITIONS and op.phase == OPTIMIZER and any(_holds(v, before) for v in op.ins)
        ):
            return op
    return None


def _holds(value: Value, before: Value) -> bool:
    """Whether an operand is the old value, or so much of it that the format cannot hold the rest: `0.999 * v`."""
    origin = dataflow.source(value, through=(CAST,))
    if origin is before:
        return True
    op = origin.op
    if op is None or op.name != "mul":
        return False
    held = [v for v in op.ins if dataflow.source(v, through=(CAST,)) is before]
    if len(held) != 1 or any(
        math.prod(dataflow.source(v).shape) > 1 and dataflow.constant(v) is None
        for v in op.ins
        if v is not held[0]
    ):
        return False
    factor = _factor(op, held[0])
    return factor is None or abs(1 - factor) < 1 / dtypes.limits(before.dtype).count


def _is_weak(value: Value) -> bool:
    return bool(getattr(value.aval, "weak_type", False)) and isinstance(value.dtype, np.dtype)


def _path(path: tuple[Any, ...], number: int) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or f"argument {number}"
