"""Findings about matmuls and convolutions: above or below what the policy says, and of two dtypes."""

import numpy as np
from jax import lax

from mpjax._audit import dataflow
from mpjax._audit.findings import Findings
from mpjax._audit.flops import flops
from mpjax._audit.governed import entry_of
from mpjax._audit.program import CAST, Op, Program, Value
from mpjax._audit.records import ERROR, WARNING
from mpjax._audit.source_locations import OPTIMIZER
from mpjax._precision.rules import PolicyPrecision


def check(found: Findings) -> None:
    """Compares the operands of every matmul with what they should be.

    That is what the policies to compare with say. Without them it is what the policy that the program was traced
    under decided; where there was none, the 16-bit format that most FLOPs take, if one does.
    """
    inferred = None if found.policies else _usual_dtype(found.program)
    for op in found.program.matmuls():
        lhs, rhs = op.ins[:2]
        if not (lhs.is_floating and rhs.is_floating):
            continue
        expected = _expected(op, found)
        sure = expected is not None
        expected = expected or (inferred if _is_unmarked(op) else None)
        wide = max(lhs.dtype.itemsize, rhs.dtype.itemsize)
        if expected is not None and wide > expected.itemsize and _upcast(found, op, expected, sure):
            continue
        if lhs.dtype != rhs.dtype and wide > 1:  # units for 8 bits and fewer take two formats
            _mixed(found, op, sure)
        elif expected is not None and sure and lhs.dtype != expected:
            _below(found, op, expected)


def _expected(op: Op, found: Findings) -> np.dtype | None:
    """The dtype that the operands of a matmul must have; None if nothing says it."""
    precision = op.eqn.params.get("precision")
    decided = precision.compute_dtype if isinstance(precision, PolicyPrecision) else None
    if found.policies is None:
        return decided
    asked_for = isinstance(precision, PolicyPrecision) and decided is None
    explicit = precision is not None and (
        not isinstance(precision, tuple) or lax.Precision.HIGHEST in precision
    )
    if asked_for or explicit or op.full_precision or op.phase == OPTIMIZER or _sums_nothing(op):
        return None
    return found.policies.policy(entry_of(found.policies, op, found.program)).compute_dtype


def _usual_dtype(program: Program) -> np.dtype | None:
    """The 16-bit format that matmuls with most FLOPs take, if the program was traced under no policy."""
    total: dict[np.dtype, int] = {}
    for op in program.matmuls():
        if _is_unmarked(op) and op.ins[0].dtype == op.ins[1].dtype:
            dtype = op.ins[0].dtype
            total[dtype] = total.get(dtype, 0) + flops(op)
    if not total:
        return None
    usual = max(total, key=lambda d: total[d])
    return usual if usual.itemsize == 2 and 2 * total[usual] >= sum(total.values()) else None


def _is_unmarked(op: Op) -> bool:
    return not isinstance(op.eqn.params.get("precision"), PolicyPrecision)


def _sums_nothing(op: Op) -> bool:
    if op.name != "dot_general":
        return False
    (contracted, _), _ = op.eqn.params["dimension_numbers"]
    return all(op.ins[0].shape[d] == 1 for d in contracted)


def _upcast(found: Findings, op: Op, expected: np.dtype, sure: bool) -> bool:
    """Reports a matmul above the policy; not one that nothing says should be narrower."""
    wide = [v for v in op.ins[:2] if v.dtype.itemsize > expected.itemsize]
    cause, text = _origin(wide)
    if not sure and cause is None:
        return False
    says = "where the policy says" if sure else "where most of the program takes"
    found.add(
        "silent-upcast",
        ERROR if sure else WARNING,
        op,
        f"A matmul takes {wide[0].dtype.name} operands {says} {expected.name}. {text}",
        _shapes(op),
        cost=flops(op),
        of="FLOPs",
    )
    return True


def _origin(operands: list[Value]) -> tuple[Op | None, str]:
    """The operation that widened an operand, if one did, and what a message says of it."""
    for operand in operands:
        cast = dataflow.widening(operand)
        if cast is not None:
            return cast, f"{cast.ins[0]} became {cast.out.dtype.name} at {cast.line}{_met(cast)}."
    origins = [dataflow.source(v, through=(CAST,)) for v in operands]
    given = next((v for v in origins if v.op is None), None)
    if given is None:
        return None, "What it is computed from was never narrower."
    return None, f"It takes {dataflow.describe(given)}, which was never narrower."


def _met(cast: Op) -> str:
    """What an operand was widened for: the other operand of the operation that takes it."""
    for use, operand in dataflow.uses(cast.out):
        others = [v for v in use.ins if v is not operand and v.dtype == cast.out.dtype]
        if others:
            return f", where '{use.name}' takes it together with {dataflow.describe(others[0])}"
    return ""


def _below(found: Findings, op: Op, expected: np.dtype) -> None:
    narrow = next(v for v in op.ins[:2] if v.dtype != expected)
    found.add(
        "below-policy",
        ERROR,
        op,
        f"A matmul takes {narrow.dtype.name} operands where the policy says {expected.name}.",
        _shapes(op),
        cost=flops(op),
        of="FLOPs",
    )


def _mixed(found: Findings, op: Op, sure: bool) -> None:
    found.add(
        "mixed-operands",
        ERROR if sure else WARNING,
        op,
        f"A matmul takes operands of two dtypes: {_side('left', op.ins[0])}, {_side('right', op.ins[1])}.",
        _shapes(op),
        cost=flops(op),
        of="FLOPs",
    )


def _side(side: str, value: Value) -> str:
    return f"the {side} one is {value.dtype.name} ({dataflow.describe(value)})"


def _shapes(op: Op) -> str:
    return f"{op.ins[0]} × {op.ins[1]} → {op.out}"
