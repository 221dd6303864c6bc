"""Replicas and shards: what differs between devices, and how it comes together.

Inside `jax.shard_map` and `jax.pmap` a function is the program of one device, and what several of them found has to be
brought together by hand. This is all of it: gradients, model state, metrics and the verdict. Under `jax.jit` with
sharded arrays there is one program for all devices, and nothing here has anything to do.

With its checks, `jax.shard_map` knows over which mesh axes a value *varies*. A parameter that varies over an axis is
sharded over it: its gradient is the shard's own. One that does not is replicated: its gradient is averaged.
"""

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import lax

from mpjax._precision import casting, dtypes, regions, rules

T = TypeVar("T")
AxisName = Any


def all_gather(x: jax.Array, axis_name: AxisName, *, axis: int = 0) -> jax.Array:
    """A parameter that is sharded over a mapped axis, whole: gathered in the compute dtype of the ambient policy.

    What travels is what products take, half the bytes of float32. Its gradient goes back to the shards in float32, or
    in the compute dtype where `reduce_dtype="compute"` asks for it. Without a policy it is `jax.lax.all_gather`.

    Args:
      x: this device's shard.
      axis_name: the mapped axis (or several) that it is sharded over.
      axis: which dimension is sharded.

    Returns:
      The whole, in the dtype of `x`, with the digits of the compute dtype.

    Raises:
      ValueError: when differentiated, where shard_map does not keep track: the gradient of the shard would be
        averaged as if it were that of the whole.
    """
    region = regions.current()
    narrow = x.dtype
    if region is not None and casting.castable(x) and region.compute_dtype.itemsize < x.dtype.itemsize:
        narrow = region.compute_dtype
    back = narrow if rules.gradients_in_compute_dtype.value else x.dtype

    @jax.custom_vjp
    def gather(x: jax.Array) -> jax.Array:
        return lax.all_gather(x.astype(narrow), axis_name, axis=axis, tiled=True).astype(x.dtype)

    def scatter(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        if untracked := [name for name in names_of(axis_name) if not is_tracked(name)]:
            raise ValueError(
                f"mpjax.all_gather over {untracked[0]!r} cannot be differentiated here: without jax.shard_map's "
                "checks nobody knows that the parameter is sharded, and its gradient would be averaged with those "
                "of other shards. Leave check_vma=True, its default; under jax.pmap keep parameters whole."
            )
        part = lax.psum_scatter(cotangent.astype(back), axis_name, scatter_dimension=axis, tiled=True)
        return (part.astype(x.dtype),)

    gather.defvjp(lambda x: (gather(x), None), scatter)
    return gather(x)


def names_of(axis_name: AxisName | None) -> tuple[Any, ...]:
    """The single names of what a caller gave as `axis_name`."""
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def varying(x: Any) -> frozenset[Any]:
    """The mesh axes over which shard_map knows `x` to differ; none where it does not keep track."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


def is_tracked(name: Any) -> bool:
    """Whether shard_map keeps track of what varies over this axis."""
    return name in varying(jax.eval_shape(lambda: lax.axis_index(name)))


def vary(tree: T, axis_name: AxisName | None) -> T:
    """`tree` as each replica's own, where shard_map keeps track.

    There the gradient of a replicated parameter would arrive summed over the replicas already, in the dtype
    of the parameter and not unscaled: four float16 gradients of 30000 would be infinite.
    """
    names = tuple(name for name in names_of(axis_name) if is_tracked(name))

    def vary_leaf(x: Any) -> Any:
        missing = tuple(name for name in names if name not in varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary_leaf, tree) if names else tree


def average_gradients(
    grads: T,
    params: Any,
    loss: jax.Array,
    axis_name: AxisName | None,
    *,
    loss_scale: Any = None,
    travel_in: tuple[np.dtype | None, ...] | None = None,
) -> T:
    """The gradients of the mean of all replicas' losses.

    The gradient of a replicated parameter is averaged over the axes over which the loss differs, and summed over one
    over which the loss is the same everywhere, as each replica then found its part of it. That of a sharded
    parameter is all there; it belongs to the sum of the losses and is divided by their number. What fp8 layers
    hand back in the place of gradients is not averaged: the largest holds for all replicas.

    Args:
      grads: each replica's gradients, in float32 and unscaled.
      params: what they are the gradients of, in the same structure.
      loss: the loss of this replica.
      axis_name: the axes over which to average.
      loss_scale: what the loss was scaled with; needed with `travel_in`.
      travel_in: for each leaf the dtype in which it is added up over the replicas, None for float32. It travels
        scaled, as the range of float16 wants it, and divided by the number of replicas, so that no sum overflows.
    """
    names = names_of(axis_name)
    if not names:
        return grads
    replicas = math.prod(lax.axis_size(n) for n in names if not is_tracked(n) or n in varying(loss))

    def average(path: Any, grad: Any, param: Any, dtype: np.dtype | None) -> Any:
        if not casting.is_inexact_array(grad):
            return grad
        axes = tuple(n for n in names if n not in varying(param))
        if is_overwritten(path):
            return lax.pmax(grad, axes) if axes else grad
        if dtype is None or not axes:
            return (lax.psum(grad, axes) if axes else grad) / replicas
        travels = (loss_scale.scale(grad) / replicas).astype(dtype)
        return loss_scale.unscale(lax.psum(travels, axes).astype(grad.dtype))

    flat, treedef = jax.tree_util.tree_flatten_with_path(grads)
    wanted = travel_in if travel_in is not None else (None,) * len(flat)
    averaged = [
        average(path, grad, param, dtype)
        for (path, grad), param, dtype in zip(flat, jax.tree.leaves(params), wanted, strict=True)
    ]
    return jax.tree.unflatten(treedef, averaged)


def average_state(new: T, old: Any, axis_name: AxisName | None) -> T:
    """Model state after a step: what was the same on all replicas before is the same again.

    Floating leaves are averaged, in float32. Others (counters, flags, keys) have to be the same already;
    where shard_map keeps track, it has to be told so. What was each replica's own stays so.

    Args:
      new: the state that this replica found.
      old: the state before, by whose paths the leaves of `new` are recognised.
      axis_name: the axes over which to average.
    """
    names = names_of(axis_name)
    before = {jax.tree_util.keystr(path): varying(x) for path, x in jax.tree_util.tree_leaves_with_path(old)}

    def average(path: Any, x: Any) -> Any:
        own = before.get(jax.tree_util.keystr(path), frozenset())
        axes = tuple(n for n in names if n not in own and (not is_tracked(n) or n in varying(x)))
        if not axes or not isinstance(x, (np.ndarray, jax.Array)):
            return x
        if casting.is_inexact_array(x):
            if is_overwritten(path):
                return lax.pmax(x, axes)
            return lax.pmean(widened(x), axes).astype(x.dtype)
        return _same(x, tuple(n for n in axes if is_tracked(n)))

    return jax.tree_util.tree_map_with_path(average, new) if names else new


def combine_metrics(tree: T, axis_name: AxisName | None) -> T:
    """The results of all replicas as one: floating leaves averaged, integers added up, bools combined with and."""
    names = names_of(axis_name)

    def combine(x: Any) -> Any:
        if x.dtype == jnp.bool_:
            return lax.pmin(vary(x, names).astype(jnp.int32), names).astype(bool)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return lax.psum(vary(x, names), names)
        return average_state(x, None, names)

    return jax.tree.map(combine, tree) if names else tree


def agree(finite: jax.Array, averaged_over: AxisName | None = None) -> jax.Array:
    """One verdict for all devices of the mesh: true if it is true on each of them.

    Args:
      finite: this device's verdict, shape [] and dtype bool.
      averaged_over: axes over which what it judges has been averaged, so that all devices found the same.
    """
    done = names_of(averaged_over)

    def open_over(name: Any) -> bool:
        if is_tracked(name):
            return name in varying(finite)
        return name not in done and lax.axis_size(name) > 1

    axes = tuple(name for name in manual_axes() if open_over(name))
    return lax.pmin(finite.astype(jnp.int32), axes).astype(bool) if axes else finite


def sum_over_shards(x: jax.Array) -> jax.Array:
    """The sum over all axes over which shard_map knows `x` to vary."""
    axes = tuple(n for n in manual_axes() if n in varying(x))
    return lax.psum(x, axes) if axes else x


def manual_axes() -> tuple[Any, ...]:
    """The mesh axes over which the running function is the program of one device."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def check_bound(axis_name: AxisName | None, tree: Any) -> None:
    """Raises if an axis is not one that the running function is mapped over.

    Args:
      axis_name: the names to check.
      tree: arrays that tell which mesh they are sharded over.

    Raises:
      ValueError: naming the axes that there are, and the way out.
    """
    for name in names_of(axis_name):
        try:
            lax.axis_size(name)
        except NameError:
            raise ValueError(_unbound(name, tree)) from None


def _unbound(name: Any, tree: Any) -> str:
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [s.mesh for x in jax.tree.leaves(tree) if (s := getattr(jax.typeof(x), "sharding", None))]
    on_mesh = dict.fromkeys(axis for mesh in meshes for axis in mesh.axis_names)
    bound = [str(axis) for axis in manual_axes()]
    if name in on_mesh or (on_mesh and not bound):
        return (
            f"axis_name={name!r} is given, but the step is not mapped over such an axis: it runs under jax.jit with "
            f"arrays sharded over the mesh axes {_listed(on_mesh)}, where the mean of the loss is that of the whole "
            "batch already. Leave axis_name out; it belongs to jax.shard_map and to jax.pmap(step, axis_name=…)."
        )
    found = f"bound here are {_listed(bound)}" if bound else "no axis is bound here"
    return (
        f"axis_name={name!r} is no axis that the step is mapped over; {found}"
        f"{dtypes.did_you_mean(str(name), bound)} Run the step inside jax.shard_map over a mesh with that axis, "
        f"or with jax.pmap(step, axis_name={name!r}); under jax.jit with sharded arrays leave axis_name out."
    )


def check_averaged(loss: jax.Array, params: Any, axis_name: AxisName | None) -> None:
    """Raises if gradients would arrive summed over replicas: N times what they should be.

    Raises:
      ValueError: naming the axis to average over.
    """
    for name in sorted(varying(loss) - set(names_of(axis_name)), key=str):
        if all(name in varying(x) for x in jax.tree.leaves(params)):
            continue  # each has parameters of its own
        wanted = (*names_of(axis_name), name) if axis_name else name
        raise ValueError(
            f"The loss differs over the mesh axis {name!r}, over which parameters are the same, and "
            f"axis_name={axis_name!r} does not name it: their gradients would be the sum over its "
            f"{lax.axis_size(name)} replicas, not the mean. Pass axis_name={wanted!r}, or let the loss be the mean "
            f"of all replicas': jax.lax.pmean(loss, {name!r})."
        )


def is_overwritten(path: tuple[Any, ...]) -> bool:
    """Whether a leaf is the next state of an fp8 layer's scale, handed back in the place of a gradient."""
    return any(getattr(key, "key", None) == OVERWRITE_WITH_GRADIENT for key in path)


def widened(x: Any) -> Any:
    """`x` in float32 if it is floating and has fewer bits."""
    return (
        x.astype(dtypes.FLOAT32)
        if casting.is_floating_array(x) and x.dtype.itemsize < dtypes.FLOAT32.itemsize
        else x
    )


def _same(x: Any, axes: tuple[Any, ...]) -> Any:
    """What is the same on all replicas, made known to be."""
    if not axes:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_same(jax.random.key_data(x), axes), impl=jax.random.key_impl(x))
    if x.dtype == jnp.bool_:
        return lax.pmax(x.astype(jnp.int32), axes).astype(bool)
    return lax.pmax(x, axes)


def _listed(names: Any) -> str:
    return ", ".join(repr(str(name)) for name in names)
