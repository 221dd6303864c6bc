"""Findings about arithmetic in 16 bits: functions and constants that the format is too small for."""

import math
import re
from collections import Counter
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from mpjax._audit import dataflow, source_locations
from mpjax._audit.findings import Findings
from mpjax._audit.program import CAST, LostConstant, Op, Program, Value
from mpjax._audit.records import ERROR, WARNING
from mpjax._audit.source_locations import CallSite
from mpjax._precision import dtypes
from mpjax._precision.ops import Trait, with_trait

_COLLECTIVES = with_trait(Trait.COLLECTIVE_SUM)
_NARROW_RANGE = with_trait(Trait.NARROW_RANGE)
_TAKES_CONSTANT = with_trait(Trait.TAKES_CONSTANT)


def check(found: Findings) -> None:
    """Looks at every operation."""
    for op in found.program.computing():
        _range(found, op)
        _collective(found, op)
        if op.name == CAST:
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
        if use.name in (CAST, *dataflow.ADDITIONS) and depth and _is_added_up(use.out, depth - 1):
            return True
    return False


# -------------------------------------------------------------------------------------------- constants


def _cast_constant(found: Findings, op: Op) -> None:
    """Constants that the traced program itself casts, alone or in a mask."""
    if not op.out.is_half or not op.ins[0].is_floating:
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
    """The constants that a mask such as `where(m, 0, -1e9)` or `(1 - m) * -1e9` puts in."""
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
    op = dataflow.source(value, through=(CAST,)).op
    if op is not None and op.name == "sub":
        one = dataflow.constant(op.ins[0])
        return one is not None and bool(np.all(one == 1)) and _is_zero_or_one(op.ins[1])
    origin = dataflow.source(value, through=(CAST,))
    return origin.dtype == np.bool_ or (origin.dtype is not None and np.issubdtype(origin.dtype, np.integer))


def _literals(found: Findings) -> None:
    """Constants that were cast when the program was traced, so that it holds an infinity or a zero in their place."""
    constants = _half_constants(found.program) if found.program.lost else {}
    for lost, times in Counter(found.program.lost).items():
        taken = _taken(constants, lost)
        if lost.overflow:
            gone = [(op, v) for op, v in taken if math.isinf(v.const)]
        else:
            gone = [(op, v) for op, v in taken if v.const == 0]
            coarse = sum(0 < abs(v.const) < dtypes.limits(v.dtype).smallest_normal for _, v in taken)
            if times <= coarse:  # what underflowed did not become zero
                continue
        for op, value in {id(op): (op, v) for op, v in gone}.values():
            (_overflows if lost.overflow else _vanishes)(found, op, None, value)


_Constants: TypeAlias = dict[CallSite, list[tuple[Op, Value]]]


def _half_constants(program: Program) -> _Constants:
    """The scalar constants in 16 bits, and the operations that take them, by the call that made these."""
    found: _Constants = {}
    for op in program.computing():
        for value in filter(_is_half_constant, op.ins if op.name in _TAKES_CONSTANT else ()):
            found.setdefault(op.call_site, []).append((op, value))
    return found


def _taken(constants: _Constants, lost: LostConstant) -> list[tuple[Op, Value]]:
    """Where a constant that was cast may be: in the call that cast it, or else in another one on the same line."""
    if lost.call_site in constants:
        return constants[lost.call_site]
    line = source_locations.line_of(lost.call_site)
    return [x for site, pairs in constants.items() if source_locations.line_of(site) == line for x in pairs]


def _is_half_constant(value: Value) -> bool:
    return value.const is not None and not value.shape and value.is_half


def _overflows(found: Findings, op: Op, number: float | None, cast: Value) -> None:
    limit = dtypes.limits(cast.dtype).max
    message = f"{_named(number)} is outside of {cast.dtype.name}, which ends at {limit:g}."
    found.add("mask-overflow", ERROR, op, message)


def _vanishes(found: Findings, op: Op, number: float | None, cast: Value) -> None:
    smallest = dtypes.limits(cast.dtype).smallest_subnormal
    message = f"{_named(number)} is zero in {cast.dtype.name}, whose smallest number is {smallest:.2g}."
    found.add("vanishing-constant", ERROR, op, message)


def _named(number: float | None) -> str:
    """A constant as a person would write it, 1e9 rather than 1e+09, if the program still holds its number."""
    if number is None:
        return "A constant"
    return "The constant " + re.sub(r"e([+-])0*", lambda e: "e-" if e[1] == "-" else "e", f"{number:g}")


# ------------------------------------------------------------------------------------------ collectives


def _collective(found: Findings, op: Op) -> None:
    if op.name in _COLLECTIVES:
        for value in op.ins:
            if value.is_half:
                axes = op.eqn.params.get("axes", op.eqn.params.get("axis_name"))
                message = f"'{op.name}' over {axes} adds up {value.dtype.name} values."
                found.add("half-collective", WARNING, op, message, str(value))
