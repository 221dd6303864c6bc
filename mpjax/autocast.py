"""How a policy reaches single operations: the only file that hooks into JAX.

`bind` of a fixed table of primitives is wrapped, once, at import. Outside of a region a wrapped primitive
behaves exactly as before. Inside, one of these rules applies:

* compute: products and convolutions take operands of the compute dtype;
* float32 inside: sums, exponentials and their kind run in float32 and hand back what came in;
* float32 outside: decompositions likewise, and JAX's own rules for them run as they come;
* stored: an update of a buffer takes the buffer's dtype;
* constant: a Python number that a 16-bit format cannot hold becomes a large finite one, not infinity;
* differentiation rules that the user wrote run in the region of the function that they belong to;
* mixed: an elementwise operation of `jax.lax`, which does not promote, gets operands of one dtype.

Everything else runs as it comes, by JAX's own promotion. The rules do not depend on the backend.

What a product was decided to run in travels with it, as a mark on its `precision` that compiles to nothing.
JAX evaluates a traced program again to differentiate, batch or rematerialise it, by then often in
another region, and transposes it in none; the mark makes all of these keep to the decision.
"""

import contextlib
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, Self, TypeVar

import jax
import jax.extend.core.primitives as jex
import jax.numpy as jnp
import jmp
import numpy as np
from jax import lax
from jax._src.lax import lax as _lax  # for ragged_dot_general_p, which jax.extend lacks
from jax.custom_derivatives import SymbolicZero
from jax.extend.linear_util import transformation2

from mpjax import dtypes, regions
from mpjax.policy_map import PolicyMap, as_policy_map

P = ParamSpec("P")
R = TypeVar("R")
Bind = Callable[..., Any]

# Frameworks whose modules announce themselves put a context manager here; it is opened around every
# function that runs under a policy (see linen.py).
module_hooks: list[Callable[["Watch"], contextlib.AbstractContextManager[None]]] = []


@dataclasses.dataclass
class Watch:
    """What the hooks saw while a function ran.

    Attributes:
      policies: the map that the function runs under.
      args: its arguments.
      governed: the entries of the map that matched a module.
      modules: class and entry of each module that was called, by path, in the order of the calls.
      paths: the paths of all modules, also of those that were not called.
      initialized: whether a module created its parameters, so that they are among the results.
    """

    policies: PolicyMap
    args: tuple[Any, ...]
    governed: set[int] = dataclasses.field(default_factory=set)
    modules: dict[str, tuple[type, int]] = dataclasses.field(default_factory=dict)
    paths: set[str] = dataclasses.field(default_factory=set)
    initialized: bool = False


def autocast(fn: Callable[P, R], policies: "str | dict | jmp.Policy | PolicyMap") -> Callable[P, R]:
    """Returns `fn` running under policies.

    The function is a region of its own: matrix products and convolutions in it take operands of the compute
    dtype, sums and exponentials run in float32, floating arguments narrower than the compute dtype are
    widened and floating results (other than scalars) come back in the output dtype. flax.linen modules
    that it calls follow the map; nnx modules do after `mpjax.nnx.apply_policy`. What creates
    parameters, such as `model.init`, gets them back in their param dtype.

    It composes with grad, jit, vmap, scan, remat, custom_jvp, custom_vjp and shard_map, from inside and from
    outside. To train, prefer `mpjax.value_and_grad`, which keeps the policy in force during the backward
    pass too.

    Args:
      fn: any function.
      policies: a policy string, a policy, a dict from pattern to policy, or a `PolicyMap`.

    Raises:
      ValueError: when called, if a pattern of the map governs none of the modules that `fn` calls.

    >>> f = autocast(lambda x, w: x @ w, "p=f32,c=bf16,o=f32")
    >>> f(jnp.ones((2, 3)), jnp.ones((3, 4))).dtype
    dtype('float32')
    """
    run = under(fn, policies)
    output_dtype = run.region.policy.output_dtype

    @functools.wraps(fn)
    def autocast_fn(*args: P.args, **kwargs: P.kwargs) -> R:
        out, watch = run(*args, **kwargs)
        return out if watch.initialized else regions.hand_over(out, output_dtype)

    return autocast_fn


