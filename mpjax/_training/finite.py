"""Whether gradients are finite, their norm, and the choice between two trees: all in float32."""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._precision import casting, dtypes
from mpjax._training import cross_device
from mpjax._training.types import AxisName, Finite, Grads, Leaf, PyTree

T = TypeVar("T")


def to_float32(tree: T) -> T:
    """Widens the floating leaves of fewer than 32 bits; float64 stays."""
    return jax.tree.map(_widened, tree)


def all_finite(tree: PyTree, *, averaged_over: AxisName | None = None) -> Finite:
    """Whether every floating or complex leaf is free of inf and NaN.

        finite = mpjax.all_finite(grads)

    Leaves that cannot be infinite (integers, bools, keys, float0, None) count as finite. Inside `jax.shard_map` and
    `jax.pmap` the answer is the same on all devices, also where each holds another shard of `tree`.

    Args:
      tree: any pytree.
      averaged_over: axes over which `tree` is known to be the same; the devices along them need not communicate.

    Returns:
      Shape [] and dtype bool.
    """
    # Zero times inf or NaN is NaN, and a sum of zeros is exact. On CPUs, XLA fuses a multiplication into a sum, while
    # of `is_finite` it makes an array of bools. And lax rather than jnp, here and in `global_norm`, as each jnp
    # function is a jit of its own to trace, for every leaf.
    total: jax.Array | np.ndarray = np.zeros((), np.float32)
    for leaf in jax.tree.leaves(tree):
        for part in _real_parts(to_float32(leaf)) if _may_be_infinite(leaf) else []:
            zero = lax.reduce_sum(lax.mul(part, np.zeros((), part.dtype)), range(part.ndim))
            total = lax.add(total, zero.astype(jnp.float32))
    return cross_device.agree(lax.eq(total, np.zeros((), np.float32)), averaged_over)


def select_tree(pred: Finite, a: T, b: T) -> T:
    """The tree `a` if `pred`, of shape [] and dtype bool, else `b`.

    params = mpjax.select_tree(finite, new_params, params)
    """
    if jnp.ndim(pred) != 0 or jnp.result_type(pred) != jnp.bool_:
        raise AssertionError(
            f"expected boolean scalar, got pred of shape {jnp.shape(pred)} and dtype {jnp.result_type(pred)}; "
            "reduce it with mpjax.all_finite or jnp.all."
        )
    return jax.tree.map(functools.partial(lax.select, pred), a, b)


def global_norm(grads: Grads) -> jax.Array:
    """The Euclidean norm of all gradients together, shape [] and dtype float32."""
    groups: dict[frozenset[AxisName], list[Leaf]] = {}
    for grad in jax.tree.leaves(grads):
        groups.setdefault(cross_device.varying(grad), []).append(to_float32(grad))
    # Shards add up, while what is replicated counts once.
    squares = [cross_device.sum_over_shards(_sum_of_squares(group)) for group in groups.values()]
    return lax.sqrt(functools.reduce(lax.add, squares)) if squares else jnp.zeros([], jnp.float32)


def _widened(x: Leaf) -> Leaf:
    narrow = casting.is_floating_array(x) and x.dtype.itemsize < dtypes.FLOAT32.itemsize
    return x.astype(dtypes.FLOAT32) if narrow else x


def _sum_of_squares(leaves: list[Leaf]) -> jax.Array:
    parts = [part for x in leaves for part in _real_parts(x)]
    return functools.reduce(lax.add, [lax.reduce_sum(lax.square(p), range(p.ndim)) for p in parts])


def _real_parts(x: Leaf) -> list[jax.Array]:
    """A floating leaf itself, or the two parts of a complex one."""
    x = jnp.asarray(x)
    return [lax.real(x), lax.imag(x)] if jnp.iscomplexobj(x) else [x]


def _may_be_infinite(x: Leaf) -> bool:
    return isinstance(x, (float, complex)) or casting.is_inexact_array(x) or isinstance(x, np.inexact)
