"""The factor on the loss that keeps float16 gradients representable.

Names, positional order, leaves and growth after exactly N finite steps are those of jmp, so that code
written for jmp runs. Beyond jmp, a scale is float32 whatever it was made from, unscaling casts up first,
limits survive flattening, a non-finite scale recovers, and leaves that are not floating pass through.

References: Micikevicius et al., "Mixed Precision Training", 2018 (https://arxiv.org/abs/1710.03740).
"""

import dataclasses
import functools
import math
import warnings
from typing import Any, Protocol, TypeVar, runtime_checkable

import flax.serialization
import jax
import jax.numpy as jnp
import jmp
import numpy as np

from mpjax._precision import casting
from mpjax._precision.policy_map import as_policy_map
from mpjax._training.types import Leaf, Policies, Scalar

T = TypeVar("T")

DEFAULT_LOSS_SCALE = 2.0**15
# The largest power of two whose inverse is a normal float32 number, so that unscaling is exact.
DEFAULT_MAX_LOSS_SCALE = 2.0**126


@runtime_checkable
class LossScale(Protocol):
    """What every loss scale can do."""

    @property
    def loss_scale(self) -> Scalar:
        """The factor, of shape []."""

    def scale(self, tree: T) -> T:
        """Multiplies the floating leaves by the factor."""

    def unscale(self, tree: T) -> T:
        """Divides the floating leaves, cast up to float32, by the factor."""

    def adjust(self, grads_finite: jax.Array) -> "LossScale":
        """The scale for the next step."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """No scaling, as for float32 and bfloat16, which has float32's range."""

    @property
    def loss_scale(self) -> int:
        """Always 1."""
        return 1

    def scale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def adjust(self, grads_finite: jax.Array) -> "NoOpLossScale":
        """Returns this very scale."""
        del grads_finite
        return self


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["loss_scale"])
@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """A fixed factor, which is part of the compiled program.

    Attributes:
      loss_scale: the factor, positive and finite. It has no leaves.
    """

    loss_scale: Scalar

    def __post_init__(self) -> None:
        value = _factor(self.loss_scale, "loss_scale")
        if not isinstance(value, jax.core.Tracer):
            value = np.float32(value)
            _check_positive(value, "loss_scale")
        object.__setattr__(self, "loss_scale", value)

    def scale(self, tree: T) -> T:
        """Multiplies the floating leaves by the factor; what has fewer than 32 bits becomes float32."""
        return _multiply(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides the floating leaves by the factor; what has fewer than 32 bits becomes float32 first."""
        return _multiply(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: jax.Array) -> "StaticLossScale":
        """Returns this very scale."""
        del grads_finite
        return self


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A factor that grows while gradients are finite and backs off when they are not.

    After `period` finite steps in a row the scale is multiplied by `factor`; after a step that is not finite,
    divided by it. A scale that is itself not finite goes back to 2**15 (within the limits).

    Attributes:
      loss_scale: the factor, shape [] and dtype float32. A Python number, a numpy or a JAX scalar is taken.
      counter: finite steps since the last change, shape [] and dtype int32. Below zero it counts the
        non-finite steps in a row that `hysteresis` has let pass.
      period: finite steps until the scale grows (the growth interval).
      factor: what the scale grows and backs off by.
      min_loss_scale: the scale never backs off below it.
      max_loss_scale: the scale never grows above it.
      hysteresis: non-finite steps in a row until the scale backs off. The steps are skipped all the same.

    >>> scale = DynamicLossScale(2.0**15, period=2)
    >>> for finite in (True, True, False, False):
    ...     scale = scale.adjust(jnp.asarray(finite))
    >>> float(scale.loss_scale)
    16384.0
    """

    loss_scale: Scalar = DEFAULT_LOSS_SCALE
    counter: Scalar = dataclasses.field(default_factory=lambda: np.zeros([], np.int32))
    period: int = 2000
    factor: float = 2
    min_loss_scale: Scalar = 1.0
    max_loss_scale: Scalar = DEFAULT_MAX_LOSS_SCALE
    hysteresis: int = 1

    def __post_init__(self) -> None:
        for field in ("loss_scale", "min_loss_scale", "max_loss_scale"):
            _warn_if_not_floating(getattr(self, field), field)
            object.__setattr__(self, field, _factor(getattr(self, field), field))
        for field in ("min_loss_scale", "max_loss_scale"):
            limit = getattr(self, field)
            if isinstance(limit, jax.core.Tracer):
                raise TypeError(
                    f"{field} is part of the compiled program and must be a number, got the traced {limit}. "
                    "Make the loss scale outside of jit and pass it in."
                )
            # A Python number, so that limits hash and compare as static data.
            object.__setattr__(self, field, float(limit))
        if isinstance(self.loss_scale, np.ndarray):
            # The value of an array on a device is not read here; TrainState.create reads it once.
            _check_positive(self.loss_scale, "loss_scale")
        if not 0 <= self.min_loss_scale <= self.max_loss_scale < math.inf:
            raise ValueError(
                f"Expected 0 <= min_loss_scale <= max_loss_scale < inf, got min_loss_scale="
                f"{self.min_loss_scale} and max_loss_scale={self.max_loss_scale}."
            )
        if self.period < 1 or self.factor <= 1 or self.hysteresis < 1:
            raise ValueError(
                f"Expected period >= 1, factor > 1 and hysteresis >= 1, got period={self.period}, "
                f"factor={self.factor} and hysteresis={self.hysteresis}."
            )

    def scale(self, tree: T) -> T:
        """Multiplies the floating leaves by the factor; what has fewer than 32 bits becomes float32."""
        return _multiply(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides the floating leaves by the factor; what has fewer than 32 bits becomes float32 first.

        Unscale with the very scale that the loss was scaled with, before `adjust`.
        """
        return _multiply(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: jax.Array) -> "DynamicLossScale":
        """The scale for the next step.

        Args:
          grads_finite: whether this step's gradients were finite, shape [] and dtype bool.
        """
        if jnp.ndim(grads_finite) != 0:
            raise AssertionError(
                f"Expected boolean scalar, got grads_finite of shape {jnp.shape(grads_finite)}; reduce it with "
                "mpjax.all_finite."
            )
        scale = jnp.asarray(self.loss_scale, jnp.float32)
        finite = jnp.asarray(grads_finite, bool)
        streak = jnp.maximum(jnp.asarray(self.counter, jnp.int32), 0) + 1
        grow = finite & (streak >= self.period)
        misses = jnp.minimum(jnp.asarray(self.counter, jnp.int32), 0) - 1
        back_off = ~finite & (misses <= -self.hysteresis)

        grown = jnp.minimum(scale * self.factor, self.max_loss_scale)
        backed_off = jnp.maximum(scale / self.factor, self.min_loss_scale)
        scale = jnp.where(grow, grown, jnp.where(back_off, backed_off, scale))
        recovered = min(max(DEFAULT_LOSS_SCALE, self.min_loss_scale), self.max_loss_scale)
        return dataclasses.replace(
            self,
            loss_scale=jnp.where(jnp.isfinite(scale), scale, jnp.float32(recovered)),
            counter=jnp.where(
                finite,
                jnp.where(grow, 0, streak),
                # A scale that has backed off does so again at once, until a finite step comes.
                jnp.maximum(misses, 1 - self.hysteresis),
            ).astype(jnp.int32),
        )


def loss_scale_for(
    policies: Policies | None,
) -> NoOpLossScale | DynamicLossScale:
    """The loss scale that policies need: dynamic if any of them computes in float16, else none.

    >>> loss_scale_for("p=f32,c=bf16,o=f32")
    NoOpLossScale()
    """
    if policies is None:
        return NoOpLossScale()
    half = any(policy.compute_dtype == np.float16 for policy in as_policy_map(policies).policies)
    return DynamicLossScale() if half else NoOpLossScale()


def as_loss_scale(loss_scale: Any) -> LossScale:
    """A loss scale of jmp's as one of ours, with its numbers; ours are returned unchanged.

    Raises:
      TypeError: if it is no loss scale.
    """
    if isinstance(loss_scale, jmp.NoOpLossScale):
        return NoOpLossScale()
    if isinstance(loss_scale, jmp.StaticLossScale):
        return StaticLossScale(loss_scale.loss_scale)
    if isinstance(loss_scale, jmp.DynamicLossScale):
        return DynamicLossScale(
            loss_scale.loss_scale,
            loss_scale.counter,
            loss_scale.period,
            loss_scale.factor,
            loss_scale.min_loss_scale,
        )
    if isinstance(loss_scale, LossScale) and not isinstance(loss_scale, type):
        return loss_scale
    raise TypeError(
        f"Expected a loss scale such as mpjax.DynamicLossScale(2.0**15), got {loss_scale!r} of type "
        f"{type(loss_scale).__name__}. For a fixed factor use mpjax.StaticLossScale(factor), for none "
        "mpjax.NoOpLossScale()."
    )


def check_loss_scale(loss_scale: LossScale) -> None:
    """Raises if a state cannot be created with this scale; unlike a constructor it reads the device.

    Raises:
      ValueError: if the scale is zero, negative, not finite or not a scalar.
    """
    value = getattr(loss_scale, "loss_scale", 1)
    if not isinstance(value, jax.core.Tracer):
        _check_positive(np.asarray(value), "loss_scale")


def _factor(value: Any, name: str) -> Any:
    """A factor in float32: a JAX array stays one, everything else becomes a numpy array."""
    factor: Any
    try:
        if value is None or isinstance(value, str):  # which numpy takes for numbers
            raise TypeError
        with np.errstate(over="ignore"):  # 1e39 becomes inf, which is refused by name
            factor = (
                value.astype(jnp.float32) if isinstance(value, jax.Array) else np.asarray(value, np.float32)
            )
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be a positive finite number, got {value!r} of type {type(value).__name__}."
        ) from None
    if factor.shape != ():
        raise ValueError(f"{name} must be a scalar of shape [], got shape {list(factor.shape)}: {value}.")
    return factor


def _warn_if_not_floating(value: Any, name: str) -> None:
    dtype = getattr(value, "dtype", np.result_type(type(value)) if isinstance(value, (bool, int)) else None)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        warnings.warn(
            f"Expected floating type for {name}, got {dtype}; it is taken as float32.", stacklevel=4
        )


def _check_positive(value: Any, name: str) -> None:
    if np.shape(value) != () or not np.isfinite(value) or value <= 0:
        raise ValueError(
            f"{name} must be a positive finite number, got {value}. Use 2.0**15, say, or mpjax.NoOpLossScale() "
            "for no scaling."
        )


def _multiply(tree: T, factor: Scalar) -> T:
    def multiply(x: Leaf) -> Leaf:
        if isinstance(x, float):
            return x * factor
        if not casting.is_inexact_array(x):
            return x
        x = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        return x * jnp.asarray(factor, x.dtype)

    return jax.tree.map(multiply, tree)


_LEAVES = ("loss_scale", "counter")
_STATIC = ("period", "factor", "min_loss_scale", "max_loss_scale", "hysteresis")


def _flatten_with_keys(scale: DynamicLossScale) -> tuple[Any, Any]:
    keys = ((jax.tree_util.GetAttrKey(name), getattr(scale, name)) for name in _LEAVES)
    return tuple(keys), tuple(getattr(scale, name) for name in _STATIC)


def _unflatten(static: Any, leaves: Any) -> DynamicLossScale:
    # Not through the constructor, as register_dataclass would: a scale that is replicated or stacked has
    # leaves with an axis more, and JAX handles structures whose leaves are no numbers at all.
    scale = object.__new__(DynamicLossScale)
    for name, value in zip(_LEAVES + _STATIC, (*leaves, *static), strict=True):
        object.__setattr__(scale, name, value)
    return scale


jax.tree_util.register_pytree_with_keys(
    DynamicLossScale,
    _flatten_with_keys,
    _unflatten,
    lambda scale: (tuple(getattr(scale, n) for n in _LEAVES), tuple(getattr(scale, n) for n in _STATIC)),
)


def _to_state_dict(scale: DynamicLossScale) -> dict[str, Any]:
    return {field.name: getattr(scale, field.name) for field in dataclasses.fields(scale)}


def _from_state_dict(scale: DynamicLossScale, state: dict[str, Any]) -> DynamicLossScale:
    for name in _LEAVES:
        if state.get(name) is None:
            raise ValueError(
                f"The restored loss scale has no '{name}'; it has {sorted(state)}. Restore a state that was saved "
                "with a DynamicLossScale, or start with a new one: state.replace(loss_scale="
                "mpjax.DynamicLossScale())."
            )
    value = np.asarray(state["loss_scale"])
    if not np.isfinite(value).all() or value.shape != () or value <= 0:
        raise ValueError(
            f"The restored loss scale is {value}; it must be a positive finite number. Start with a new one: "
            "state.replace(loss_scale=mpjax.DynamicLossScale())."
        )
    return dataclasses.replace(
        scale,
        loss_scale=jnp.asarray(value, jnp.float32),
        counter=jnp.asarray(state["counter"], jnp.int32),
        **{name: type(getattr(scale, name))(state[name]) for name in _STATIC if name in state},
    )


flax.serialization.register_serialization_state(DynamicLossScale, _to_state_dict, _from_state_dict)
for _cls in (NoOpLossScale, StaticLossScale):
    flax.serialization.register_serialization_state(_cls, lambda scale: {}, lambda scale, state: scale)
