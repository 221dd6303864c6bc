"""How CPUs run the 16-bit matmuls that a policy asked for.

XLA's own program for them depends on its version and on the layout: with jax 0.12 a bfloat16 weight gradient
runs at a fifth of the float32 rate and adds up in less than float32. And JAX forms the gradient of a weight,
[in, out], as one of [out, in] that it then transposes, so that the optimizer strides through memory. So a
matmul that carries a policy's decision is lowered here: it adds up in float32 and rounds once, as on
accelerators, and the gradient of a weight has the weight's own layout. The traced program is not changed,
and neither is any matmul outside of policies.

On a CPU that multiplies bfloat16 the operands stay bfloat16, in the layouts of a dense layer: forward, gradient
of the input and gradient of the weight. On others, and in other layouts, they are widened to float32 first:
the same numbers at the float32 rate. XLA runs convolutions well by itself.

In a program for several devices, what is communicated between them has to have 16 bits: matmuls with a 16-bit result
are left to XLA there, and those with a float32 one keep 16-bit operands in the layouts above.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from mpjax._precision.dtypes import FLOAT32, HALF
from mpjax._precision.jax_internals import Lowering, convert, device_count, ir, stablehlo, transpose
from mpjax._precision.rules import Params, PolicyPrecision

# JAX's context of a lowering, with the types of operands and results, and a value of the program that is made.
Context: TypeAlias = Any
Value: TypeAlias = Any
DimensionNumbers: TypeAlias = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]

BFLOAT16 = np.dtype(jnp.bfloat16)
# What the Linux kernel calls the instructions, on x86 and on Arm.
_NATIVE = {"avx512_bf16", "amx_bf16", "bf16"}


@functools.cache
def has_native_bfloat16() -> bool:
    """Whether this machine's CPU multiplies bfloat16, as far as the system tells: Linux does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = (line.split() for line in lines if line.startswith(("flags", "Features")))
    return any(not _NATIVE.isdisjoint(words) for words in flags)


def dot_general_rule(previous: Lowering) -> Lowering:
    """The CPU lowering of `dot_general`, on top of JAX's own."""

    def lower(ctx: Context, lhs: Value, rhs: Value, **params: Any) -> Sequence[Value]:
        (out,) = ctx.avals_out
        precision = params["precision"]
        if not isinstance(precision, PolicyPrecision) or precision.compute_dtype not in HALF:
            return previous(ctx, lhs, rhs, **params)
        compute = precision.compute_dtype
        if any(aval.dtype != compute for aval in ctx.avals_in) or out.dtype not in (compute, FLOAT32):
            return previous(ctx, lhs, rhs, **params)
        several = device_count(ctx) > 1  # what is communicated between them has to have 16 bits
        if several and out.dtype == compute:
            return previous(ctx, lhs, rhs, **params)

        ctx = ctx.replace(avals_out=[out.update(dtype=FLOAT32)])
        params["preferred_element_type"] = FLOAT32
        native = several or (compute == BFLOAT16 and has_native_bfloat16())
        form = (_native_form if native else _widened_form)(ctx, params["dimension_numbers"])
        result = form(previous, ctx, lhs, rhs, params)
        return [result if out.dtype == FLOAT32 else convert(ctx, result, out)]

    return lower


Form: TypeAlias = Callable[[Lowering, Context, Value, Value, Params], Value]


def _native_form(ctx: Context, dimension_numbers: DimensionNumbers) -> Form:
    """How to run a matmul on bfloat16 operands; widened, where XLA would not or could not run it so.

    Only layouts that were tried are taken. In others XLA folds a transposition into the matmul, and the program
    dies when it runs, with "UNIMPLEMENTED … DotThunk".
    """
    contracted, (batch, _) = dimension_numbers
    if batch:
        return _widened
    n = len(contracted[0])
    leading = tuple(range(n))
    lhs_trailing, rhs_trailing = (tuple(range(aval.ndim - n, aval.ndim)) for aval in ctx.avals_in)
    lhs, rhs = map(tuple, contracted)
    if lhs == lhs_trailing and rhs in (leading, rhs_trailing):
        return _native
    if n > 1 and _is_weight_gradient(ctx, dimension_numbers):
        return _native_swapped
    return _widened


def _widened_form(ctx: Context, dimension_numbers: DimensionNumbers) -> Form:
    return _widened_swapped if _is_weight_gradient(ctx, dimension_numbers) else _widened


def _is_weight_gradient(ctx: Context, dimension_numbers: DimensionNumbers) -> bool:
    """Whether both operands, an unsharded matmul's, sum over their leading dimensions, and nothing is batched."""
    contracted, (batch, _) = dimension_numbers
    leading = list(range(len(contracted[0])))
    unsharded = all(axes is None for axes in ctx.avals_out[0].sharding.spec)
    return not batch and leading != [] and all(list(dims) == leading for dims in contracted) and unsharded


def _widened_swapped(previous: Lowering, ctx: Context, lhs: Value, rhs: Value, params: Params) -> Value:
    return _swapped(_widened, previous, ctx, lhs, rhs, params)


def _widened(previous: Lowering, ctx: Context, lhs: Value, rhs: Value, params: Params) -> Value:
    avals = [aval.update(dtype=FLOAT32) for aval in ctx.avals_in]
    operands = [convert(ctx, x, aval) for x, aval in zip((lhs, rhs), avals, strict=True)]
    (result,) = previous(ctx.replace(avals_in=avals), *operands, **params)
    return result


def _native(previous: Lowering, ctx: Context, lhs: Value, rhs: Value, params: Params) -> Value:
    return stablehlo.optimization_barrier([_narrow(previous, ctx, lhs, rhs, params)])


def _narrow(previous: Lowering, ctx: Context, lhs: Value, rhs: Value, params: Params) -> Value:
    (result,) = previous(ctx, _hidden(lhs), _hidden(rhs), **params)
    return result


def _native_swapped(previous: Lowering, ctx: Context, lhs: Value, rhs: Value, params: Params) -> Value:
    return _swapped(_narrow, previous, ctx, lhs, rhs, params)


def _swapped(form: Form, previous: Lowering, ctx: Context, lhs: Value, rhs: Value, params: Params) -> Value:
    """`lhs · rhs` as the transposition of `rhs · lhs`, which XLA cancels with the transposition by JAX.

    The barrier keeps XLA from giving the result the layout of the transposition all the same.
    """
    (out,) = ctx.avals_out
    (lhs_contracted, rhs_contracted), batch = params["dimension_numbers"]
    lhs_free = ctx.avals_in[0].ndim - len(lhs_contracted)
    rhs_free = out.ndim - lhs_free
    swapped = out.update(shape=(*out.shape[lhs_free:], *out.shape[:lhs_free]))
    params = params | {"dimension_numbers": ((rhs_contracted, lhs_contracted), batch)}
    inner = ctx.replace(avals_in=ctx.avals_in[::-1], avals_out=[swapped])
    result: Value = stablehlo.optimization_barrier([form(previous, inner, rhs, lhs, params)])
    return transpose(result, [*range(rhs_free, out.ndim), *range(rhs_free)])


def _hidden(x: Value) -> Value:
    """The bfloat16 `x`, behind a barrier through which XLA folds no transposition into a matmul.

    The barrier holds its bits: one that held bfloat16 would have XLA widen it.
    """
    bits = ir.RankedTensorType.get(x.type.shape, ir.IntegerType.get_unsigned(16))
    hidden: Value = stablehlo.optimization_barrier([stablehlo.bitcast_convert(bits, x)])
    return stablehlo.bitcast_convert(x.type, hidden)
