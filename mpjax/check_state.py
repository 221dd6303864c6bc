"""Findings about the state of a step: what goes in must come out in the same dtypes."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from mpjax import costs, graphs
from mpjax.findings import ERROR, NOTE, WARNING, Findings
from mpjax.places import OPTIMIZER
from mpjax.programs import Op, Program, Value

# What the next value of a state is made from the last one with.
_UPDATES = {
    *graphs.MOVES,
    *graphs.ADDITIONS,
    *(
        "mul",
        "div",
        "max",
        "min",
        "select_n",
        "branches",
        "dynamic_update_slice",
        "scatter-add",
        "loop carry",
    ),
    graphs.CAST,
}


def check(found: Findings) -> None:
    """Compares each state of a step with its next value."""
    for path, before, after in states(found.program):
        if before.dtype != after.dtype:
            found.add(
                "state-dtype",
                ERROR,
                after.op,
                f"State '{path}' comes in as {before.dtype} and goes out as {after.dtype}.",
                f"{before} → {after}",
            )
        elif _is_weak(before) != _is_weak(after):
            now, then = ("weakly", "strongly") if _is_weak(before) else ("strongly", "weakly")
            found.add(
                "state-dtype",
                NOTE,
                after.op,
                f"State '{path}' comes in {now} typed, as a Python number, and goes out {then} typed: the second "
                "call is traced again.",
                f"{before} → {after}",
            )
        elif costs.is_half(after) and (update := _direct_update(before, after)) is not None:
            found.add(
                "half-update",
                WARNING,
                update,
                f"State '{path}' is stored in {after.dtype.name} and updated by addition.",
                f"{before} → {after}",
            )


def states(program: Program) -> Iterator[tuple[str, Value, Value]]:
    """Path, old and new value of what an argument and a result with the same structure hold.

    A tree of gradients has the structure of the parameters too, so one of the new values must be made from the
    old one.
    """
    outs = _subtrees(program.out)
    start = 0
    taken: set[int] = set()
    for number, arg in enumerate(program.args):
        paths = [p for p, _ in jax.tree_util.tree_flatten_with_path(arg)[0]]
        before = program.inputs[start : start + len(paths)]
        start += len(paths)
        for structure, position, size in outs:
            after = program.outputs[position : position + size]
            same = structure == jax.tree.structure(arg) and [v.shape for v in before] == [
                v.shape for v in after
            ]
            if not same or not before or position in taken:
                continue
            # A layer, too, returns one array of the shape that it takes.
            if len(before) == 1 and (after[0].op is None or after[0].op.phase != OPTIMIZER):
                continue
            if any(_descends(a, b) for a, b in zip(after, before, strict=True)):
                taken.add(position)
                for path, b, a in zip(paths, before, after, strict=True):
                    yield _path(path, number), b, a
                break


def _subtrees(out: Any) -> list[tuple[Any, int, int]]:
    """Structure, first leaf and number of leaves of the result and, if it is a tuple, of its elements."""
    found = [(jax.tree.structure(out), 0, len(jax.tree.leaves(out)))]
    if type(out) in (tuple, list):
        position = 0
        for element in out:
            size = len(jax.tree.leaves(element))
            found.append((jax.tree.structure(element), position, size))
            position += size
    return found


def _descends(after: Value, before: Value, steps: int = 200) -> bool:
    pending, seen = [after], {id(after)}
    for value in pending:
        if value is before:
            return True
        if value.op is None or value.op.name not in _UPDATES or len(seen) > steps:
            continue
        for operand in value.op.ins:
            if id(operand) not in seen:
                seen.add(id(operand))
                pending.append(operand)
    return False


def _direct_update(before: Value, after: Value) -> Op | None:
    """The addition that makes the new value from the old one, if it is one."""
    through = (graphs.CAST,)
    op = graphs.source(after, through=through).op
    if op is not None and op.name == "branches":
        candidates = [graphs.source(v, through=through).op for v in op.ins[1:]]
        op = next((c for c in candidates if c is not None and c.name in graphs.ADDITIONS), None)
    if op is None or op.name not in graphs.ADDITIONS:
        return None
    adds = any(graphs.source(v, through=through) is before for v in op.ins)
    return op if adds and op.phase == OPTIMIZER else None


def _is_weak(value: Value) -> bool:
    return bool(getattr(value.aval, "weak_type", False)) and isinstance(value.dtype, np.dtype)


def _path(path: tuple[Any, ...], number: int) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or f"argument {number}"
