"""What a policy does to single operations: one rule for each kind.

A rule gets the `bind` of a primitive and the arguments that JAX wanted to bind, and binds what the policy says
instead. `ops.py` says which operation has which rule. Without a policy a rule changes nothing.
"""

import functools
import math
import weakref
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from mpjax._precision import dtypes, jax_internals, regions
from mpjax._precision.jax_internals import Bind, Transpose

# What `bind` takes by keyword and an equation of a jaxpr shows in brackets.
Params: TypeAlias = dict[str, Any]
# A primitive's result: an array, or a list of them.
Result: TypeAlias = Any

# ------------------------------------------------------------------------------------------- matmuls


class PolicyPrecision(tuple):
    """The `precision` of a matmul that a policy has decided on, with what it decided.

    To JAX it is the pair of `lax.Precision` that it equals in meaning, so it lowers to the same program. JAX evaluates
    a traced program again to differentiate, batch or rematerialise it, by then often under another policy, and
    transposes it under none. What it copies from an operation to its derivatives are the parameters, so the decision
    is one of them.

    Attributes:
      compute_dtype: the dtype of both operands; None if the policy leaves this matmul as the program has it.
      narrowed: for each operand whether the policy narrowed it from float32.
    """

    compute_dtype: np.dtype | None
    narrowed: tuple[bool, bool]

    def __new__(
        cls,
        precision: tuple[lax.Precision, lax.Precision] | None,
        compute_dtype: np.dtype | None,
        narrowed: tuple[bool, bool] = (False, False),
    ) -> Self:
        self = super().__new__(cls, precision or (lax.Precision.DEFAULT, lax.Precision.DEFAULT))
        self.compute_dtype = compute_dtype
        self.narrowed = narrowed
        return self

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PolicyPrecision)
            and tuple.__eq__(self, other)
            and (self.compute_dtype, self.narrowed) == (other.compute_dtype, other.narrowed)
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.compute_dtype, self.narrowed))

    def __repr__(self) -> str:
        return f"{'unchanged' if self.compute_dtype is None else self.compute_dtype}:{self[0]}"


# Algorithms that ask for no more than 16-bit operands and a wide result. `jax.nn.dot_product_attention` asks
# for them so that its backward matmuls take 16-bit operands, which PolicyPrecision sees to; and not every
# backend has them.
_PLAIN_ALGORITHMS = {
    lax.DotAlgorithmPreset.BF16_BF16_F32: jnp.bfloat16,
    lax.DotAlgorithmPreset.F16_F16_F32: jnp.float16,
}


def compute_rule(bind: Bind, lhs: jax.Array, rhs: jax.Array, *rest: jax.Array, **params: Any) -> Result:
    """Both operands are cast to the compute dtype, which the result has too, unless it was asked to be wider.

    A decision that a matmul carries already is kept to, also where no policy is in force.
    """
    region = regions.current()
    precision = params["precision"]
    if type(precision) is not PolicyPrecision:
        if region is None:
            return bind(lhs, rhs, *rest, **params)
        if precision in _PLAIN_ALGORITHMS and lhs.dtype == rhs.dtype == _PLAIN_ALGORITHMS[precision]:
            precision = params["precision"] = None
        if not (precision is None or isinstance(precision, tuple)):
            return bind(lhs, rhs, *rest, **params)  # an explicit algorithm leaves nothing to decide
        compute = _decide(region, lhs, rhs, params)
        if compute is not None:
            params["preferred_element_type"] = _result_dtype(
                lhs, rhs, params["preferred_element_type"], compute
            )
        narrowed = (_narrows(lhs, compute), _narrows(rhs, compute))
        precision = params["precision"] = PolicyPrecision(precision, compute, narrowed)
    if precision.compute_dtype is not None:
        lhs, rhs = (_cast(x, precision.compute_dtype) for x in (lhs, rhs))
    return bind(lhs, rhs, *rest, **params)


# Whether gradients of operands that a matmul narrowed leave their matmul in the compute dtype.
gradients_in_compute_dtype = jax.make_user_context(False)


def transpose_rule(
    transpose: Transpose, i: int, cotangent: jax.Array, lhs: Any, rhs: Any, **params: Any
) -> jax.Array:
    """The gradient of an operand that a matmul narrowed leaves its own matmul in float32.

    The gradient ends up in float32, and a program for many devices adds it up over them in that dtype: rounded to
    16 bits before, each device's part would be rounded, and so would be their sum.

    Args:
      transpose: JAX's rule for the i-th operand.
      i: which operand to find the gradient of.
      cotangent: of the result.
      lhs: an operand, or in the place of the i-th an object that tells its type.
      rhs: likewise.
      **params: of the matmul.
    """
    precision = params["precision"]
    narrowed = type(precision) is PolicyPrecision and precision.narrowed[i]
    if narrowed and not gradients_in_compute_dtype.value:
        wide = jax_internals.wanted_operand((lhs, rhs)[i], dtypes.FLOAT32)
        lhs, rhs = (wide, rhs) if i == 0 else (lhs, wide)
        params["precision"] = PolicyPrecision(tuple(precision), precision.compute_dtype)
        params["preferred_element_type"] = dtypes.FLOAT32
    return transpose(cotangent, lhs, rhs, **params)


