"""What the forward pass saves for the backward pass, and which module made it."""

from collections.abc import Iterator

from mpjax._audit import dataflow
from mpjax._audit.program import Op, Program, Value
from mpjax._audit.source_locations import BACKWARD, FORWARD
from mpjax._precision.ops import Trait, with_trait

_IDENTITIES = with_trait(Trait.IDENTITY)


def saved(program: Program) -> Iterator[tuple[str, str, int]]:
    """Module, dtype and bytes on all devices of each value that the forward pass makes and the backward pass takes.

    What a loop or a sharded function returns belongs to the operation inside of it. What can be read off an input,
    such as a slice or the shard of a device, was not made.
    """
    seen: set[tuple[int, int]] = set()
    for op in program.ops:
        if not op.live or op.phase != FORWARD:
            continue
        for value in op.outs:
            if not any(use.live and use.phase == BACKWARD for use in value.uses):
                continue
            made = _made(value)
            size = value.nbytes * op.devices
            if made is None or (id(made), size) in seen or _is_view_of_input(made):
                continue
            seen.add((id(made), size))
            maker = made.op or op
            yield maker.path, str(value.dtype), size


def _made(value: Value) -> Value | None:
    """The value as the operation that computes it returns it; None for an input, also where a loop passes it on."""
    passed: set[int] = set()
    while value.op is not None and id(value) not in passed:
        passed.add(id(value))
        inner = _passed_on(value, value.op)
        if inner is None:
            return value
        value = inner
    return None


def _passed_on(value: Value, op: Op) -> Value | None:
    """The operand that an operation returns as `value`; None if it computes it."""
    if op.name in _IDENTITIES:
        return op.ins[op.outs.index(value)] if len(op.ins) == len(op.outs) else op.ins[0]
    if not op.structural:
        return None
    if op.name == "loop carry":
        start, new = op.ins
        return start if new is value else new
    if op.name == "branches":  # the first that computes it; the operand 0 chooses
        return next((v for v in op.ins[1:] if v.op is not None), None)
    return op.ins[0] if op.name in dataflow.MOVES else None


def _is_view_of_input(value: Value) -> bool:
    op = value.op
    while op is not None and op.name in dataflow.MOVES and op.name != "broadcast_in_dim":
        inner = _made(op.ins[0])
        op = None if inner is None else inner.op
    return op is None
