"""Findings about casts: parameters cast early, casts there and back, integers, keys and float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._audit import dataflow
from mpjax._audit import flops as costs
from mpjax._audit.findings import ERROR, NOTE, WARNING, Findings
from mpjax._audit.program import Op, Program, Value
from mpjax._audit.source_locations import BACKWARD, FORWARD
from mpjax._precision import dtypes
from mpjax._precision.rules import PolicyPrecision

# Uses of a parameter whose cotangents are few enough to add in 16 bits.
_FEW = 4
_FROM_KEYS = ("random_unwrap",)
_TO_KEYS = ("random_wrap", "threefry2x32")


def check(found: Findings) -> None:
    """Looks at every cast."""
    _early(found)
    for op in found.program.computing():
        if costs.is_cast(op):
            _roundtrip(found, op)
        elif op.name == dataflow.CAST:
            _integer(found, op)
        _float64(found, op)
    for value in found.program.inputs:
        if value.dtype == np.float64 and any(use.live for use in value.uses):
            found.add("float64", WARNING, None, f"{value.name} is float64.", str(value))


# ------------------------------------------------------------------------------------------ early casts


_Place = tuple[tuple[int, ...], str, str]


def _casts_of_gradients(program: Program) -> dict[_Place, list[int]]:
    """How often each of the backward pass's casts from 16 bits, the transposes of casts to them, runs.

    They are told by shape, module and line.
    """
    found: dict[_Place, list[int]] = {}
    for op in program.computing():
        if op.phase == BACKWARD and costs.is_cast(op) and costs.is_half(op.ins[0]):
            found.setdefault(_place(op), []).append(op.count)
    return found


def _place(op: Op) -> _Place:
    return op.out.shape, op.path, str(op.line)


def _casts_of_arguments(program: Program) -> dict[_Place, list[Op]]:
    """The casts of arguments to 16 bits in the forward pass, by place, in the order of the arguments."""
    order = {id(value): i for i, value in enumerate(program.inputs)}
    found: dict[_Place, list[Op]] = {}
    for op in program.computing():
        narrows = op.phase == FORWARD and costs.is_cast(op) and costs.is_half(op.out)
        if narrows and id(dataflow.source(op.ins[0])) in order:
            found.setdefault(_place(op), []).append(op)
    for ops in found.values():
        ops.sort(key=lambda op: order[id(dataflow.source(op.ins[0]))])
    return found


def _early(found: Findings) -> None:
    of_gradients = _casts_of_gradients(found.program)
    for place, casts in _casts_of_arguments(found.program).items():
        runs = of_gradients.get(place, [])
        # Where a batch is cast at the same place, parameters are the first of the arguments.
        for op in casts[: len(runs)] if of_gradients else casts:
            # JAX moves a cast out of the loop that it is written in, but the gradient is still cast in each step.
            differentiated = bool(runs) and min(runs) <= op.count
            # A loss alone does not say what it will be differentiated with respect to; usually its first argument.
            parameter = dataflow.source(op.ins[0])
            likely = not of_gradients and (parameter.name or "").startswith("argument 0")
            if differentiated or likely:
                _report_early(found, op, parameter, differentiated)


def _report_early(found: Findings, op: Op, parameter: Value, differentiated: bool) -> None:
    cotangents = _cotangents(op)
    if cotangents < 2:
        return
    found.add(
        "early-cast",
        WARNING if differentiated and cotangents >= _FEW else NOTE,
        op,
        f"{parameter.name} is cast to {op.out.dtype.name} once and then used {cotangents:,} times, so its gradient "
        f"is a sum of {cotangents:,} terms in {op.out.dtype.name}, which counts to "
        f"{dtypes.limits(op.out.dtype).count}.",
        f"{parameter}",
    )


def _cotangents(cast: Op) -> int:
    """How many cotangents come back to the result of a cast in one run of it."""
    total = 0
    pending, seen = [(cast.out, cast.count)], {id(cast.out)}
    while pending:
        value, runs = pending.pop()
        for use in value.uses:
            if not use.live or use.phase != FORWARD:
                continue
            if use.name in dataflow.MOVES and use.ins[0] is value and use.name != "broadcast_in_dim":
                if id(use.out) not in seen:
                    seen.add(id(use.out))
                    # Each element of what a loop goes over is used in one of its steps only.
                    pending.append((use.out, use.count if use.name == "loop slice" else runs))
                continue
            total += max(1, use.count // max(1, runs)) * _rows(use, value)
    return total


def _rows(use: Op, value: Value) -> int:
    """How often a single use may take the same element: a lookup takes a row for each index."""
    if use.name == "gather" and use.ins[0] is value:
        return max(1, math.prod(use.ins[1].shape[:-1]))
    return 0 if use.glue else 1


# ----------------------------------------------------------------------------------------- there and back


def _roundtrip(found: Findings, op: Op) -> None:
    before, there = op.ins[0], op.out
    # In what precision a module hands over its result, its policy says; and casts of the backward pass mirror
    # those of the forward pass.
    if op.phase == BACKWARD or op.handed_over:
        return
    if min(before.dtype.itemsize, there.dtype.itemsize) < 2 or math.prod(there.shape) <= 1:
        return
    if any(there is out for out in found.program.outputs):
        return
    takers = list(dataflow.uses(there))
    back = [use for use, _ in takers if costs.is_cast(use) and use.out.dtype == before.dtype]
    if not takers or len(back) != len(takers):
        return
    lossy = there.dtype.itemsize < before.dtype.itemsize
    # A policy narrows what a layer has just widened, for a product or to hand it over; the compiler drops both casts.
    if not lossy and all(b.handed_over or _is_decided(b) for b in back):
        return
    # What was rounded away is what a split into two narrow parts, or a compensated sum, is after.
    if lossy and all(_is_residual(b.out, before) for b in back):
        return
    # Nothing is lost where the value was narrow before, or is only ever taken narrow again: that is two casts
    # too many, not a value rounded for nothing.
    if lossy and (_comes_from(before, there.dtype) or all(_is_taken_as(b.out, there.dtype) for b in back)):
        return
    found.add(
        "cast-roundtrip",
        WARNING if lossy else NOTE,
        op,
        f"{before.dtype.name} is cast to {there.dtype.name} and back at {back[0].line}, with no use between"
        + ("; what was rounded away is lost." if lossy else "."),
        f"{before} → {there} → {back[0].out}",
    )


def _is_residual(rounded: Value, value: Value) -> bool:
    """Whether all that happens to a rounded value is that it is compared with what it was rounded from."""
    return all(
        use.name == "sub" and any(dataflow.source(v) is dataflow.source(value) for v in use.ins)
        for use, _ in dataflow.uses(rounded)
    )


def _is_decided(cast: Op) -> bool:
    """Whether a cast serves products under a policy only."""
    return all(
        isinstance(use.eqn.params.get("precision"), PolicyPrecision) for use, _ in dataflow.uses(cast.out)
    )


def _comes_from(value: Value, dtype: np.dtype) -> bool:
    op = dataflow.source(value).op
    return op is not None and costs.is_cast(op) and op.ins[0].dtype == dtype


def _is_taken_as(value: Value, dtype: np.dtype) -> bool:
    return all(costs.is_cast(use) and use.out.dtype == dtype for use, _ in dataflow.uses(value))


# ---------------------------------------------------------------------------------------- integers, keys


def _integer(found: Findings, op: Op) -> None:
    before, after = op.ins[0], op.out
    if not jnp.issubdtype(before.dtype, jnp.integer) or not costs.is_floating(after):
        return
    origin = dataflow.source(before)
    if _is_key(origin, after):
        message = f"The bits of a PRNG key ({dataflow.describe(origin)}) are cast to {after.dtype.name}."
        found.add("key-cast", ERROR, op, message, f"{before} → {after}")
        return
    limit = dtypes.limits(after.dtype).count
    largest = _largest(origin)
    if not costs.is_half(after) or (largest is not None and largest <= limit):
        return
    if origin.name is not None:
        severity, what = _severity_of_argument(origin, op, limit), f"{origin.name} holds integers and"
    elif largest is not None:
        severity, what = WARNING, f"Integers up to {largest:,}, {dataflow.describe(origin)},"
    elif math.prod(before.shape) > 1:
        severity, what = NOTE, f"Integers of unknown size, {dataflow.describe(origin)},"
    else:
        return
    found.add(
        "integer-cast",
        severity,
        op,
        f"{what} {'is' if origin.name else 'are'} cast to {after.dtype.name}, which counts to {limit}.",
        f"{before} → {after}",
    )


def _severity_of_argument(origin: Value, cast: Op, limit: int) -> str:
    """How grave it is to cast an argument of integers, whose size nothing but its use tells."""
    if (_largest_given(origin) or 0) > limit:
        return ERROR
    takers = list(dataflow.uses(cast.out))
    if any(use.name == dataflow.CAST and jnp.issubdtype(use.out.dtype, jnp.integer) for use, _ in takers):
        return ERROR  # an index that comes back rounded
    return NOTE if all(_takes_mask(use, v) for use, v in takers) else WARNING


def _largest_given(origin: Value) -> int | None:
    """The largest integer in an argument, if its numbers were given and lie within this process's reach."""
    given = origin.given
    known = isinstance(given, np.ndarray) or (
        isinstance(given, jax.Array) and not isinstance(given, jax.core.Tracer) and given.is_fully_addressable
    )
    return int(np.max(np.abs(np.asarray(given).astype(np.int64)), initial=0)) if known else None


