"""Casting the floating leaves of a pytree.

The leaf rule is jmp's: only numpy and JAX arrays of a floating dtype are cast, numpy stays numpy. Integers,
bools, PRNG keys, Python numbers, None and float0 pass, and an unchanged leaf is the same object.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from flax.core import FrozenDict
from jax.typing import DTypeLike

from mpjax._precision import dtypes

T = TypeVar("T")


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Casts the floating leaves of `tree` to `dtype`.

    Args:
      tree: any pytree.
      dtype: a floating dtype.

    Returns:
      A tree of the same structure.
    """
    dtype = np.dtype(dtype)
    return map_changed(lambda x: cast_leaf(x, dtype) if is_floating_array(x) else x, tree)


def cast_to_full(tree: T) -> T:
    """Casts the floating leaves of `tree` to float32."""
    return cast_floating(tree, np.float32)


def cast_to_half(tree: T) -> T:
    """Casts the floating leaves of `tree` to the backend's 16-bit format, `half_dtype()`."""
    return cast_floating(tree, dtypes.half_dtype())


def is_floating_array(x: Any) -> bool:
    """Whether `x` is a numpy or JAX array of a real floating dtype."""
    return isinstance(x, (np.ndarray, jax.Array)) and dtypes.is_floating(x.dtype)


def cast_leaf(x: Any, dtype: Any) -> Any:
    """`x` in `dtype`, or `x` itself where it is that already: numpy's `astype` would copy it."""
    return x if x.dtype == dtype else x.astype(dtype)


def is_inexact_array(x: Any) -> bool:
    """Whether `x` is a numpy or JAX array of a floating or complex dtype."""
    return isinstance(x, (np.ndarray, jax.Array)) and jax.numpy.issubdtype(x.dtype, np.inexact)


def castable(x: Any) -> bool:
    """Whether `x` is an array of a format that policies move values between."""
    return isinstance(x, (np.ndarray, jax.Array)) and x.dtype in dtypes.CASTABLE


def dtypes_of(tree: Any) -> tuple[np.dtype | None, ...]:
    """The dtypes of the leaves, None for what is no array."""
    return tuple(getattr(x, "dtype", None) for x in jax.tree.leaves(tree))


def cast_to_dtypes(tree: T, leaf_dtypes: tuple[np.dtype | None, ...]) -> T:
    """Gives the floating leaves back the dtypes that `dtypes_of` recorded before they were computed anew.

    A tree that has another number of leaves by now is returned as it is.
    """
    if len(jax.tree.leaves(tree)) != len(leaf_dtypes):
        return tree
    wanted = iter(leaf_dtypes)

    def restore(x: Any) -> Any:
        dtype = next(wanted)
        return x if dtype not in dtypes.CASTABLE or not castable(x) else cast_leaf(x, dtype)

    return map_changed(restore, tree)


def map_changed(f: Callable[[Any], Any], tree: T, is_leaf: Callable[[Any], bool] | None = None) -> T:
    """`jax.tree.map`, but the very same tree where `f` changes no leaf, and dicts keep the order of their keys.

    Code between modules may iterate over a dict, and a cast must not change what it sees.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
    new = [f(x) for x in leaves]
    if all(a is b for a, b in zip(leaves, new, strict=True)):
        return tree
    return _in_order_of(tree, jax.tree.unflatten(treedef, new))


def _in_order_of(old: Any, new: Any) -> Any:
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
