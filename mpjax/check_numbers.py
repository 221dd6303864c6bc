"""Findings about arithmetic in 16 bits: sums, functions and constants that the format is too small for."""

import linecache
import math
import re
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from mpjax import costs, dtypes, graphs
from mpjax.findings import ERROR, NOTE, WARNING, Findings
from mpjax.programs import Loop, Op, Value

_COLLECTIVES = ("psum", "psum2", "psum_invariant", "reduce_scatter", "psum_scatter", "all_reduce")
_NARROW_RANGE = {
    *("exp", "exp2", "expm1", "log", "log1p", "pow", "rsqrt", "erf_inv", "lgamma", "digamma", "cumlogsumexp"),
}
_ADDS_CONSTANT = ("add", "sub", "max", "min", "mul", "div", "clamp", "select_n", "pow", "broadcast_in_dim")


def check(found: Findings) -> None:
    """Looks at every operation and every loop."""
    for op in found.program.computing():
        _accumulation(found, op)
        _range(found, op)
        _constant(found, op)
        _collective(found, op)
    for loop in found.program.loops:
        _carries(found, loop)


# ------------------------------------------------------------------------------------------------- sums


def _accumulation(found: Findings, op: Op) -> None:
    count_terms = _TERMS.get(op.name)
    if count_terms is None or not costs.is_half(op.ins[0]):
        return
    terms, limit = count_terms(op), dtypes.limits(op.ins[0].dtype).count
    if terms <= limit:
        return
    # Compilers sum a reduction in float32 where they can; a running sum is rounded at each step.
    severity = WARNING if op.name == "reduce_sum" else ERROR
    found.add(
        "half-accumulation",
        severity,
        op,
        f"'{op.name}' adds up {terms:,} numbers in {op.ins[0].dtype.name}, which counts to {limit}.",
        cost=op.count * op.ins[0].nbytes,
    )


def _reduced(op: Op) -> int:
    return math.prod(op.ins[0].shape) // max(1, math.prod(op.out.shape))


def _cumulated(op: Op) -> int:
    return op.ins[0].shape[op.eqn.params["axis"]]


def _window(op: Op) -> int:
    return math.prod(op.eqn.params["window_dimensions"])


def _scattered(op: Op) -> int:
    """How many updates may meet in one element."""
    params, indices = op.eqn.params, op.ins[1]
    if params["unique_indices"] or _counts_along(indices):
        return 1
    batching = params["dimension_numbers"].scatter_indices_batching_dims
    return math.prod(d for i, d in enumerate(indices.shape[:-1]) if i not in batching)


def _counts_along(indices: Value, depth: int = 12) -> bool:
    """Whether one of the coordinates just counts, so that no two updates meet, as in picking an entry per row."""
    op = indices.op
    if op is None or depth == 0:
        return False
    if op.name == "iota":
        return True
    if op.name == "concatenate":
        return any(_counts_along(v, depth - 1) for v in op.ins)
    if op.name in graphs.MOVES or op.name in (graphs.CAST, "add", "clamp"):
        return _counts_along(op.ins[0], depth - 1)
    if op.name == "select_n":  # negative indices count from the end
        return _counts_along(op.ins[1], depth - 1)
    return False


_TERMS: dict[str, Callable[[Op], int]] = {
    "reduce_sum": _reduced,
    "cumsum": _cumulated,
    "reduce_window_sum": _window,
    "scatter-add": _scattered,
}


def _carries(found: Findings, loop: Loop) -> None:
    for start, carry, new in loop.carries:
        if not costs.is_half(carry) or carry.op is None or not carry.op.live:
            continue
        addition = _addition_to(carry, new)
        limit = dtypes.limits(carry.dtype).count
        if addition is None or (loop.length is not None and loop.length <= limit):
            continue
        times = "an unknown number of" if loop.length is None else f"{loop.length:,}"
        found.add(
            "half-accumulation",
            NOTE if loop.length is None else ERROR,
            addition,
            f"A loop adds to its {carry.dtype.name} carry in {times} steps; the format counts to {limit}.",
            f"carry {carry}, from {graphs.describe(start)}",
        )


def _addition_to(carry: Value, new: Value) -> Op | None:
    """The operation that makes the next carry by adding to this one."""
    op = graphs.source(new, through=(graphs.CAST,)).op
    if op is None or op.name not in graphs.ADDITIONS:
        return None
    inside = any(_is(v, carry) for v in op.ins)
    return op if inside else None


def _is(value: Value, carry: Value) -> bool:
    while value is not carry:
        op = value.op
        if op is None or op.name not in (graphs.CAST, "copy", "stop_gradient"):
            return False
        value = op.ins[0]
    return True


# -------------------------------------------------------------------------------------------- functions