class under:
    """`fn` as a function that runs in the region of `policies` and also returns what the hooks saw.

    Unlike `autocast` it leaves the results alone: gradients and states must not be narrowed.
    """

    def __init__(self, fn: Callable[..., Any], policies: "str | dict | jmp.Policy | PolicyMap") -> None:
        self.fn = fn
        self.region = regions.Region(as_policy_map(policies))
        self._name = _name_of(fn)
        # Over all calls, as one that hits a trace cache sees fewer modules than the one that filled it.
        self._governed: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Watch]:
        policies = self.region.policies
        watch = Watch(policies, (*args, *kwargs.values()))
        with contextlib.ExitStack() as stack:
            for hook in module_hooks:
                stack.enter_context(hook(watch))
            out = regions.call_function(self.fn, args, kwargs, self.region, self._name)
        self._governed |= watch.governed
        if policies.entries and watch.paths:
            policies.check_governs(self._governed, watch.paths)
        return out, watch


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorator: runs a function in float32 inside any policy, its own modules included.

    Floating arguments of 16 bits are widened to float32; results come back as the function makes them.

    >>> loss = full_precision(lambda logits: jax.nn.logsumexp(logits))
    >>> loss(jnp.ones(8, jnp.bfloat16)).dtype
    dtype('float32')
    """
    name = _name_of(fn)

    @functools.wraps(fn)
    def full_precision_fn(*args: P.args, **kwargs: P.kwargs) -> R:
        return regions.call_function(fn, args, kwargs, regions.FULL_PRECISION, name)

    return full_precision_fn


def _name_of(fn: Callable[..., Any]) -> str:
    return f"function '{getattr(fn, '__name__', type(fn).__name__)}'"


# --------------------------------------------------------------------------------------------- products


class Decided(tuple):
    """The precision of a product together with the dtype that its operands were decided to have.

    To JAX it is the pair of `lax.Precision` that it equals in meaning, so it lowers to the same program.
    `compute_dtype` is None for a product that was decided to run as it comes.
    """

    compute_dtype: np.dtype | None

    def __new__(cls, precision: tuple[Any, Any] | None, compute_dtype: np.dtype | None) -> Self:
        self = super().__new__(cls, precision or (lax.Precision.DEFAULT, lax.Precision.DEFAULT))
        self.compute_dtype = compute_dtype
        return self

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Decided)
            and tuple.__eq__(self, other)
            and self.compute_dtype == other.compute_dtype
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.compute_dtype))

    def __repr__(self) -> str:
        return f"{'as it comes' if self.compute_dtype is None else self.compute_dtype}:{self[0]}"


# Algorithms that say no more than a 16-bit product with a wide result does. `jax.nn.dot_product_attention` asks
# for them so that its backward products take 16-bit operands, which the mark sees to; and not every
# backend has them.
_PLAIN_ALGORITHMS = {
    lax.DotAlgorithmPreset.BF16_BF16_F32: jnp.bfloat16,
    lax.DotAlgorithmPreset.F16_F16_F32: jnp.float16,
}


def _compute_rule(bind: Bind, lhs: Any, rhs: Any, *rest: Any, **params: Any) -> Any:
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
        precision = params["precision"] = Decided(precision, compute)
    if precision.compute_dtype is not None:
        lhs, rhs = (_cast(x, precision.compute_dtype) for x in (lhs, rhs))
    return bind(lhs, rhs, *rest, **params)


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


def _float32_rule(bind: Bind, *args: Any, **params: Any) -> Any:
    region = regions.current()
    if region is None or region.transparent:
        return bind(*args, **params)
    came_in = _half_dtype_of(args)
    if came_in is None:
        return bind(*args, **params)
    return _cast(bind(*_widened(args), **params), came_in)


def _float32_elementwise_rule(bind: Bind, *args: Any, **params: Any) -> Any:
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


def _scatter_add_rule(bind: Bind, operand: Any, indices: Any, updates: Any, **params: Any) -> Any:
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


def _decomposition_rule(bind: Bind, *args: Any, **params: Any) -> Any:
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


def _stored_rule(bind: Bind, operand: Any, update: Any, *starts: Any, **params: Any) -> Any:
    """A cache keeps its dtype, whatever precision the values come in."""
    if regions.current() is not None and {operand.dtype, update.dtype} <= dtypes.CASTABLE:
        update = _cast(update, operand.dtype)
    return bind(operand, update, *starts, **params)


def _mixed_rule(bind: Bind, *args: Any, **params: Any) -> Any:
    """`lax.add(product, bias)` written for one dtype still runs when the product is narrower."""
    if regions.current() is not None:
        found = {x.dtype for x in args if getattr(x, "dtype", None) in dtypes.CASTABLE}
        if len(found) > 1:  # float32 is the common one even of bfloat16 and float16
            args = tuple(_cast(x, dtypes.FLOAT32) if getattr(x, "dtype", None) in found else x for x in args)
    return bind(*args, **params)


# From the result of a widening cast back to what was widened, by the id of the result.
_widened_from: dict[int, tuple[weakref.ref[Any], Any]] = {}


def _convert_rule(bind: Bind, operand: Any, **params: Any) -> Any:
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
    too_large = (jnp.abs(constant) > limit) & jnp.isfinite(constant)
    return jnp.where(too_large, jnp.sign(constant) * (limit / 2), constant)


def _cast(x: Any, dtype: np.dtype) -> Any:
    """`x` in `dtype`; where `x` is the result of widening from `dtype`, what was widened."""
    if x.dtype == dtype:
        return x
    if id(x) in _widened_from:
        ref, narrow = _widened_from[id(x)]
        if ref() is x and narrow.dtype == dtype:
            return narrow
    return lax.convert_element_type(x, dtype)


# ---------------------------------------------------------------------------------- differentiation rules


def _custom_rule(bind: Bind, *args: Any, **params: Any) -> Any:
    """The user's own differentiation rules are Python that JAX runs when the region has been left."""
    region = regions.current()
    if region is not None and "subfuns" in params:
        function, *rules = params["subfuns"]
        params["subfuns"] = (function, *(_run_in(rule, region) for rule in rules))
    return bind(*args, **params)


