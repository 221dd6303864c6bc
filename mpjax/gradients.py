"""Gradients under a policy and a loss scale.

The order is always the same: scale the float32 loss, differentiate, cast to float32, unscale, average over
microbatches and replicas in float32, and reach one verdict on whether everything is finite.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import lax

from mpjax import casting, dtypes
from mpjax.autocast import under
from mpjax.loss_scale import as_loss_scale
from mpjax.policy_map import PolicyMap

T = TypeVar("T")
AxisName = Any


def value_and_grad(
    loss_fn: Callable[..., Any],
    policies: "str | dict | jmp.Policy | PolicyMap | None",
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: AxisName | None = None,
) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """Like `jax.value_and_grad`, under policies and a loss scale.

    Args:
      loss_fn: returns a float32 scalar, or that and auxiliary results. It needs to know nothing of precision.
      policies: what governs it and the modules it calls, in forward and backward; None leaves their
        precision alone.
      argnums: which arguments to differentiate with respect to. Their leaves must be floating.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      axis_name: a mapped axis (or several) over whose replicas loss and gradients are averaged, in float32.

    Returns:
      A function of `(loss_scale, *args)` that returns `(value, grads, finite)`, or
      `((value, aux), grads, finite)`. `value` is the loss, not scaled. `grads` are float32 and unscaled.
      `finite`, shape [] and dtype bool, tells whether every gradient is; it is the same on every
      replica of `axis_name`.

    Raises:
      ValueError: when called, if the loss is not a float32 scalar or there is no auxiliary result where
        `has_aux` says so.
      TypeError: when called, if a leaf to differentiate is not floating.

    >>> grad_fn = value_and_grad(lambda w, x: jnp.sum((x @ w) ** 2), "p=f32,c=f16,o=f32")
    >>> value, grads, finite = grad_fn(mpjax.DynamicLossScale(2.0**10), jnp.ones((2, 1)), jnp.ones((3, 2)))
    >>> grads.dtype, bool(finite)
    (dtype('float32'), True)
    """
    grad_fn = value_and_unscaled_grad(loss_fn, policies, argnums, has_aux, axis_name)

    @functools.wraps(loss_fn)
    def value_and_grad_fn(loss_scale: Any, *args: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = grad_fn(loss_scale, *args)
        if axis_name is not None:
            loss, aux = value if has_aux else (value, None)
            loss, grads = average_over_axis((loss, grads), axis_name)
            value = (loss, aux) if has_aux else loss
        return value, grads, all_finite(grads)

    return value_and_grad_fn


def value_and_unscaled_grad(
    loss_fn: Callable[..., Any],
    policies: "str | dict | jmp.Policy | PolicyMap | None",
    argnums: int | Sequence[int] = 0,
    has_aux: bool = True,
    axis_name: AxisName | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """`value_and_grad` up to the point where replicas and microbatches come together.

    With `axis_name` the gradients are each replica's own, still to be averaged over it.

    Returns:
      A function of `(loss_scale, *args)` that returns `(value, grads)`, grads float32 and unscaled.
    """

    def scaled_value_and_grad(loss_scale: Any, *args: Any) -> tuple[Any, Any]:
        def scaled_loss(*args: Any) -> tuple[Any, Any]:
            loss, aux = split_loss(loss_fn(*args), has_aux)
            return loss_scale.scale(loss), (loss, aux)

        grads, (loss, aux) = jax.grad(scaled_loss, argnums=argnums, has_aux=True)(*args)
        return (loss, aux) if has_aux else loss, grads

    functools.update_wrapper(scaled_value_and_grad, loss_fn, updated=())
    # One wrapper for all calls, as it remembers which patterns have met their modules. The policy stays in
    # force while the backward pass is traced, so that its sums and scatters follow the same rules.
    run = scaled_value_and_grad if policies is None else under(scaled_value_and_grad, policies)

    def grad_fn(loss_scale: Any, *args: Any) -> tuple[Any, Any]:
        loss_scale = as_loss_scale(loss_scale)
        for i in (argnums,) if isinstance(argnums, int) else argnums:
            if not -len(args) <= i < len(args):
                raise ValueError(
                    f"argnums={argnums} asks for argument {i}, but the function got {len(args)} arguments "
                    "besides the loss scale."
                )
            check_floating(args[i], f"argument {i} of the loss function")
            if axis_name is not None:
                args = (*args[:i], _varying_over(args[i], axis_name), *args[i % len(args) + 1 :])
        value, grads = run(loss_scale, *args)
        return value, unscale(loss_scale, grads)

    return grad_fn


def all_finite(tree: Any) -> jax.Array:
    """Whether every floating or complex leaf is free of inf and NaN; shape [] and dtype bool.

    Leaves that cannot be otherwise (integers, bools, keys, float0, None) count as finite.
    """
    leaves = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree) if _may_be_infinite(x)]
    return jnp.stack(leaves).all() if leaves else jnp.array(True)


def select_tree(pred: jax.Array, a: T, b: T) -> T:
    """The tree `a` if `pred`, of shape [] and dtype bool, else `b`."""
    if jnp.ndim(pred) != 0 or jnp.result_type(pred) != jnp.bool_:
        raise AssertionError(
            f"expected boolean scalar, got pred of shape {jnp.shape(pred)} and dtype {jnp.result_type(pred)}; "
            "reduce it with mpjax.all_finite or jnp.all."
        )
    return jax.tree.map(functools.partial(lax.select, pred), a, b)


def unscale(loss_scale: Any, grads: T) -> T:
    """Gradients in float32, divided by the scale that the loss was multiplied with.

    What fp8 layers hand back in the place of gradients, the next state of their scales, is no gradient and
    not divided.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, g: g if _is_overwritten(path) else loss_scale.unscale(to_float32(g)), grads
    )


