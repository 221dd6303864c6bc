"""Findings about sums in 16 bits that have more terms than the format can count."""

import math
from collections.abc import Callable

import numpy as np

from mpjax._audit import dataflow
from mpjax._audit.findings import Findings
from mpjax._audit.program import CAST, Loop, Op, Value
from mpjax._audit.records import ERROR, NOTE, WARNING
from mpjax._precision import dtypes


def check(found: Findings) -> None:
    """Looks at every sum and every loop."""
    for op in found.program.computing():
        _accumulation(found, op)
    by_carry = {id(carry): loop for loop in found.program.loops for _, carry, _ in loop.carries}
    for loop in found.program.loops:
        _carries(found, loop, by_carry)


def _accumulation(found: Findings, op: Op) -> None:
    count_terms = _TERMS.get(op.name)
    if count_terms is None or not op.ins[0].is_half:
        return
    terms, limit = count_terms(op), dtypes.limits(op.ins[0].dtype).count
    if terms <= limit or _counts_ties(op):
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


def _counts_ties(op: Op) -> bool:
    """Whether it counts, as the derivative of a maximum does, how many numbers share it: few, and rarely two."""
    equal = dataflow.source(op.ins[0], through=(CAST,)).op
    if equal is None or equal.name != "eq":
        return False
    compared = (dataflow.source(v).op for v in equal.ins)
    return any(c is not None and c.name in ("reduce_max", "reduce_min") for c in compared)


def _reduced(op: Op) -> int:
    return math.prod(op.ins[0].shape) // max(1, math.prod(op.out.shape))


def _cumulated(op: Op) -> int:
    return op.ins[0].shape[op.eqn.params["axis"]]


def _window(op: Op) -> int:
    return math.prod(op.eqn.params["window_dimensions"])


# ---------------------------------------------------------------------------------------------- scatters


def _scattered(op: Op) -> int:
    """How many updates may meet in one element."""
    params, indices = op.eqn.params, op.ins[1]
    if params["unique_indices"] or _is_without_repetition(indices):
        return 1
    known = _known_indices(indices)
    if known is not None:
        rows = known.reshape(-1, known.shape[-1])
        return int(np.unique(rows, axis=0, return_counts=True)[1].max(initial=1))
    batching = params["dimension_numbers"].scatter_indices_batching_dims
    return math.prod(d for i, d in enumerate(indices.shape[:-1]) if i not in batching)


def _is_without_repetition(indices: Value, depth: int = 16) -> bool:
    """Whether one of the coordinates is a count or a permutation, so that no two updates meet.

    So it is in picking an entry per row, and in what sorts, ranks or selects the largest.
    """
    op = indices.op
    if op is None or depth == 0:
        return False
    if op.name == "iota" or (op.name == "top_k" and indices is op.outs[1]):
        return True
    if op.name == "sort":  # of a count along with keys
        return _is_without_repetition(op.ins[op.outs.index(indices)], depth - 1)
    if op.name == "concatenate":
        return any(_is_without_repetition(v, depth - 1) for v in op.ins)
    passed = _passed_on(op)
    return passed is not None and _is_without_repetition(passed, depth - 1)


def _passed_on(op: Op) -> Value | None:
    """The indices that an operation passes on; those that count from the end are as many."""
    if op.name in dataflow.MOVES or op.name in (CAST, "add", "clamp"):
        return op.ins[0] if op.name != "clamp" else op.ins[1]
    return op.ins[1] if op.name == "select_n" else None


def _known_indices(value: Value, depth: int = 16) -> np.ndarray | None:
    """The indices, up to a shift, if they are constants that the program only moves about."""
    if value.const is not None:
        return np.asarray(value.const) if math.prod(value.shape) <= _MOST_KNOWN else None
    op = value.op
    if op is None or depth == 0:
        return None
    if op.name == "concatenate":
        parts = [_known_indices(v, depth - 1) for v in op.ins]
        if any(part is None for part in parts):
            return None
        return np.concatenate(parts, axis=op.eqn.params["dimension"])  # type: ignore[arg-type]
    passed = _passed_on(op)
    known = None if passed is None else _known_indices(passed, depth - 1)
    if known is None or op.name in (CAST, "add", "clamp", "select_n", "copy"):
        return known
    if op.name == "broadcast_in_dim":
        shape = [1] * len(value.shape)
        for axis, size in zip(op.eqn.params["broadcast_dimensions"], known.shape, strict=True):
            shape[axis] = size
        return np.broadcast_to(known.reshape(shape), value.shape)
    return known.reshape(value.shape) if known.size == math.prod(value.shape) else None


# Constant indices are looked at up to so many.
_MOST_KNOWN = 1 << 20

_TERMS: dict[str, Callable[[Op], int]] = {
    "reduce_sum": _reduced,
    "cumsum": _cumulated,
    "reduce_window_sum": _window,
    "scatter-add": _scattered,
}

# ------------------------------------------------------------------------------------------------- loops


def _carries(found: Findings, loop: Loop, by_carry: dict[int, Loop]) -> None:
    for start, carry, new in loop.carries:
        if not carry.is_half or carry.op is None or not carry.op.live:
            continue
        addition = _addition_to(carry, new)
        if addition is None:
            continue
        limit = dtypes.limits(carry.dtype).count
        steps = _steps(loop, start, by_carry)
        if steps is not None and steps <= limit:
            continue
        times = "an unknown number of" if steps is None else f"{steps:,}"
        found.add(
            "half-accumulation",
            NOTE if steps is None else ERROR,
            addition,
            f"A loop adds to its {carry.dtype.name} carry in {times} steps; the format counts to {limit}.",
            f"carry {carry}, from {dataflow.describe(start)}",
        )


def _steps(loop: Loop, start: Value, by_carry: dict[int, Loop]) -> int | None:
    """How often a carry is added to, in the loops around this one too if it is their carry; None if unknown."""
    origin = dataflow.source(start, through=(CAST,))
    outer = by_carry.get(id(origin))
    if outer is None or outer is loop:
        return loop.length
    around = _steps(outer, next(s for s, c, _ in outer.carries if c is origin), by_carry)
    return None if loop.length is None or around is None else loop.length * around


def _addition_to(carry: Value, new: Value) -> Op | None:
    """The operation that makes the next carry by adding to this one."""
    op = dataflow.source(new, through=(CAST,)).op
    if op is None or op.name not in dataflow.ADDITIONS:
        return None
    inside = any(_is(v, carry) for v in op.ins)
    return op if inside else None


def _is(value: Value, carry: Value) -> bool:
    while value is not carry:
        op = value.op
        if op is None or op.name not in (CAST, "copy", "stop_gradient"):
            return False
        value = op.ins[0]
    return True
