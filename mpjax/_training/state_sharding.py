"""On which devices the leaves of a training state are placed: like the parameter that they mirror, or on all.

A leaf mirrors a parameter if its path ends with the parameter's and its shape is the same, as with Adam's moments, an
average of the weights, or whatever else an optimizer stores for each of them. Everything else, counters and the loss
scale above all, is the same on all devices of the mesh.
"""

from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpjax._training.types import KeyPath, Leaf, Params, Shardings

T = TypeVar("T")
Path = tuple[str, ...]
Mirrored = dict[Path, tuple[tuple[int, ...], NamedSharding]]  # shape and sharding of each parameter


def state_shardings(state: T, params: Shardings) -> T:
    """The sharding of each leaf of a training state, from those of the parameters.

    With it a state is created, or restored, with every leaf on its devices from the start:

        abstract = jax.eval_shape(create, key)
        state = jax.jit(create, out_shardings=mpjax.state_shardings(abstract, param_shardings))(key)

    Args:
      state: a `TrainState`, or what `jax.eval_shape` tells of one.
      params: a `NamedSharding` for each parameter, in the structure of `state.params`.

    Returns:
      A tree of the structure of `state`, with a `NamedSharding` for each leaf.

    Raises:
      ValueError: if the structures differ, or a leaf of `params` is no `NamedSharding`.
    """
    known: Any = state.params  # type: ignore[attr-defined]
    shardings = jax.tree.leaves(params)
    for sharding in shardings:
        if not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"Expected a jax.sharding.NamedSharding for each parameter, got {sharding!r} of type "
                f"{type(sharding).__name__}. Make them with NamedSharding(mesh, PartitionSpec(…))."
            )
    given: Any = jax.tree.structure(params)
    expected: Any = jax.tree.structure(known)
    if given != expected or not shardings:
        raise ValueError(
            f"The shardings have another structure than the parameters of the state: {given}, expected "
            f"{expected}. Give one NamedSharding for each parameter, as with "
            "jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec(…)), state.params)."
        )
    mirrored = _by_path(known, shardings)
    everywhere = NamedSharding(shardings[0].mesh, PartitionSpec())
    return jax.tree_util.tree_map_with_path(
        lambda path, x: _of_mirrored(path, x, mirrored) or everywhere, state
    )


def placed(tree: T, params: Params) -> T:
    """`tree` on the mesh that the parameters are sharded over; itself if they are not, or while it is traced.

    Args:
      tree: a training state, or a part of it. What is on the mesh already is left there.
      params: the parameters.
    """
    leaves = jax.tree.leaves(params)
    shardings: list[Any] = [x.sharding if _is_concrete(x) else None for x in leaves]
    if not leaves or not all(isinstance(s, NamedSharding) for s in shardings):
        return tree
    devices = shardings[0].device_set  # type: ignore[union-attr]
    mirrored = _by_path(params, shardings)
    everywhere = NamedSharding(shardings[0].mesh, PartitionSpec())  # type: ignore[union-attr]

    def place(path: KeyPath, x: Leaf) -> Leaf:
        if not isinstance(x, np.ndarray) and not (_is_concrete(x) and x.sharding.device_set != devices):
            return x
        return jax.device_put(x, _of_mirrored(path, x, mirrored) or everywhere)

    return jax.tree_util.tree_map_with_path(place, tree)


def _is_concrete(x: Leaf) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _by_path(params: Params, shardings: list[NamedSharding]) -> Mirrored:
    """Shape and sharding of each parameter by its path, with and without the name of Flax's collection."""
    found = {}
    for (path, x), sharding in zip(jax.tree_util.tree_leaves_with_path(params), shardings, strict=True):
        names = _names(path)
        found[names] = np.shape(x), sharding
        if names[:1] == ("params",):
            found[names[1:]] = np.shape(x), sharding
    return found


def _of_mirrored(path: KeyPath, x: Leaf, mirrored: Mirrored) -> NamedSharding | None:
    """The sharding of the parameter that a leaf mirrors, or None."""
    names = _names(path)
    for i in range(len(names) + 1):  # the longest path first
        shape, sharding = mirrored.get(names[i:], (None, None))
        if shape == np.shape(x):
            return sharding
    return None


def _names(path: KeyPath) -> Path:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