def _range(found: Findings, op: Op) -> None:
    if not op.ins or op.ins[0].dtype != jnp.float16:
        return
    if op.name in _NARROW_RANGE:
        name = "softmax" if op.name == "exp" and _is_shifted_by_maximum(op.ins[0]) else op.name
        found.add("half-range", WARNING, op, f"'{name}' runs in float16.")
    elif _is_square(op) and any(_is_summed(use) for use, _ in _uses_past_casts(op.out)):
        found.add("half-range", WARNING, op, "A variance or mean square takes its squares in float16.")


def _is_shifted_by_maximum(value: Value) -> bool:
    op = value.op
    if op is None or op.name != "sub":
        return False
    shift = graphs.source(op.ins[1]).op
    while shift is not None and shift.name == "max":  # with the initial -inf
        shift = next((s.op for s in map(graphs.source, shift.ins) if s.op is not None), None)
    return shift is not None and shift.name == "reduce_max"


def _is_square(op: Op) -> bool:
    if op.name == "mul":
        return op.ins[0] is op.ins[1]
    return op.name == "square" or (op.name == "integer_pow" and op.eqn.params["y"] == 2)


def _is_summed(op: Op) -> bool:
    return op.name in ("reduce_sum", "reduce_window_sum")


def _uses_past_casts(value: Value) -> list[tuple[Op, Value]]:
    found = []
    for use, operand in graphs.uses(value):
        found += list(graphs.uses(use.out)) if use.name == graphs.CAST else [(use, operand)]
    return found


# -------------------------------------------------------------------------------------------- constants


def _constant(found: Findings, op: Op) -> None:
    if op.name == graphs.CAST:
        _cast_constant(found, op)
    elif op.name in _ADDS_CONSTANT:
        for operand in op.ins:
            if operand.const is not None and costs.is_half(operand) and operand.shape == ():
                _literal(found, op, operand)


def _cast_constant(found: Findings, op: Op) -> None:
    """A constant that the traced program itself casts."""
    if not costs.is_half(op.out) or not costs.is_floating(op.ins[0]):
        return
    before = graphs.constant(op.ins[0])
    if before is None:
        return
    with np.errstate(all="ignore"):
        after = before.astype(op.out.dtype).astype(np.float64)
    overflowed = np.isfinite(before) & ~np.isfinite(after)
    vanished = (before != 0) & (after == 0)
    if overflowed.any():
        _overflows(found, op, f"{before[overflowed].flat[0]:g}", op.out)
    if vanished.all():
        _vanishes(found, op, f"{before[vanished].flat[0]:g}", op.out)


def _literal(found: Findings, op: Op, operand: Value) -> None:
    """A constant that was cast when the program was traced, so that only its ruins are left in it."""
    number = float(operand.const)
    if number != 0 and not math.isinf(number):
        return
    line = op.line
    lost = any(
        c.overflow == (number != 0) and (c.line.file, c.line.line) == (line.file, line.line)
        for c in found.program.lost
    )
    written = _written(line.file, line.line, operand.dtype, number)
    if not (lost or written):
        return
    report = _overflows if number else _vanishes
    report(found, op, written or ("a large number" if number else "a small number"), operand)


def _overflows(found: Findings, op: Op, number: str, cast: Value) -> None:
    limit = dtypes.limits(cast.dtype).max
    message = f"The constant {number} is outside of {cast.dtype.name}, which ends at {limit:g}."
    found.add("mask-overflow", ERROR, op, message)


def _vanishes(found: Findings, op: Op, number: str, cast: Value) -> None:
    smallest = dtypes.limits(cast.dtype).smallest_subnormal
    message = f"The constant {number} is zero in {cast.dtype.name}, whose smallest number is {smallest:.2g}."
    found.add("vanishing-constant", ERROR, op, message)


_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?![\w.])|(?<![\w.])\.\d+(?:[eE][-+]?\d+)?")


def _written(file: str, line: int, dtype: np.dtype, rounded: float) -> str | None:
    """A number in a line of source that would have become `rounded`."""
    for text in _NUMBER.findall(linecache.getline(file, line)):
        number = float(text)
        with np.errstate(all="ignore"):
            result = abs(float(np.asarray(number).astype(dtype)))
        if number != 0 and math.isfinite(number) and result == abs(rounded):
            return text
    return None


# ------------------------------------------------------------------------------------------ collectives


def _collective(found: Findings, op: Op) -> None:
    if op.name in _COLLECTIVES:
        for value in op.ins:
            if costs.is_half(value):
                axes = op.eqn.params.get("axes", op.eqn.params.get("axis_name"))
                message = f"'{op.name}' over {axes} adds up {value.dtype.name} values."
                found.add("half-collective", WARNING, op, message, str(value))
