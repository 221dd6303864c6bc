"""What happens to single operations in a region: one rule for each kind of primitive.

A rule gets the primitive's own `bind` and the arguments that JAX wanted to bind. autocast.py hooks the rules into
JAX. Outside of a region a rule changes nothing.
"""

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.extend.core
import jax.extend.core.primitives as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad, batching, mlir

from mpjax._precision import dtypes, regions

Bind = Callable[..., Any]

# --------------------------------------------------------------------------------------------- products


class Decided(tuple):
    """The precision of a product together with the dtype that its operands were decided to have.

    To JAX it is the pair of `lax.Precision` that it equals in meaning, so it lowers to the same program.
    `compute_dtype` is None for a product that was decided to run as it comes. `narrowed` tells for each operand
    whether it was float32 until then.
    """

    compute_dtype: np.dtype | None
    narrowed: tuple[bool, bool]

    def __new__(
        cls,
        precision: tuple[Any, Any] | None,
        compute_dtype: np.dtype | None,
        narrowed: tuple[bool, bool] = (False, False),
    ) -> Self:
        self = super().__new__(cls, precision or (lax.Precision.DEFAULT, lax.Precision.DEFAULT))
        self.compute_dtype = compute_dtype
        self.narrowed = narrowed
        return self

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Decided)
            and tuple.__eq__(self, other)
            and (self.compute_dtype, self.narrowed) == (other.compute_dtype, other.narrowed)
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.compute_dtype, self.narrowed))

    def __repr__(self) -> str:
        return f"{'as it comes' if self.compute_dtype is None else self.compute_dtype}:{self[0]}"


# Algorithms that say no more than a 16-bit product with a wide result does. `jax.nn.dot_product_attention` asks
# for them so that its backward products take 16-bit operands, which the mark sees to; and not every
# backend has them.
_PLAIN_ALGORITHMS = {
    lax.DotAlgorithmPreset.BF16_BF16_F32: jnp.bfloat16,
    lax.DotAlgorithmPreset.F16_F16_F32: jnp.float16,
}


def compute_rule(bind: Bind, lhs: Any, rhs: Any, *rest: Any, **params: Any) -> Any:
    region = regions.current()
    precision = params["precision"]
    if type(precision) is not Decided:
        if region is None:
            return bind(lhs, rhs, *rest, **params)
        if precision in _PLAIN_ALGORITHMS and lhs.dtype == rhs.dtype == _PLAIN_ALGORITHMS[precision]:
            precision = params["precision"] = None
        if not (precision is None or isinstance(precision, tuple)):
            return bind(lhs, rhs, *rest, **params)  # an explicit algorithm says it all
        compute = _decide(region, lhs, rhs, params)
        if compute is not None:
            params["preferred_element_type"] = _result_dtype(
                lhs, rhs, params["preferred_element_type"], compute
            )
        narrowed = (_narrows(lhs, compute), _narrows(rhs, compute))
        precision = params["precision"] = Decided(precision, compute, narrowed)
    if precision.compute_dtype is not None:
        lhs, rhs = (_cast(x, precision.compute_dtype) for x in (lhs, rhs))
    return bind(lhs, rhs, *rest, **params)


# Whether gradients of operands that a product narrowed leave their product in the compute dtype.
gradients_in_compute_dtype = jax.make_user_context(False)


def transpose_rule(
    transpose: Callable[..., Any], i: int, cotangent: Any, lhs: Any, rhs: Any, **params: Any
) -> Any:
    """The gradient of an operand that a product narrowed leaves its own product in float32.

    That is where it goes, and where one program for many devices adds it up over them: rounded to 16 bits
    before, each device's part would be rounded, and so would be their sum.

    Args:
      transpose: JAX's rule for the i-th operand.
      i: which operand to find the gradient of.
      cotangent: of the result.
      lhs: an operand, or in the place of the i-th what tells its type.
      rhs: likewise.
      **params: the product's.
    """
    precision = params["precision"]
    if type(precision) is Decided and precision.narrowed[i] and not gradients_in_compute_dtype.value:
        wide = ad.UndefinedPrimal((lhs, rhs)[i].aval.update(dtype=dtypes.FLOAT32))
        lhs, rhs = (wide, rhs) if i == 0 else (lhs, wide)
        params["precision"] = Decided(tuple(precision), precision.compute_dtype)
        params["preferred_element_type"] = dtypes.FLOAT32
    return transpose(cotangent, lhs, rhs, **params)


def _narrows(x: Any, compute: np.dtype | None) -> bool:
    return compute in dtypes.HALF and x.dtype == dtypes.FLOAT32 and _was(x, compute) is None


