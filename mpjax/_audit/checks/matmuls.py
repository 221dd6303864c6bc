"""Findings about products: above or below what the policy says, and of two dtypes."""

import re

import numpy as np
from jax import lax

from mpjax._audit import dataflow
from mpjax._audit import flops as costs
from mpjax._audit.findings import ERROR, WARNING, Findings
from mpjax._audit.program import Op, Program, Value
from mpjax._audit.source_locations import OPTIMIZER
from mpjax._precision.policy_map import DEFAULT_ENTRY, PolicyMap, ancestors
from mpjax._precision.rules import PolicyPrecision


def check(found: Findings) -> None:
    """Compares the operands of every product with what they should be.

    That is what the policies to compare with say. Without them it is what the policy that the program was traced
    under decided; where there was none, the 16-bit format that most FLOPs take, if one does.
    """
    inferred = None if found.policies else _usual_dtype(found.program)
    for op in found.program.products():
        lhs, rhs = op.ins[:2]
        if not (costs.is_floating(lhs) and costs.is_floating(rhs)):
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
    """The dtype that the operands of a product must have; None if nothing says it."""
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
    return found.policies.policy(_entry(found.policies, op, found.program)).compute_dtype


def check_governs(program: Program, policies: PolicyMap) -> None:
    """Raises if an entry matches no module of the program, as one that is misspelt does.

    Raises:
      ValueError: naming the pattern and the closest paths.
    """
    known = [
        (a, classes.get(a)) for classes in program.classes.values() for p in classes for a in ancestors(p)
    ]
    others = {a for op in program.ops if op.model not in program.classes for a in ancestors(op.module)}
    matches = {policies.match(path, cls) for path, cls in known}
    matches |= {_match(policies, path, program.root) for path in others}
    if not program.classes:  # of modules with names of their own the program does not know the class
        matches |= {i for i, (key, _) in enumerate(policies.entries) if key.startswith("class:")}
    policies.check_governs({m for m in matches if m is not None}, {path for path, _ in known} | others)


def _entry(policies: PolicyMap, op: Op, program: Program) -> int:
    """The entry of a map that governs an operation."""
    if (classes := program.classes.get(op.model)) is not None:
        return policies.resolve(op.module, classes)
    matches = (_match(policies, ancestor, program.root) for ancestor in ancestors(op.module))
    return next((m for m in matches if m is not None), DEFAULT_ENTRY)


def _match(policies: PolicyMap, path: str, root: str | None) -> int | None:
    """The first entry that matches a path of names; classes are told by the name that Flax gives their modules."""
    name = re.sub(r"_\d+$", "", path.rpartition("/")[2]) or root or ""
    return next(
        (
            i
            for i, (key, _) in enumerate(policies.entries)
            if (key.rpartition(".")[2] == name if key.startswith("class:") else re.fullmatch(key, path))
        ),
        None,
    )


def _usual_dtype(program: Program) -> np.dtype | None:
    """The 16-bit format that products with most FLOPs take, if the program was traced under no policy."""
    flops: dict[np.dtype, int] = {}
    for op in program.products():
        if _is_unmarked(op) and op.ins[0].dtype == op.ins[1].dtype:
            dtype = op.ins[0].dtype
            flops[dtype] = flops.get(dtype, 0) + costs.flops(op)
    if not flops:
        return None
    usual = max(flops, key=lambda d: flops[d])
    return usual if usual.itemsize == 2 and 2 * flops[usual] >= sum(flops.values()) else None


def _is_unmarked(op: Op) -> bool:
    return not isinstance(op.eqn.params.get("precision"), PolicyPrecision)


def _sums_nothing(op: Op) -> bool:
    if op.name != "dot_general":
        return False
    (contracted, _), _ = op.eqn.params["dimension_numbers"]
    return all(op.ins[0].shape[d] == 1 for d in contracted)


def _upcast(found: Findings, op: Op, expected: np.dtype, sure: bool) -> bool:
    """Reports a product above the policy; not one that nothing says should be narrower."""
    wide = [v for v in op.ins[:2] if v.dtype.itemsize > expected.itemsize]
    cause, text = _origin(wide)
    if not sure and cause is None:
        return False
    says = "where the policy says" if sure else "where most of the program takes"
    found.add(
        "silent-upcast",
        ERROR if sure else WARNING,
        op,
        f"A product takes {wide[0].dtype.name} operands {says} {expected.name}. {text}",
        _shapes(op),
        cost=costs.flops(op),
        of="FLOPs",
    )
    return True


def _origin(operands: list[Value]) -> tuple[Op | None, str]:
    """The operation that widened an operand, if one did, and what a message says of it."""
    for operand in operands:
        cast = dataflow.widening(operand)
        if cast is not None:
            return cast, f"{cast.ins[0]} became {cast.out.dtype.name} at {cast.line}{_met(cast)}."
    origins = [dataflow.source(v, through=(dataflow.CAST,)) for v in operands]
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
        f"A product takes {narrow.dtype.name} operands where the policy says {expected.name}.",
        _shapes(op),
        cost=costs.flops(op),
        of="FLOPs",
    )


def _mixed(found: Findings, op: Op, sure: bool) -> None:
    found.add(
        "mixed-operands",
        ERROR if sure else WARNING,
        op,
        f"A product takes operands of two dtypes: {_side('left', op.ins[0])}, {_side('right', op.ins[1])}.",
        _shapes(op),
        cost=costs.flops(op),
        of="FLOPs",
    )


def _side(side: str, value: Value) -> str:
    return f"the {side} one is {value.dtype.name} ({dataflow.describe(value)})"


def _shapes(op: Op) -> str:
    return f"{op.ins[0]} × {op.ins[1]} → {op.out}"
