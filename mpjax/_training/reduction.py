"""How what replicas found becomes one: their gradients, metrics and model state.

Inside `jax.shard_map` and `jax.pmap` each device has gradients of its own part of the batch. They are averaged here in
float32, or in the compute dtype where a `Reduction` says so. Under `jax.jit` with sharded arrays the mean of the loss
is that of the whole batch, there are no axes to average over, and all of this does nothing.
"""

import dataclasses
import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._precision import casting, dtypes
from mpjax._precision.policy_map import PolicyMap, leaf_dtypes
from mpjax._training import overwritten
from mpjax._training.cross_device import is_tracked, names_of, vary, varying
from mpjax._training.finite import to_float32
from mpjax._training.loss_scale import LossScale
from mpjax._training.overwritten import Split
from mpjax._training.types import AxisName, KeyPath, Leaf, ModelState, Params

T = TypeVar("T")
REDUCE_DTYPES = ("float32", "compute")


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Over which axes replicas are averaged, and in which dtype their gradients are added up.

    Attributes:
      axis_name: as of `make_train_step`: one name, several, or None.
      reduce_dtype: `"float32"`, or `"compute"` for the compute dtype of the policy that governs each gradient.

    Raises:
      ValueError: if `reduce_dtype` is another.
    """

    axis_name: AxisName | None = None
    reduce_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.reduce_dtype not in REDUCE_DTYPES:
            raise ValueError(
                "reduce_dtype must be 'float32' or 'compute' (the compute dtype of the policy), got "
                f"{self.reduce_dtype!r}{dtypes.did_you_mean(str(self.reduce_dtype), list(REDUCE_DTYPES))}"
            )
        if isinstance(self.axis_name, list):
            object.__setattr__(self, "axis_name", tuple(self.axis_name))

    @property
    def names(self) -> tuple[AxisName, ...]:
        """The single names of the axes."""
        return names_of(self.axis_name)

    @property
    def in_compute_dtype(self) -> bool:
        """Whether gradients are communicated in the compute dtype."""
        return self.reduce_dtype == "compute"


def average_gradients(
    grads: Split,
    params: Params,
    loss: jax.Array,
    reduction: Reduction,
    policies: PolicyMap | None,
    loss_scale: LossScale,
) -> Split:
    """The gradients of the mean of all replicas' losses.

    The gradient of a replicated parameter is averaged over the axes over which the loss differs, and summed over one
    over which the loss is the same everywhere, as each replica then found its part of it. The gradient of a sharded
    parameter is complete; it belongs to the sum of the losses and is divided by their number. The next state of fp8
    layers is not averaged: the largest value holds for all replicas.

    Args:
      grads: each replica's gradients, in float32 and unscaled.
      params: what they are the gradients of, in the same structure.
      loss: the loss of this replica.
      reduction: the axes over which to average, and in which dtype to communicate. In a 16-bit dtype gradients are
        communicated scaled, as the range of float16 requires, and divided by the number of replicas, so that no sum
        overflows.
      policies: the map whose compute dtypes those are.
      loss_scale: what the loss was scaled with.
    """
    names = reduction.names
    if not names:
        return grads
    replicas = math.prod(lax.axis_size(n) for n in names if not is_tracked(n) or n in varying(loss))

    def average(grad: Leaf, param: Leaf, dtype: np.dtype | None) -> Leaf:
        if not casting.is_inexact_array(grad):
            return grad
        axes = _replicated_over(param, names)
        if dtype is None or not axes:
            return (lax.psum(grad, axes) if axes else grad) / replicas
        sent = (loss_scale.scale(grad) / replicas).astype(dtype)
        return loss_scale.unscale(lax.psum(sent, axes).astype(grad.dtype))

    def largest(grad: Leaf, param: Leaf) -> Leaf:
        axes = _replicated_over(param, names)
        return lax.pmax(grad, axes) if axes and casting.is_inexact_array(grad) else grad

    of = overwritten.split(params)
    flat, treedef = jax.tree.flatten(grads.trained)
    sent_in = _communication_dtypes(of.trained, reduction, policies)
    averaged = [average(*x) for x in zip(flat, jax.tree.leaves(of.trained), sent_in, strict=True)]
    return Split(
        jax.tree.unflatten(treedef, averaged),
        jax.tree.map(largest, grads.overwritten, of.overwritten),
    )


def average_state(new: T, old: ModelState, reduction: Reduction) -> T:
    """Model state after a step: what was the same on all replicas before is the same again.

    Floating leaves are averaged, in float32. Others (counters, flags, keys) have to be the same already;
    where shard_map keeps track of that, they are marked so. What was each replica's own remains its own.

    Args:
      new: the state that this replica found.
      old: the state before, by whose paths the leaves of `new` are recognized.
      reduction: the axes over which to average.
    """
    names = reduction.names
    if not names:
        return new
    before = {jax.tree_util.keystr(path): varying(x) for path, x in jax.tree_util.tree_leaves_with_path(old)}

    def differs_over(path: KeyPath, x: Leaf) -> tuple[AxisName, ...]:
        if not isinstance(x, (np.ndarray, jax.Array)):
            return ()
        own = before.get(jax.tree_util.keystr(path), frozenset())
        return tuple(n for n in names if n not in own and (not is_tracked(n) or n in varying(x)))

    def average(path: KeyPath, x: Leaf) -> Leaf:
        axes = differs_over(path, x)
        if not axes:
            return x
        if casting.is_inexact_array(x):
            return lax.pmean(to_float32(x), axes).astype(x.dtype)
        return _marked_as_same(x, tuple(n for n in axes if is_tracked(n)))

    def largest(path: KeyPath, x: Leaf) -> Leaf:
        axes = differs_over(path, x)
        return lax.pmax(x, axes) if axes else x

    parts = overwritten.split(new)
    over_paths = jax.tree_util.tree_map_with_path
    return overwritten.merge(
        Split(over_paths(average, parts.trained), over_paths(largest, parts.overwritten))
    )


def combine_metrics(tree: T, reduction: Reduction) -> T:
    """The results of all replicas as one: floating leaves averaged, integers added up, bools combined with and."""
    names = reduction.names

    def combine(x: Leaf) -> Leaf:
        if x.dtype == jnp.bool_:
            return lax.pmin(vary(x, names).astype(jnp.int32), names).astype(bool)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return lax.psum(vary(x, names), names)
        return average_state(x, None, reduction)

    return jax.tree.map(combine, tree) if names else tree


def _communication_dtypes(
    params: Params, reduction: Reduction, policies: PolicyMap | None
) -> list[np.dtype | None]:
    """For each gradient the 16-bit dtype in which it is added up over the replicas, None for float32."""
    if not reduction.in_compute_dtype or policies is None:
        return [None] * len(jax.tree.leaves(params))
    compute = leaf_dtypes(params, policies, "compute_dtype")
    return [dtype if dtype in dtypes.HALF else None for _, _, dtype in compute]


def _replicated_over(param: Leaf, names: tuple[AxisName, ...]) -> tuple[AxisName, ...]:
    return tuple(n for n in names if n not in varying(param))


def _marked_as_same(x: Leaf, axes: tuple[AxisName, ...]) -> Leaf:
    """What is the same on all replicas, in a form from which shard_map can tell."""
    if not axes:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _marked_as_same(jax.random.key_data(x), axes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if x.dtype == jnp.bool_:
        return lax.pmax(x.astype(jnp.int32), axes).astype(bool)
    return lax.pmax(x, axes)
