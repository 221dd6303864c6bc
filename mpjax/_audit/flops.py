"""How many floating point operations a matmul or a convolution takes."""

import functools
import math
from typing import Any

import numpy as np

from mpjax._audit.program import Op, Value


def flops(op: Op) -> int:
    """Floating point operations of a matmul in one run of the program, an addition and a multiplication each one."""
    lhs, rhs = op.ins[:2]
    each = 8 if np.issubdtype(lhs.dtype, np.complexfloating) else 2
    return each * op.count * _multiplications(op, lhs, rhs)


def _multiplications(op: Op, lhs: Value, rhs: Value) -> int:
    params = op.eqn.params
    if op.name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return math.prod(op.out.shape) * math.prod(lhs.shape[d] for d in contracted)
    if op.name == "conv_general_dilated":
        return _of_convolution(params, lhs, rhs, op.out)
    # Each element on the left meets, in the one group that it belongs to, each of the free ones on the right.
    numbers = params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    taken = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return math.prod(lhs.shape) * math.prod(d for i, d in enumerate(rhs.shape) if i not in taken)


def _of_convolution(params: dict[str, Any], lhs: Value, rhs: Value, out: Value) -> int:
    """Multiplications with numbers that are there: neither padding nor the zeros between those of a dilated input."""
    _, features, *window = params["dimension_numbers"].rhs_spec
    _, _, *inputs = params["dimension_numbers"].lhs_spec
    batch, channels, *results = params["dimension_numbers"].out_spec
    total = out.shape[batch] * out.shape[channels] * rhs.shape[features]
    for i in range(len(window)):
        total *= _meetings(
            lhs.shape[inputs[i]],
            rhs.shape[window[i]],
            out.shape[results[i]],
            params["window_strides"][i],
            params["padding"][i][0],
            params["lhs_dilation"][i],
            params["rhs_dilation"][i],
        )
    return total


@functools.cache
def _meetings(
    size: int, window: int, results: int, stride: int, padding: int, dilation: int, window_dilation: int
) -> int:
    """How often, along one dimension of a convolution, an element of the window meets one of the input."""
    (few, step), (many, jump) = sorted([(window, window_dilation), (results, stride)])
    # Of the positions offset + jump * i those that hold an element: multiples of the dilation below the end.
    period = dilation // math.gcd(dilation, jump)
    met = 0
    for offset in range(-padding, few * step - padding, step):
        first, end = max(0, -(offset // jump)), min(many, -((offset - (size - 1) * dilation - 1) // jump))
        hits = (i for i in range(first, min(end, first + period)) if (offset + jump * i) % dilation == 0)
        if (start := next(hits, None)) is not None:
            met += -((start - end) // period)
    return met
