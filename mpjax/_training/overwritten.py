"""The state of Flax's fp8 layers, whose next values arrive in the place of gradients.

Flax stores the scales and histories of fp8 layers among the parameters, in a collection of their own, and what
`jax.grad` returns for such a leaf is not its gradient but its next value. It is neither unscaled nor averaged, is no
part of a norm, and no optimizer sees it: of all microbatches and replicas the largest value holds. These leaves are
split off right after `jax.grad` and merged again at the end. This module alone recognizes them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from mpjax._training.types import KeyPath, Leaf, Params, PyTree

_TRAINED = "params"


class Split(NamedTuple):
    """A tree in two parts.

    Each has the structure of the tree, with None in the place of the leaves of the other.

    Attributes:
      trained: parameters that are trained, or their gradients.
      overwritten: the state of fp8 layers, or its next values; None if there are no such layers.
    """

    trained: PyTree
    overwritten: PyTree


def split(tree: PyTree) -> Split:
    """Takes a tree of parameters, gradients or model state apart."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    flags = [_is_overwritten(path) for path, _ in leaves]
    if not any(flags):
        return Split(tree, None)
    pairs = [(x, flag) for (_, x), flag in zip(leaves, flags, strict=True)]
    return Split(
        jax.tree.unflatten(treedef, [None if flag else x for x, flag in pairs]),
        jax.tree.unflatten(treedef, [x if flag else None for x, flag in pairs]),
    )


def merge(parts: Split) -> PyTree:
    """The tree that `split` took apart."""
    if parts.overwritten is None:
        return parts.trained
    return jax.tree.map(_either, parts.trained, parts.overwritten, is_leaf=lambda x: x is None)


def optimizer_view(trained: Params) -> tuple[Params, Callable[[Params], Params]]:
    """The parameters as the optimizer gets them, and how to put new ones back in their place.

    As in Flax's `TrainState`, it gets the collection "params" alone where the state of fp8 layers stands next to it.
    """
    if not isinstance(trained, Mapping) or OVERWRITE_WITH_GRADIENT not in trained:
        return trained, lambda new: new
    container = type(trained)
    return trained[_TRAINED], lambda new: container({**trained, _TRAINED: new})  # type: ignore[call-arg]


def _either(trained: Leaf, overwritten: Leaf) -> Leaf:
    return overwritten if trained is None else trained


def _is_overwritten(path: KeyPath) -> bool:
    return any(getattr(key, "key", None) == OVERWRITE_WITH_GRADIENT for key in path)
