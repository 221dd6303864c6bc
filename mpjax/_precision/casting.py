"""Casting the floating leaves of a pytree.

The leaf rule is jmp's: only numpy and JAX arrays of a floating dtype are cast, numpy stays numpy. Integers,
bools, PRNG keys, Python numbers, None and float0 pass, and an unchanged leaf is the same object.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard, TypeVar

import chex
import jax
import numpy as np
from flax.core import FrozenDict
from jax.typing import DTypeLike

from mpjax._precision import dtypes

T = TypeVar("T")
# What a pytree may hold: arrays, of which some are cast, and anything else.
Leaf: TypeAlias = Any


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Returns `tree` with its floating arrays in `dtype`, and all other leaves unchanged.

    >>> tree = cast_floating({"w": jnp.ones(2), "step": jnp.array(3)}, "bfloat16")
    >>> tree["w"].dtype, tree["step"].dtype
    (dtype(bfloat16), dtype('int32'))

    Args:
      tree: any pytree.
      dtype: a floating dtype.

    Returns:
      A tree of the same structure; `tree` itself if nothing had to be cast.
    """
    dtype = np.dtype(dtype)
    return map_changed(lambda x: cast_leaf(x, dtype) if is_floating_array(x) else x, tree)


def cast_to_full(tree: T) -> T:
    """Returns `tree` with its floating arrays in float32, see `cast_floating`."""
    return cast_floating(tree, np.float32)


def cast_to_half(tree: T) -> T:
    """Returns `tree` with its floating arrays in the backend's 16-bit format, `half_dtype()`."""
    return cast_floating(tree, dtypes.half_dtype())


def is_floating_array(x: Leaf) -> TypeGuard[chex.Array]:
    """Whether `x` is a numpy or JAX array of a real floating dtype."""
    return isinstance(x, (np.ndarray, jax.Array)) and dtypes.is_floating(x.dtype)


def cast_leaf(x: chex.Array, dtype: DTypeLike) -> chex.Array:
    """`x` in `dtype`, or `x` itself where it is that already: numpy's `astype` would copy it."""
    return x if x.dtype == dtype else x.astype(dtype)


def is_inexact_array(x: Leaf) -> TypeGuard[chex.Array]:
    """Whether `x` is a numpy or JAX array of a floating or complex dtype."""
    return isinstance(x, (np.ndarray, jax.Array)) and jax.numpy.issubdtype(x.dtype, np.inexact)


def castable(x: Leaf) -> TypeGuard[chex.Array]:
    """Whether `x` is an array of a format that policies move values between."""
    return isinstance(x, (np.ndarray, jax.Array)) and x.dtype in dtypes.CASTABLE


def dtypes_of(tree: chex.ArrayTree) -> tuple[np.dtype | None, ...]:
    """The dtypes of the leaves, None for what is no array."""
    return tuple(getattr(x, "dtype", None) for x in jax.tree.leaves(tree))


def cast_to_dtypes(tree: T, leaf_dtypes: tuple[np.dtype | None, ...]) -> T:
    """Returns `tree` with its 16- and 32-bit floating arrays in the dtypes that `dtypes_of` recorded.

    A tree with another number of leaves than then is returned unchanged.
    """
    if len(jax.tree.leaves(tree)) != len(leaf_dtypes):
        return tree
    wanted = iter(leaf_dtypes)

    def restore(x: Leaf) -> Leaf:
        dtype = next(wanted)
        return cast_leaf(x, dtype) if dtype is not None and dtype in dtypes.CASTABLE and castable(x) else x

    return map_changed(restore, tree)


def map_changed(f: Callable[[Leaf], Leaf], tree: T, is_leaf: Callable[[Leaf], bool] | None = None) -> T:
    """`jax.tree.map`, but the very same tree where `f` changes no leaf, and dicts keep the order of their keys.

    Code between modules may iterate over a dict, and a cast must not change what it sees.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
    new = [f(x) for x in leaves]
    if all(a is b for a, b in zip(leaves, new, strict=True)):
        return tree
    return _in_order_of(tree, jax.tree.unflatten(treedef, new))


def _in_order_of(old: Leaf, new: Leaf) -> Leaf:
    """`new` with the keys of its dicts in the order of those of `old`: JAX sorts them."""
    if new is old:
        return old
    if type(old) in (dict, FrozenDict):
        return type(old)({key: _in_order_of(value, new[key]) for key, value in old.items()})
    if type(old) in (list, tuple):
        return type(old)(_in_order_of(a, b) for a, b in zip(old, new, strict=True))
    if isinstance(old, tuple) and hasattr(old, "_make"):
        return old._make(_in_order_of(a, b) for a, b in zip(old, new, strict=True))
    return new