def _decide(region: regions.Region, lhs: Any, rhs: Any, params: dict[str, Any]) -> np.dtype | None:
    """The dtype that a fresh product's operands take, or None to run it as it comes."""
    if region.transparent or lax.Precision.HIGHEST in (params["precision"] or ()):
        return None
    if not {lhs.dtype, rhs.dtype} <= dtypes.CASTABLE:
        return None
    wanted = params["preferred_element_type"]
    if wanted is not None and not dtypes.is_floating(wanted):
        return None
    return None if _sums_nothing(lhs, params) else region.compute_dtype


def _sums_nothing(lhs: Any, params: dict[str, Any]) -> bool:
    """Whether a `dot_general` is elementwise work, such as positions times frequencies."""
    if "window_strides" in params or "dimension_numbers" not in params:
        return False
    (contracted, _), _ = params["dimension_numbers"]
    return math.prod(lhs.shape[d] for d in contracted) == 1


def _result_dtype(lhs: Any, rhs: Any, wanted: Any, compute: np.dtype) -> np.dtype:
    """A result that was asked to be wider than the operands keeps its width.

    `jnp.einsum` asks for float32 because its operands arrived as float32; that is no wish for width.
    """
    came_in = max(lhs.dtype.itemsize, rhs.dtype.itemsize)
    if wanted is not None:
        wanted = np.dtype(wanted)
        if wanted.itemsize > max(came_in, compute.itemsize):
            return wanted
        if wanted.itemsize > came_in and wanted.itemsize == compute.itemsize:
            return wanted
    return compute


# ---------------------------------------------------------------------------------- float32 inside, outside


def float32_rule(bind: Bind, *args: Any, **params: Any) -> Any:
    region = regions.current()
    if region is None or region.transparent:
        return bind(*args, **params)
    came_in = _half_dtype_of(args)
    if came_in is None:
        return bind(*args, **params)
    return _cast(bind(*_widened(args), **params), came_in)