def _takes_mask(use: Op, value: Value) -> bool:
    """Whether an operation is one that masks of zeros and ones are put to: `1 - m`, `m * -1e4`, `where(m > 0, …)`."""
    if use.name in ("eq", "ne", "gt", "lt", "ge", "le"):
        return True
    if use.name not in ("sub", "mul"):
        return False
    others = [v for v in use.ins if v is not value]
    return bool(others) and dataflow.constant(others[0]) is not None


def _is_key(origin: Value, cast: Value) -> bool:
    """Whether a cast takes the bits of a key: of a typed one, of what goes on as one, or of a lone pair of words."""
    if origin.dtype != np.uint32 or origin.shape[-1:] != (2,):
        return False
    if origin.op is not None:
        return origin.op.name in _FROM_KEYS
    if any(use.name in _TO_KEYS for use, _ in dataflow.uses(origin)) or _becomes_key(cast):
        return True
    return origin.shape == (2,) and costs.is_half(cast)


def _becomes_key(value: Value) -> bool:
    takers = [use for use, _ in dataflow.uses(value)]
    return any(
        use.name in _TO_KEYS or (use.name == dataflow.CAST and _becomes_key(use.out)) for use in takers
    )


def _largest(value: Value) -> int | None:
    """The largest number that an integer value can be, if that is known."""
    if value.dtype.itemsize == 1:
        return int(jnp.iinfo(value.dtype).max)
    const = dataflow.constant(value)
    if const is not None:
        return int(np.max(np.abs(const))) if const.size else 0
    if value.op is not None and value.op.name == "iota":
        return max(0, value.shape[value.op.eqn.params["dimension"]] - 1)
    return None


def _float64(found: Findings, op: Op) -> None:
    """Where float64 begins: results that no float64 operand explains."""
    if op.outs and op.out.dtype == np.float64 and math.prod(op.out.shape) > 1:
        wide = [v for v in op.ins if v.dtype == np.float64]
        constants = [v for v in wide if dataflow.source(v).const is not None and v.shape]
        if not wide or constants:
            what = f"through {dataflow.describe(constants[0])}" if constants else f"made by '{op.name}'"
            found.add("float64", ERROR, op, f"A value is float64, {what}.")
