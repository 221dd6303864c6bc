"""What differs between devices, and how they come to the same decision.

Inside `jax.shard_map` and `jax.pmap` a function is the program of one device. This module knows over which mesh axes
a value *varies*, as `jax.shard_map` with its checks keeps track of it: a parameter that varies over an axis is sharded
over it, one that does not is replicated. Under `jax.jit` with sharded arrays there is one program for all devices, and
nothing here has anything to do.
"""

from collections.abc import Iterable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from mpjax._precision import casting, dtypes, regions, rules
from mpjax._training.types import AxisName, Finite, Leaf, Params, PyTree

T = TypeVar("T")


def all_gather(x: jax.Array, axis_name: AxisName, *, axis: int = 0) -> jax.Array:
    """The whole of a parameter that is sharded over a mapped axis.

        params = jax.tree.map(lambda w: mpjax.all_gather(w, "data"), params)  # inside jax.shard_map

    It is communicated in the compute dtype of the ambient policy, in which matmuls take it anyway: half the bytes of
    float32. Its gradient is summed and scattered to the shards in float32, or in the compute dtype with
    `reduce_dtype="compute"`. Without a policy it is `jax.lax.all_gather`.

    Args:
      x: this device's shard.
      axis_name: the mapped axis (or several) that it is sharded over.
      axis: which dimension is sharded.

    Returns:
      The whole parameter, in the dtype of `x`, rounded to the compute dtype.

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
                "checks JAX does not know that the parameter is sharded, and its gradient would be averaged with those "
                "of other shards. Leave check_vma=True, its default; under jax.pmap keep parameters whole."
            )
        part = lax.psum_scatter(cotangent.astype(back), axis_name, scatter_dimension=axis, tiled=True)
        return (part.astype(x.dtype),)

    gather.defvjp(lambda x: (gather(x), None), scatter)
    return gather(x)


def names_of(axis_name: AxisName | None) -> tuple[AxisName, ...]:
    """The single names of what a caller gave as `axis_name`."""
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def varying(x: Leaf) -> frozenset[AxisName]:
    """The mesh axes over which shard_map knows `x` to differ; none where it does not keep track."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


def is_tracked(name: AxisName) -> bool:
    """Whether shard_map keeps track of what varies over this axis."""
    return name in varying(jax.eval_shape(lambda: lax.axis_index(name)))


def vary(tree: T, axis_name: AxisName | None) -> T:
    """`tree` as each replica's own, where shard_map keeps track.

    There the gradient of a replicated parameter would arrive summed over the replicas already, in the dtype
    of the parameter and not unscaled: four float16 gradients of 30000 would be infinite.
    """
    names = tuple(name for name in names_of(axis_name) if is_tracked(name))

    def vary_leaf(x: Leaf) -> Leaf:
        missing = tuple(name for name in names if name not in varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary_leaf, tree) if names else tree


def agree(finite: Finite, averaged_over: AxisName | None = None) -> Finite:
    """A finite flag that is the same on all devices of the mesh: true if it is true on each of them.

    Args:
      finite: this device's flag, shape [] and dtype bool.
      averaged_over: axes over which the values behind it have been averaged, so that all devices found the same.
    """
    done = names_of(averaged_over)

    def differs_over(name: AxisName) -> bool:
        if is_tracked(name):
            return name in varying(finite)
        return name not in done and lax.axis_size(name) > 1

    axes = tuple(name for name in manual_axes() if differs_over(name))
    return lax.pmin(finite.astype(jnp.int32), axes).astype(bool) if axes else finite


def sum_over_shards(x: jax.Array) -> jax.Array:
    """The sum over all axes over which shard_map knows `x` to vary."""
    axes = tuple(n for n in manual_axes() if n in varying(x))
    return lax.psum(x, axes) if axes else x


def manual_axes() -> tuple[AxisName, ...]:
    """The mesh axes over which the running function is the program of one device."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def check_bound(axis_name: AxisName | None, tree: PyTree) -> None:
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


def _unbound(name: AxisName, tree: PyTree) -> str:
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


def check_averaged(loss: jax.Array, params: Params, axis_name: AxisName | None) -> None:
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


def _listed(names: Iterable[AxisName]) -> str:
    return ", ".join(repr(str(name)) for name in names)