def float32_elementwise_rule(bind: Bind, *args: Any, **params: Any) -> Any:
    """Float32 inside, for operations whose derivative is not constant.

    Differentiating through the casts would save the derivative for the backward pass in float32, twice the
    bytes that a model written in 16 bits saves. So it is computed in float32 and saved in what came in.
    """
    region = regions.current()
    if region is None or region.transparent:
        return bind(*args, **params)
    came_in = _half_dtype_of(args)
    if came_in is None:
        return bind(*args, **params)

    @jax.custom_jvp
    def narrow(*args: Any) -> Any:
        return _cast(bind(*_widened(args), **params), came_in)

    def jvp(args: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        out = narrow(*args)
        parts = [
            _cast(t, came_in) * _derivative(bind, params, i, args, out)
            for i, t in enumerate(tangents)
            if not isinstance(t, SymbolicZero) and dtypes.is_floating(t.dtype)
        ]
        return out, functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(out)

    narrow.defjvp(jvp, symbolic_zeros=True)
    return narrow(*args)


def _derivative(bind: Bind, params: dict[str, Any], i: int, args: tuple[Any, ...], out: Any) -> Any:
    """The derivative of an elementwise operation by its i-th operand, in the dtype of `out`."""
    if bind.__self__.name == "exp":  # type: ignore[attr-defined]
        return out  # which the forward pass keeps anyway
    wide = _widened(args)

    def op(x: Any) -> Any:
        return bind(*wide[:i], x, *wide[i + 1 :], **params)

    return _cast(jax.jvp(op, (wide[i],), (jnp.ones_like(wide[i]),))[1], out.dtype)


def scatter_add_rule(bind: Bind, operand: Any, indices: Any, updates: Any, **params: Any) -> Any:
    region = regions.current()
    if region is None or region.transparent or operand.dtype not in dtypes.HALF:
        return bind(operand, indices, updates, **params)
    # The public function, as the parameters hold the addition traced for the operand's dtype.
    out = lax.scatter_add(
        _cast(operand, dtypes.FLOAT32),
        indices,
        _cast(updates, dtypes.FLOAT32),
        params["dimension_numbers"],
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
    return _cast(out, operand.dtype)


def decomposition_rule(bind: Bind, *args: Any, **params: Any) -> Any:
    region = regions.current()
    if region is None or region.transparent:
        return bind(*args, **params)
    came_in = _half_dtype_of(args)
    with regions.ambient(regions.TRANSPARENT):
        if came_in is None:
            return bind(*args, **params)
        out = bind(*_widened(args), **params)
        return jax.tree.map(lambda x: _cast(x, came_in) if x.dtype == dtypes.FLOAT32 else x, out)


def _half_dtype_of(args: tuple[Any, ...]) -> np.dtype | None:
    return next((x.dtype for x in args if getattr(x, "dtype", None) in dtypes.HALF), None)


def _widened(args: tuple[Any, ...]) -> list[Any]:
    return [_cast(x, dtypes.FLOAT32) if getattr(x, "dtype", None) in dtypes.HALF else x for x in args]


# ------------------------------------------------------------------------------ stored, constants, casting


def stored_rule(bind: Bind, operand: Any, update: Any, *starts: Any, **params: Any) -> Any:
    """A buffer, such as a cache, keeps its dtype, whatever precision the values come in."""
    if regions.current() is not None and {operand.dtype, update.dtype} <= dtypes.CASTABLE:
        update = _cast(update, operand.dtype)
    return bind(operand, update, *starts, **params)


def mixed_rule(bind: Bind, *args: Any, **params: Any) -> Any:
    """`lax.add(product, bias)` written for one dtype still runs when the product is narrower."""
    if regions.current() is not None:
        found = {x.dtype for x in args if getattr(x, "dtype", None) in dtypes.CASTABLE}
        if len(found) > 1:  # float32 is the common one even of bfloat16 and float16
            args = tuple(_cast(x, dtypes.FLOAT32) if getattr(x, "dtype", None) in found else x for x in args)
    return bind(*args, **params)


# The conversion itself, past its rule: what is cast here is no constant of the user's.
_convert = jex.convert_element_type_p.bind

# From the result of a widening cast back to what was widened, by the id of the result.
_widened_from: dict[int, tuple[weakref.ref[Any], Any]] = {}


def convert_rule(bind: Bind, operand: Any, **params: Any) -> Any:
    if regions.current() is None:
        return bind(operand, **params)
    new_dtype = params["new_dtype"]
    aval = jax.typeof(operand)
    if aval.dtype == dtypes.FLOAT32 and new_dtype in dtypes.HALF and aval.weak_type:
        operand = _saturated(operand, new_dtype)
    out = bind(operand, **params)
    if isinstance(out, jax.core.Tracer) and aval.dtype in dtypes.HALF and new_dtype == dtypes.FLOAT32:
        key = id(out)
        _widened_from[key] = (weakref.ref(out, lambda _: _widened_from.pop(key, None)), operand)
    return out


def _saturated(constant: Any, dtype: np.dtype) -> Any:
    """A weakly typed number (so it was written in Python) with what `dtype` cannot hold made finite.

    A mask of -1e9 would become -inf in float16, and -inf - -inf is NaN in a row that is masked throughout.
    Half of the largest number leaves room to add logits, or a second mask, to it. An infinity that the user
    wrote stays one.
    """
    limit = dtypes.limits(dtype).max
    if isinstance(constant, jax.core.Tracer):
        return saturate_p.bind(constant, limit=limit)
    return _saturate(constant, limit=limit) if np.any(np.abs(constant) > limit) else constant


def _saturate(x: Any, *, limit: float) -> Any:
    too_large = lax.bitwise_and(lax.gt(lax.abs(x), lax.full_like(x, limit)), lax.is_finite(x))
    return lax.select(too_large, lax.mul(lax.sign(x), lax.full_like(x, limit / 2)), x)


def fold_saturate(constants: list[Any], params: dict[str, Any], avals: list[Any]) -> list[Any] | None:
    """JAX's folding of constants: where the number is known and fits, nothing is left to do."""
    del avals
    (c,) = constants
    return constants if np.shape(c) == () and not np.abs(c) > params["limit"] else None


# Its own primitive, as it must be the identity to differentiation: JAX converts tangents by the same
# operation as values, and a linear function may hold nothing that depends on what it is applied to.
saturate_p = jax.extend.core.Primitive("mpjax_saturate")
saturate_p.def_impl(_saturate)
saturate_p.def_abstract_eval(lambda x, *, limit: x)
mlir.register_lowering(saturate_p, mlir.lower_fun(_saturate, multiple_results=False))
batching.defvectorized(saturate_p)
ad.deflinear2(saturate_p, lambda cotangent, x, *, limit: [cotangent])


def _cast(x: Any, dtype: np.dtype) -> Any:
    """`x` in `dtype`; where `x` is the result of widening from `dtype`, what was widened."""
    if x.dtype == dtype:
        return x
    narrow = _was(x, dtype)
    return _convert(x, new_dtype=dtype, weak_type=False, sharding=None) if narrow is None else narrow


def _was(x: Any, dtype: Any) -> Any:
    """What was widened from `dtype` to make `x`, if that is how `x` was made."""
    if id(x) in _widened_from:
        ref, narrow = _widened_from[id(x)]
        if ref() is x and narrow.dtype == dtype:
            return narrow
    return None
