"""What operations of a program cost: FLOPs of products, bytes of casts, bytes kept for the backward pass."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax import dtypes
from mpjax.places import BACKWARD, FORWARD
from mpjax.programs import Op, Program, Value


def flops(op: Op) -> int:
    """Floating point operations of a product in one run of the program, an addition and a multiplication each one."""
    lhs, rhs = op.ins[:2]
    each = 8 if np.issubdtype(lhs.dtype, np.complexfloating) else 2
    return each * op.count * _multiplications(op, lhs, rhs)


def _multiplications(op: Op, lhs: Value, rhs: Value) -> int:
    params = op.eqn.params
    results = math.prod(op.out.shape)
    if op.name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return results * math.prod(lhs.shape[d] for d in contracted)
    if op.name == "conv_general_dilated":
        kernel = math.prod(rhs.shape) // rhs.shape[params["dimension_numbers"].rhs_spec[0]]
        # The zeros between the elements of a dilated input cost nothing that counts.
        return results * kernel // math.prod(params["lhs_dilation"])
    return math.prod(lhs.shape) * math.prod(rhs.shape[-1:])  # each row meets the matrix of its group


def operand_dtypes(op: Op) -> tuple[str, str]:
    """The names of the dtypes of a product's operands."""
    return op.ins[0].dtype.name, op.ins[1].dtype.name


def operands(op: Op) -> str:
    """Both operand dtypes in a word: one if they agree."""
    lhs, rhs = operand_dtypes(op)
    return lhs if lhs == rhs else f"{lhs} × {rhs}"


def is_floating(value: Value) -> bool:
    return value.dtype is not None and _is_dtype(value.dtype) and dtypes.is_floating(value.dtype)


def is_half(value: Value) -> bool:
    """Whether a value is float16 or bfloat16."""
    return value.dtype in dtypes.HALF


def is_cast(op: Op) -> bool:
    """Whether an operation turns one floating format into another."""
    return (
        op.name == "convert_element_type"
        and is_floating(op.ins[0])
        and is_floating(op.out)
        and op.ins[0].dtype != op.out.dtype
    )


def saved(program: Program) -> list[Value]:
    """The values that the forward pass makes and the backward pass takes."""
    return [
        value
        for op in program.ops
        if op.live and op.phase == FORWARD
        for value in op.outs
        if any(use.live and use.phase == BACKWARD for use in value.uses)
    ]


def result_bytes(op: Op) -> int:
    """Bytes of the results of an operation, over all its runs."""
    return op.count * sum(value.nbytes for value in op.outs)


def _is_dtype(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and not jnp.issubdtype(dtype, jnp.integer)
