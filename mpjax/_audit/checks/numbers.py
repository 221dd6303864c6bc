"""Findings about arithmetic in 16 bits: functions and constants that the format is too small for."""

import math
import re

import jax.numpy as jnp
import numpy as np

from mpjax._audit import dataflow, source_locations
from mpjax._audit import flops as costs
from mpjax._audit.findings import ERROR, WARNING, Findings
from mpjax._audit.program import LostConstant, Op, Value
from mpjax._audit.source_locations import Line
from mpjax._precision import dtypes

_COLLECTIVES = ("psum", "psum2", "psum_invariant", "reduce_scatter", "psum_scatter", "all_reduce")
_NARROW_RANGE = {
    *("exp", "exp2", "expm1", "log", "log1p", "pow", "rsqrt", "erf_inv", "lgamma", "digamma", "cumlogsumexp"),
}
_TAKES_CONSTANT = ("add", "sub", "max", "min", "mul", "div", "clamp", "select_n", "pow", "broadcast_in_dim")


def check(found: Findings) -> None:
    """Looks at every operation."""
    for op in found.program.computing():
        _range(found, op)
        _collective(found, op)
        if op.name == dataflow.CAST:
            _cast_constant(found, op)
    _literals(found)


# -------------------------------------------------------------------------------------------- functions


def _range(found: Findings, op: Op) -> None:
    if not op.ins or op.ins[0].dtype != jnp.float16:
        return
    if op.name in _NARROW_RANGE:
        name = "softmax" if op.name == "exp" and _is_shifted_by_maximum(op.ins[0]) else op.name
        found.add("half-range", WARNING, op, f"'{name}' runs in float16.")
    elif _is_square(op) and _is_added_up(op.out):
        found.add("half-range", WARNING, op, "A variance or mean square takes its squares in float16.")


def _is_shifted_by_maximum(value: Value) -> bool:
    op = value.op
    if op is None or op.name != "sub":
        return False
    shift = dataflow.source(op.ins[1]).op
    while shift is not None and shift.name == "max":  # with the initial -inf
        shift = next((s.op for s in map(dataflow.source, shift.ins) if s.op is not None), None)
    return shift is not None and shift.name == "reduce_max"


def _is_square(op: Op) -> bool:
    if op.name == "mul":
        return op.ins[0] is op.ins[1]
    return op.name == "square" or (op.name == "integer_pow" and op.eqn.params["y"] == 2)


def _is_added_up(square: Value, depth: int = 4) -> bool:
    """Whether a value goes into a sum, past casts and past other squares that are added to it."""
    for use, _ in dataflow.uses(square):
        if use.name in ("reduce_sum", "reduce_window_sum"):
            return True
        if use.name in (dataflow.CAST, *dataflow.ADDITIONS) and depth and _is_added_up(use.out, depth - 1):
            return True
    return False


# -------------------------------------------------------------------------------------------- constants


def _cast_constant(found: Findings, op: Op) -> None:
    """Constants that the traced program itself casts, alone or in a mask."""
    if not costs.is_half(op.out) or not costs.is_floating(op.ins[0]):
        return
    before = dataflow.constant(op.ins[0])
    numbers = _mask_constants(op.ins[0]) if before is None else before.reshape(-1)
    with np.errstate(all="ignore"):
        after = np.asarray(numbers).astype(op.out.dtype).astype(np.float64)
    overflowed = np.isfinite(numbers) & ~np.isfinite(after)
    vanished = (numbers != 0) & (after == 0)
    if overflowed.any():
        _overflows(found, op, numbers[overflowed][0], op.out)
    if before is not None and vanished.size and vanished.all():
        _vanishes(found, op, numbers[vanished][0], op.out)


def _mask_constants(value: Value) -> np.ndarray:
    """The constants that a mask such as `where(m, 0, -1e9)` or `(1 - m) * -1e9` puts into its places."""
    op = dataflow.source(value).op
    found: list[np.ndarray | None] = []
    if op is not None and op.name == "select_n":
        found = [dataflow.constant(v) for v in op.ins[1:]]
    elif op is not None and op.name == "mul" and any(_is_zero_or_one(v) for v in op.ins):
        found = [dataflow.constant(v) for v in op.ins]
    numbers = [c.reshape(-1).astype(np.float64) for c in found if c is not None]
    return np.concatenate(numbers) if numbers else np.zeros(0)


