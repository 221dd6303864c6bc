"""Following values through a program: back to where they come from, and on to what uses them."""

import math
from collections.abc import Iterator

import jax
import numpy as np

from mpjax._audit.program import CAST, Op, Value
from mpjax._precision.ops import Trait, with_trait

# What only moves numbers, into loops and sharded functions and out of them, too.
MOVES = with_trait(Trait.MOVES) | {"loop slice", "loop result", "shard", "unshard"}
ADDITIONS = with_trait(Trait.ADDITION)


def source(value: Value, *, through: tuple[str, ...] = ()) -> Value:
    """Where a value comes from, past what only moves numbers and operations named in `through`."""
    for _ in range(100):
        op = value.op
        if op is None or not op.ins or (op.name not in MOVES and op.name not in through):
            return value
        value = op.ins[op.outs.index(value)] if len(op.ins) == len(op.outs) else op.ins[0]
    return value


def uses(value: Value) -> Iterator[tuple[Op, Value]]:
    """The live operations that take a value, past what only moves it, with the operand that they take."""
    pending, seen = [value], {id(value)}
    while pending:
        v = pending.pop()
        for use in v.uses:
            if not use.live:
                continue
            if use.name in MOVES:
                position = next(i for i, x in enumerate(use.ins) if x is v)
                out = use.outs[position if len(use.ins) == len(use.outs) else 0]
                if position == 0 or len(use.ins) == len(use.outs):
                    if id(out) not in seen:
                        seen.add(id(out))
                        pending.append(out)
                    continue
            yield use, v


def constant(value: Value) -> np.ndarray | None:
    """The numbers of a small constant, as the program sees them, past moves, casts and saturation."""
    value = source(value)
    if value.const is not None:
        small = math.prod(value.shape) <= 4096 and not isinstance(value.const, jax.core.Tracer)
        return np.asarray(value.const) if small else None
    op = value.op
    if op is None or op.name not in (CAST, "mpjax_saturate", "neg"):
        return None
    before = constant(op.ins[0])
    if before is None:
        return None
    if op.name == "mpjax_saturate":
        limit = op.eqn.params["limit"]
        return np.where(np.isfinite(before), np.clip(before, -limit, limit), before)
    if op.name == "neg":
        return -before
    with np.errstate(all="ignore"):
        return before.astype(value.dtype)


def describe(value: Value) -> str:
    """What a value is, for a message."""
    origin = source(value, through=(CAST,))
    if origin.name is not None:
        return f"{origin.name}, {origin}"
    if origin.const is not None:
        return f"a {origin.dtype.name} constant" + (f" of shape {list(origin.shape)}" if origin.shape else "")
    if origin.op is None:
        return str(origin)
    return f"the {origin.dtype.name} result of '{origin.op.name}' at {origin.op.line}"


def widening(value: Value, limit: int = 3000) -> Op | None:
    """The nearest operation by which a value got wider than it had been: a cast from a narrower format."""
    pending, seen = [value], {id(value)}
    for v in pending:
        op = v.op
        if op is None or len(seen) > limit:
            continue
        if op.is_cast and op.ins[0].dtype.itemsize < v.dtype.itemsize:
            return op
        for operand in op.ins:
            wide = operand.is_floating and operand.dtype.itemsize >= v.dtype.itemsize
            if wide and id(operand) not in seen:
                seen.add(id(operand))
                pending.append(operand)
    return None