@transformation2
def _run_in(rule: Callable[..., Any], region: regions.Region, *args: Any) -> Any:
    with regions.ambient(region):
        return rule(*args)


# ------------------------------------------------------------------------------------------- the table

_TABLE: dict[Callable[..., Any], tuple[str, ...]] = {
    _compute_rule: ("dot_general", "conv_general_dilated", "ragged_dot_general"),
    _float32_elementwise_rule: (
        *("exp", "exp2", "expm1", "log", "log1p", "pow", "rsqrt", "erf_inv", "lgamma", "digamma"),
    ),
    _float32_rule: (
        *("reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "reduce_window_sum"),
    ),
    _scatter_add_rule: ("scatter_add",),
    _decomposition_rule: (
        *("cholesky", "eig", "eigh", "householder_product", "lu", "qr", "schur", "svd"),
        *("triangular_solve", "fft"),
    ),
    _stored_rule: ("dynamic_update_slice",),
    _mixed_rule: (
        *("add", "sub", "mul", "div", "rem", "max", "min", "atan2", "nextafter", "clamp"),
        *("eq", "ne", "lt", "le", "gt", "ge", "select_n", "concatenate"),
    ),
    _convert_rule: ("convert_element_type",),
    _custom_rule: ("custom_jvp_call", "custom_vjp_call"),
}


def _install() -> None:
    for rule, names in _TABLE.items():
        for name in names:
            primitive = getattr(jex, f"{name}_p", None) or getattr(_lax, f"{name}_p", None)
            # Some names came or went between versions of JAX. A module that is loaded twice must not wrap twice.
            if primitive is None or hasattr(primitive.bind, "rule"):
                continue
            primitive.bind = functools.partial(rule, primitive.bind)
            primitive.bind.rule = rule.__name__


_install()