def _is_zero_or_one(value: Value) -> bool:
    """Whether a value was made from a mask: cast from bools or integers, or one minus such."""
    op = dataflow.source(value, through=(dataflow.CAST,)).op
    if op is not None and op.name == "sub":
        one = dataflow.constant(op.ins[0])
        return one is not None and bool(np.all(one == 1)) and _is_zero_or_one(op.ins[1])
    origin = dataflow.source(value, through=(dataflow.CAST,))
    return origin.dtype == np.bool_ or (origin.dtype is not None and np.issubdtype(origin.dtype, np.integer))


def _literals(found: Findings) -> None:
    """Constants that were cast when the program was traced, so that only their ruins are left in it."""
    ruins: dict[tuple[bool, Line], list[Op]] = {}
    for op in found.program.computing():
        for overflow in {bool(v.const) for v in op.ins if _is_ruin(op, v)}:
            ruins.setdefault((overflow, op.line), []).append(op)
    reported: set[tuple[int, float]] = set()
    for lost in found.program.lost:
        at_line = ruins.get((lost.overflow, _line_of(lost)), [])
        # Of several at a line those that JAX was called for by the same path.
        for op in [op for op in at_line if _is_same_call(lost, op)] or at_line:
            if (id(op), lost.number) not in reported:
                reported.add((id(op), lost.number))
                operand = next(v for v in op.ins if _is_ruin(op, v) and bool(v.const) == lost.overflow)
                (_overflows if lost.overflow else _vanishes)(found, op, lost.number, operand)


def _is_ruin(op: Op, operand: Value) -> bool:
    if op.name not in _TAKES_CONSTANT or operand.const is None or operand.shape:
        return False
    return costs.is_half(operand) and (operand.const == 0 or math.isinf(operand.const))


def _line_of(lost: LostConstant) -> Line:
    return source_locations.line(list(lost.frames))


def _is_same_call(lost: LostConstant, op: Op) -> bool:
    """Whether the line called JAX for the cast of a number in the same way as for this operation."""
    called = _called(list(lost.frames))
    return called is not None and called == _called(source_locations.frames(op.eqn.source_info.traceback))


def _called(frames: list[Line]) -> tuple[str, int] | None:
    """Where the user's line called into a library."""
    position = next((i for i, f in enumerate(frames) if f == source_locations.user_line(frames)), 0)
    return (frames[position - 1].file, frames[position - 1].line) if position else None


def _overflows(found: Findings, op: Op, number: float, cast: Value) -> None:
    limit = dtypes.limits(cast.dtype).max
    message = f"The constant {_spelled(number)} is outside of {cast.dtype.name}, which ends at {limit:g}."
    found.add("mask-overflow", ERROR, op, message)


def _vanishes(found: Findings, op: Op, number: float, cast: Value) -> None:
    smallest = dtypes.limits(cast.dtype).smallest_subnormal
    message = f"The constant {_spelled(number)} is zero in {cast.dtype.name}, whose smallest number is {smallest:.2g}."
    found.add("vanishing-constant", ERROR, op, message)


def _spelled(number: float) -> str:
    """A number as a person would write it: 1e9 rather than 1e+09."""
    return re.sub(r"e([+-])0*", lambda e: "e-" if e[1] == "-" else "e", f"{number:g}")


# ------------------------------------------------------------------------------------------ collectives


def _collective(found: Findings, op: Op) -> None:
    if op.name in _COLLECTIVES:
        for value in op.ins:
            if costs.is_half(value):
                axes = op.eqn.params.get("axes", op.eqn.params.get("axis_name"))
                message = f"'{op.name}' over {axes} adds up {value.dtype.name} values."
                found.add("half-collective", WARNING, op, message, str(value))