def _narrows(x: jax.Array, compute: np.dtype | None) -> bool:
    return compute in dtypes.HALF and x.dtype == dtypes.FLOAT32 and _was(x, compute) is None


def _decide(region: regions.Region, lhs: jax.Array, rhs: jax.Array, params: Params) -> np.dtype | None:
    """The dtype that the operands of a matmul take, or None to leave it unchanged."""
    if region.transparent or lax.Precision.HIGHEST in (params["precision"] or ()):
        return None
    if not {lhs.dtype, rhs.dtype} <= dtypes.CASTABLE:
        return None
    wanted = params["preferred_element_type"]
    if wanted is not None and not dtypes.is_floating(wanted):
        return None
    return None if _sums_nothing(lhs, params) else region.compute_dtype


def _sums_nothing(lhs: jax.Array, params: Params) -> bool:
    """Whether a `dot_general` is elementwise work, such as positions times frequencies."""
    if "window_strides" in params or "dimension_numbers" not in params:
        return False
    (contracted, _), _ = params["dimension_numbers"]
    return math.prod(lhs.shape[d] for d in contracted) == 1


def _result_dtype(lhs: jax.Array, rhs: jax.Array, wanted: DTypeLike | None, compute: np.dtype) -> np.dtype:
    """The compute dtype, or the dtype that the program asked for if that is wider than its operands.

    `jnp.einsum` on float32 arrays asks for a float32 result because its operands are float32, not to widen them.
    """
    given = max(lhs.dtype.itemsize, rhs.dtype.itemsize)
    if wanted is not None:
        wanted = np.dtype(wanted)
        if wanted.itemsize > max(given, compute.itemsize):
            return wanted
        if wanted.itemsize > given and wanted.itemsize == compute.itemsize:
            return wanted
    return compute


# ------------------------------------------------------------------------------------ float32 inside


def float32_rule(bind: Bind, *args: jax.Array, **params: Any) -> Result:
    """16-bit operands are cast to float32, and the result is cast back to their dtype."""
    half = _half_to_widen(args)
    if half is None:
        return bind(*args, **params)
    return _cast(bind(*_widened(args), **params), half)