def to_float32(tree: T) -> T:
    """Widens the floating leaves of fewer than 32 bits; float64 stays."""
    return jax.tree.map(
        lambda x: x.astype(dtypes.FLOAT32) if casting.is_floating_array(x) and x.dtype.itemsize < 4 else x,
        tree,
    )


def average_over_axis(tree: T, axis_name: AxisName) -> T:
    """The mean of the floating leaves over the replicas of one or several mapped axes.

    The next scales that fp8 layers hand back are not averaged: the largest holds for all replicas.
    """

    def average(path: Any, x: Any) -> Any:
        for name in _names(axis_name):
            if _is_tracked(name) and name not in _varying(x):
                continue  # shard_map knows that it is the same everywhere
            if not casting.is_inexact_array(x):
                # A counter is the same everywhere; where JAX keeps track it has to be told so.
                x = lax.pmax(x, name) if _is_tracked(name) and _is_integer(x) else x
                continue
            x = lax.pmax(x, name) if _is_overwritten(path) else lax.pmean(x, name)
        return x

    return jax.tree_util.tree_map_with_path(average, tree)


def _varying_over(tree: T, axis_name: AxisName) -> T:
    """Parameters as each replica's own, under shard_map with its default checks.

    There the gradient of a replicated parameter would arrive summed over the replicas already, in the dtype
    of the parameter and not unscaled: four float16 gradients of 30000 would be infinite.
    """

    def vary(x: Any) -> Any:
        missing = tuple(n for n in _names(axis_name) if _is_tracked(n) and n not in _varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def _is_integer(x: Any) -> bool:
    return isinstance(x, (np.ndarray, jax.Array)) and jnp.issubdtype(x.dtype, jnp.integer)


def _names(axis_name: AxisName) -> tuple[Any, ...]:
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def _is_tracked(name: Any) -> bool:
    """Whether shard_map keeps track of what varies over this axis."""
    return name in _varying(lax.axis_index(name))


def _varying(x: Any) -> frozenset[Any]:
    """The mesh axes over which shard_map knows `x` to differ; none where it does not keep track."""
    return jax.typeof(x).manual_axis_type.varying


def combine_over_axis(tree: T, axis_name: AxisName) -> T:
    """The results of all replicas as one: floating leaves averaged, integers added up, bools combined."""

    def combine(x: Any) -> Any:
        if x.dtype == jnp.bool_:
            return lax.pmin(_varying_over(x, axis_name).astype(jnp.int32), axis_name).astype(bool)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return lax.psum(_varying_over(x, axis_name), axis_name)
        return average_over_axis(x, axis_name)

    return jax.tree.map(combine, tree)


def global_norm(grads: Any) -> jax.Array:
    """The Euclidean norm of all gradients together, shape [] and dtype float32."""
    flat, _ = jax.tree_util.tree_flatten_with_path(grads)
    return optax.tree.norm([to_float32(g) for path, g in flat if not _is_overwritten(path)])


def accumulate(
    grad_fn: Callable[[Any, Any, Any], tuple[Any, Any]],
    steps: int,
    carry: Any,
    batch: Any,
    rng: Any,
    axis_name: AxisName | None = None,
) -> tuple[Any, Any, Any]:
    """Runs `grad_fn` over equal microbatches and averages what it returns.

    Args:
      grad_fn: `(carry, microbatch, rng) -> ((carry, results), grads)`, with float32 gradients.
      steps: into how many microbatches to cut the batch.
      carry: what a microbatch hands to the next, such as batch statistics.
      batch: a pytree of arrays whose first axis is the batch.
      rng: a key, of which each microbatch gets its own, or None.
      axis_name: a mapped axis over whose replicas the results are still to be averaged.

    Returns:
      `(carry, results, grads)`: of `results`, floating leaves are averaged, integers (counts) added up and
      bools combined with `and`; gradients are averaged in float32.

    Raises:
      ValueError: if a leaf of the batch is not divisible by `steps`.
    """
    if steps == 1:
        (carry, results), grads = grad_fn(carry, batch, rng)
        return carry, results, grads
    microbatches = jax.tree_util.tree_map_with_path(lambda path, x: _microbatches(path, x, steps), batch)
    rngs = None if rng is None else jax.random.split(rng, steps)
    shapes = jax.eval_shape(grad_fn, carry, *jax.tree.map(lambda x: x[0], (microbatches, rngs)))[1]
    zeros = jax.tree.map(lambda g: jnp.zeros(g.shape, g.dtype), shapes)
    if axis_name is not None:  # the carry has to start as varying as it comes out
        carry, zeros = _varying_over((carry, zeros), axis_name)

    def body(state: tuple[Any, Any], inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, total = state
        (carry, results), grads = grad_fn(carry, *inputs)
        return (carry, jax.tree_util.tree_map_with_path(_add, total, grads)), results

    (carry, total), results = lax.scan(body, (carry, zeros), (microbatches, rngs))
    grads = jax.tree_util.tree_map_with_path(lambda p, g: g if _is_overwritten(p) else g / steps, total)
    return carry, jax.tree.map(_summarise, results), grads


def check_floating(tree: Any, what: str) -> None:
    """Raises if a leaf is not floating, so that it has no gradient and an optimizer would corrupt it.

    Raises:
      TypeError: naming the path and dtype of the first such leaf.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        dtype = getattr(leaf, "dtype", np.result_type(type(leaf)) if isinstance(leaf, (int, float)) else None)
        if dtype is None or not jnp.issubdtype(dtype, np.inexact):
            raise TypeError(
                f"Expected floating leaves, but {what} has {dtype or type(leaf).__name__} at "
                f"'{jax.tree_util.keystr(path, simple=True, separator='/')}'. It has no gradient: keep "
                "counters and keys in the model state, or in an argument that is not differentiated."
            )


def split_loss(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """The loss and the auxiliary results of a loss function, both checked."""
    if has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise ValueError(f"With has_aux=True loss_fn must return (loss, aux), got {describe(out)}.")
    loss, aux = out if has_aux else (out, None)
    dtype: Any = getattr(loss, "dtype", None)
    shape: Any = getattr(loss, "shape", None)
    if dtype is None:
        hint = "" if has_aux else " If it returns (loss, aux), say has_aux=True."
        raise ValueError(f"loss_fn must return the loss, a float32 scalar, got {describe(loss)}.{hint}")
    if shape != () or not dtypes.is_floating(dtype) or dtype.itemsize < 4:
        raise ValueError(
            f"The loss must be a float32 scalar, got dtype {dtype} and shape {list(shape)}. Reduce it with "
            "jnp.mean, and compute it in float32: decorate the loss with mpjax.full_precision, or give the "
            "model's output float32 with 'o=f32' in its policy."
        )
    return loss, aux


def _may_be_infinite(x: Any) -> bool:
    return isinstance(x, (float, complex)) or casting.is_inexact_array(x) or isinstance(x, np.inexact)


def describe(x: Any) -> str:
    """What an error message says of a wrong result."""
    if isinstance(x, (tuple, list)):
        return f"a {type(x).__name__} of {len(x)}"
    if isinstance(x, (np.ndarray, jax.Array)):
        return f"an array of dtype {x.dtype} and shape {list(x.shape)}"
    return f"{type(x).__name__} {x!r}" if isinstance(x, (int, float, str)) else type(x).__name__


def _is_overwritten(path: tuple[Any, ...]) -> bool:
    return any(getattr(key, "key", None) == OVERWRITE_WITH_GRADIENT for key in path)


def _add(path: tuple[Any, ...], total: Any, grad: Any) -> Any:
    return jnp.maximum(total, grad) if _is_overwritten(path) else total + grad


def _microbatches(path: tuple[Any, ...], x: Any, steps: int) -> Any:
    """[batch, ...] as [steps, batch / steps, ...].

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
    return jnp.swapaxes(jnp.reshape(x, (shape[0] // steps, steps, *shape[1:])), 0, 1)


def _summarise(x: jax.Array) -> jax.Array:
    """The results of all microbatches, stacked, as one."""
    if x.dtype == jnp.bool_:
        return jnp.all(x, axis=0)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.sum(x, axis=0, dtype=x.dtype)
    return jnp.mean(to_float32(x), axis=0) if jnp.issubdtype(x.dtype, np.inexact) else x[-1]
