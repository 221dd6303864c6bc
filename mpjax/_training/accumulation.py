"""Gradient accumulation: a batch in microbatches, whose gradients are averaged in float32."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from mpjax._training import cross_device
from mpjax._training.finite import to_float32
from mpjax._training.overwritten import Split
from mpjax._training.types import Batch, KeyPath, Leaf, PRNGKey, PyTree

C = TypeVar("C")  # what a microbatch passes to the next
R = TypeVar("R")  # the results of a microbatch


def accumulate(
    grad_fn: Callable[[C, Batch, PRNGKey | None], tuple[tuple[C, R], Split]],
    steps: int,
    carry: C,
    batch: Batch,
    rng: PRNGKey | None,
) -> tuple[C, R, Split]:
    """Runs `grad_fn` over equal microbatches and averages what it returns.

    Args:
      grad_fn: `(carry, microbatch, rng) -> ((carry, results), grads)`, with float32 gradients.
      steps: into how many microbatches to cut the batch.
      carry: what a microbatch passes to the next, such as batch statistics.
      batch: a pytree of arrays whose first axis is the batch.
      rng: a key, of which each microbatch gets its own, or None.

    Returns:
      `(carry, results, grads)`: of `results`, floating leaves are averaged, integers (counts) added up and
      bools combined with `and`; gradients are averaged in float32, and of the next state of fp8 layers the largest
      values hold.

    Raises:
      ValueError: if a leaf of the batch is not divisible by `steps`.
    """
    inputs = microbatches(batch, rng, steps)
    carry, shapes = _with_final_type(grad_fn, carry, jax.tree.map(lambda x: x[0], inputs))
    zeros = jax.tree.map(_zeros, shapes)

    def body(state: tuple[C, Split], inputs: tuple[Batch, PRNGKey | None]) -> tuple[tuple[C, Split], R]:
        carry, total = state
        (carry, results), grads = grad_fn(carry, *inputs)
        return (carry, _add(total, grads)), results

    (carry, total), results = lax.scan(body, (carry, zeros), inputs)
    grads = Split(jax.tree.map(lambda g: g / steps, total.trained), total.overwritten)
    return carry, jax.tree.map(_summarize, results), grads


def microbatches(batch: Batch, rng: PRNGKey | None, steps: int) -> tuple[Batch, PRNGKey | None]:
    """The batch and the key of each microbatch, stacked: leaves of shape [steps, batch / steps, …].

    Raises:
      ValueError: if a leaf of the batch is not divisible by `steps`.
    """
    cut = jax.tree_util.tree_map_with_path(lambda path, x: _cut(path, x, steps), batch)
    return cut, None if rng is None else jax.random.split(rng, steps)


def each_microbatch(batch: Batch, rng: PRNGKey | None, steps: int) -> Iterator[tuple[Batch, PRNGKey | None]]:
    """Batch and key of one microbatch after the other, as `make_train_step` takes them, for a look at each."""
    if steps == 1:
        yield batch, rng
        return
    inputs = microbatches(batch, rng, steps)
    for i in range(steps):
        yield jax.tree.map(lambda x: x[i], inputs)


def _cut(path: KeyPath, x: Leaf, steps: int) -> jax.Array:
    """[batch, …] as [steps, batch / steps, …].

    A microbatch takes every steps-th example, so that each device finds its share of it among the
    examples that it holds.
    """
    where = jax.tree_util.keystr(path, simple=True, separator="/")
    shape = jnp.shape(x)
    if not shape or shape[0] % steps:
        raise ValueError(
            f"The batch cannot be cut into accumulate_steps={steps} equal parts: leaf '{where}' has shape "
            f"{list(shape)}. Its first axis must be a multiple of {steps}."
        )
    cut = (shape[0] // steps, steps, *shape[1:])
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        first, *rest = sharding.spec
        sharding = sharding.update(spec=sharding.spec.update(partitions=(first, None, *rest)))
        return jnp.swapaxes(jnp.reshape(x, cut, out_sharding=sharding), 0, 1)
    return jnp.swapaxes(jnp.reshape(x, cut), 0, 1)


def _add(total: Split, grads: Split) -> Split:
    return Split(
        jax.tree.map(lax.add, total.trained, grads.trained),
        jax.tree.map(jnp.maximum, total.overwritten, grads.overwritten),
    )


def _with_final_type(
    grad_fn: Callable[..., tuple[tuple[C, R], Split]], carry: C, first: tuple[Batch, PRNGKey | None]
) -> tuple[C, PyTree]:
    """The carry, varying over the mesh axes over which it comes out varying, and the shapes of the gradients."""
    while True:
        (out, _), grads = jax.eval_shape(grad_fn, carry, *first)
        varying = [cross_device.varying(x) for x in jax.tree.leaves(out)]
        leaves, treedef = jax.tree.flatten(carry)
        if len(varying) != len(leaves):
            return carry, grads  # which the scan refuses in its own words
        varied = [cross_device.vary(x, tuple(axes)) for x, axes in zip(leaves, varying, strict=True)]
        if all(a is b for a, b in zip(varied, leaves, strict=True)):
            return carry, grads
        carry = jax.tree.unflatten(treedef, varied)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of the type of a gradient, its sharding over the axes of an explicit mesh included."""
    explicit = like.sharding is not None and AxisType.Explicit in like.sharding.mesh.axis_types
    zeros = jnp.zeros(like.shape, like.dtype, out_sharding=like.sharding if explicit else None)
    return cross_device.vary(zeros, tuple(cross_device.varying(like)))


def _summarize(x: jax.Array) -> jax.Array:
    """The results of all microbatches, stacked, as one."""
    if x.dtype == jnp.bool_:
        return jnp.all(x, axis=0)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.sum(x, axis=0, dtype=x.dtype)
    return jnp.mean(to_float32(x), axis=0) if jnp.issubdtype(x.dtype, np.inexact) else x[-1]