def float32_elementwise_rule(bind: Bind, *args: jax.Array, **params: Any) -> Result:
    """The same for operations whose derivative is not constant.

    Differentiating through the casts would save the derivative for the backward pass in float32, twice the
    bytes that a model written in 16 bits saves. So it is computed in float32 and saved in the operands' dtype.
    """
    half = _half_to_widen(args)
    if half is None:
        return bind(*args, **params)

    @jax.custom_jvp
    def narrow(*args: jax.Array) -> jax.Array:
        return _cast(bind(*_widened(args), **params), half)

    def jvp(args: tuple[jax.Array, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        out = narrow(*args)
        parts = [
            _cast(t, half) * _derivative(bind, params, i, args, out)
            for i, t in enumerate(tangents)
            if not isinstance(t, SymbolicZero) and dtypes.is_floating(t.dtype)
        ]
        return out, functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(out)

    narrow.defjvp(jvp, symbolic_zeros=True)
    return narrow(*args)


def _derivative(bind: Bind, params: Params, i: int, args: tuple[jax.Array, ...], out: jax.Array) -> jax.Array:
    """The derivative of an elementwise operation by its i-th operand, in the dtype of `out`."""
    if bind.__self__.name == "exp":  # type: ignore[attr-defined]
        return out  # which the forward pass saves anyway
    wide = _widened(args)

    def op(x: jax.Array) -> jax.Array:
        return bind(*wide[:i], x, *wide[i + 1 :], **params)

    return _cast(jax.jvp(op, (wide[i],), (jnp.ones_like(wide[i]),))[1], out.dtype)


def scatter_add_rule(
    bind: Bind, operand: jax.Array, indices: jax.Array, updates: jax.Array, **params: Any
) -> Result:
    """The same for `scatter-add`, whose parameters hold the addition of one dtype."""
    region = regions.current()
    if region is None or region.transparent or operand.dtype not in dtypes.HALF:
        return bind(operand, indices, updates, **params)
    # The public function traces the addition anew, for float32.
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


def decomposition_rule(bind: Bind, *args: jax.Array, **params: Any) -> Result:
    """The same for decompositions, and JAX's own rules for them run as if there were no policy."""
    region = regions.current()
    if region is None or region.transparent:
        return bind(*args, **params)
    half = _half_dtype_of(args)
    with regions.ambient(regions.TRANSPARENT):
        if half is None:
            return bind(*args, **params)
        out = bind(*_widened(args), **params)
        return jax.tree.map(lambda x: _cast(x, half) if x.dtype == dtypes.FLOAT32 else x, out)


def _half_to_widen(args: tuple[jax.Array, ...]) -> np.dtype | None:
    """The 16-bit dtype of the operands, None if there is nothing to widen or no policy that says so."""
    region = regions.current()
    return None if region is None or region.transparent else _half_dtype_of(args)


def _half_dtype_of(args: tuple[jax.Array, ...]) -> np.dtype | None:
    return next((x.dtype for x in args if getattr(x, "dtype", None) in dtypes.HALF), None)


def _widened(args: tuple[jax.Array, ...]) -> list[jax.Array]:
    return [_cast(x, dtypes.FLOAT32) if getattr(x, "dtype", None) in dtypes.HALF else x for x in args]


# --------------------------------------------------------------------------- operands of several dtypes


def stored_rule(
    bind: Bind, operand: jax.Array, update: jax.Array, *starts: jax.Array, **params: Any
) -> Result:
    """What is written into a buffer, such as a cache, is cast to the buffer's dtype."""
    if regions.current() is not None and {operand.dtype, update.dtype} <= dtypes.CASTABLE:
        update = _cast(update, operand.dtype)
    return bind(operand, update, *starts, **params)


def mixed_rule(bind: Bind, *args: jax.Array, **params: Any) -> Result:
    """Operands of several dtypes are cast to float32: `lax.add(matmul, bias)` runs though the matmul is narrower."""
    if regions.current() is not None:
        found = {x.dtype for x in args if getattr(x, "dtype", None) in dtypes.CASTABLE}
        if len(found) > 1:  # float32 is the common one even of bfloat16 and float16
            args = tuple(_cast(x, dtypes.FLOAT32) if getattr(x, "dtype", None) in found else x for x in args)
    return bind(*args, **params)


# ------------------------------------------------------------------------------- the user's derivatives


def custom_rule(bind: Bind, *args: jax.Array, **params: Any) -> Result:
    """The user's own differentiation rules, which JAX calls later, run under the policy of here."""
    region = regions.current()
    if region is not None and "subfuns" in params:
        function, *derivatives = params["subfuns"]
        within = (jax_internals.run_within(f, regions.ambient, region) for f in derivatives)
        params["subfuns"] = (function, *within)
    return bind(*args, **params)


# ---------------------------------------------------------------------------------- casts and constants

# The conversion itself, without its rule: what is cast here is no constant of the user's.
_convert = jax_internals.unwrapped_bind("convert_element_type")

# From the id of each traced value that a cast widened to a reference to it and what it was widened from. An entry
# goes with its value, so what is found depends on nothing but the value that it is asked for.
_widened_from: dict[int, tuple[weakref.ref[jax.Array], jax.Array]] = {}


def convert_rule(bind: Bind, operand: jax.Array, **params: Any) -> Result:
    """A constant that the 16-bit format cannot hold is made finite; casts that widen are remembered for `_cast`."""
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


def _saturated(constant: jax.Array, dtype: np.dtype) -> jax.Array:
    """A weakly typed number (so it was written in Python) with what `dtype` cannot hold made finite.

    A mask of -1e9 would become -inf in float16, and -inf - -inf is NaN in a row that is masked throughout.
    Half of the largest number leaves room to add logits, or a second mask, to it. An infinity that the user
    wrote stays one.
    """
    limit = dtypes.limits(dtype).max
    if isinstance(constant, jax.core.Tracer):
        return saturate_p.bind(constant, limit=limit)
    return _saturate(constant, limit=limit) if np.any(np.abs(constant) > limit) else constant


def _saturate(x: jax.Array, *, limit: float) -> jax.Array:
    too_large = lax.bitwise_and(lax.gt(lax.abs(x), lax.full_like(x, limit)), lax.is_finite(x))
    return lax.select(too_large, lax.mul(lax.sign(x), lax.full_like(x, limit / 2)), x)


def _fits(constant: np.ndarray, params: Params) -> bool:
    return np.shape(constant) == () and not np.abs(constant) > params["limit"]


# Its own primitive, as it must be the identity to differentiation: JAX converts tangents by the same
# operation as values, and a linear function may hold nothing that depends on what it is applied to.
saturate_p = jax_internals.identity_to_derivatives("mpjax_saturate", _saturate, _fits)


def _cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x` in `dtype`; where `x` is the result of widening from `dtype`, what was widened."""
    if x.dtype == dtype:
        return x
    narrow = _was(x, dtype)
    return _convert(x, new_dtype=dtype, weak_type=False, sharding=None) if narrow is None else narrow


def _was(x: jax.Array, dtype: np.dtype | None) -> jax.Array | None:
    """What was widened from `dtype` to make `x`, if that is how `x` was made."""
    if id(x) in _widened_from:
        ref, narrow = _widened_from[id(x)]
        if ref() is x and narrow.dtype == dtype:
            return narrow
    return None
