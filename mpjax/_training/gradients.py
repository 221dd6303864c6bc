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
from jax import lax
from jax.sharding import AxisType

from mpjax._frameworks.autocast import under
from mpjax._precision import casting, dtypes, rules
from mpjax._precision.policy_map import PolicyMap, as_policy_map, leaf_dtypes
from mpjax._training import cross_device
from mpjax._training.loss_scale import as_loss_scale

T = TypeVar("T")
AxisName = cross_device.AxisName
REDUCE_DTYPES = ("float32", "compute")


def value_and_grad(
    loss_fn: Callable[..., Any],
    policies: "str | dict | jmp.Policy | PolicyMap | None",
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: AxisName | None = None,
    reduce_dtype: str = "float32",
) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """Like `jax.value_and_grad`, under policies and a loss scale.

    Args:
      loss_fn: returns a float32 scalar, or that and auxiliary results. It needs to know nothing of precision.
      policies: what governs it and the modules it calls, in forward and backward; None leaves their
        precision alone.
      argnums: which arguments to differentiate with respect to. Their leaves must be floating.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      axis_name: a mapped axis (or several), as of `jax.pmap` or `jax.shard_map`, over whose replicas loss and
        gradients are averaged. Leave it out under `jax.jit` with sharded arrays.
      reduce_dtype: `"float32"`, or `"compute"` to add gradients up between devices in the compute dtype of their
        policy: half the bytes, fewer digits.

    Returns:
      A function of `(loss_scale, *args)` that returns `(value, grads, finite)`, or
      `((value, aux), grads, finite)`. `value` is the loss, not scaled. `grads` are float32 and unscaled.
      `finite`, shape [] and dtype bool, tells whether every gradient is; it is the same on every
      device of the mesh.

    Raises:
      ValueError: if `reduce_dtype` is another; when called, if the loss is not a float32 scalar, there is no
        auxiliary result where `has_aux` says so, or `axis_name` is not an axis of replicas.
      TypeError: when called, if a leaf to differentiate is not floating.

    >>> grad_fn = value_and_grad(lambda w, x: jnp.sum((x @ w) ** 2), "p=f32,c=f16,o=f32")
    >>> value, grads, finite = grad_fn(mpjax.DynamicLossScale(2.0**10), jnp.ones((2, 1)), jnp.ones((3, 2)))
    >>> grads.dtype, bool(finite)
    (dtype('float32'), True)
    """
    grad_fn = value_and_unscaled_grad(loss_fn, policies, argnums, has_aux, axis_name, reduce_dtype)

    @functools.wraps(loss_fn)
    def value_and_grad_fn(loss_scale: Any, *args: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = grad_fn(loss_scale, *args)
        loss, aux = value if has_aux else (value, None)
        params = args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)
        grads = average(grads, params, loss, policies, loss_scale, axis_name, reduce_dtype)
        loss = cross_device.combine_metrics(loss, axis_name)
        return (loss, aux) if has_aux else loss, grads, all_finite(grads, averaged_over=axis_name)

    return value_and_grad_fn


def value_and_unscaled_grad(
    loss_fn: Callable[..., Any],
    policies: "str | dict | jmp.Policy | PolicyMap | None",
    argnums: int | Sequence[int] = 0,
    has_aux: bool = True,
    axis_name: AxisName | None = None,
    reduce_dtype: str = "float32",
) -> Callable[..., tuple[Any, Any]]:
    """`value_and_grad` up to the point where replicas and microbatches come together.

    With `axis_name` the gradients are each replica's own, still to be averaged over it.

    Returns:
      A function of `(loss_scale, *args)` that returns `(value, grads)`, grads float32 and unscaled.
    """
    _check_reduce_dtype(reduce_dtype)

    def scaled_value_and_grad(loss_scale: Any, *args: Any) -> tuple[Any, Any]:
        def scaled_loss(*args: Any) -> tuple[Any, Any]:
            loss, aux = split_loss(loss_fn(*args), has_aux)
            return loss_scale.scale(loss), (loss, aux)

        with rules.gradients_in_compute_dtype(reduce_dtype == "compute"):
            grads, (loss, aux) = jax.grad(scaled_loss, argnums=argnums, has_aux=True)(*args)
        return (loss, aux) if has_aux else loss, grads

    functools.update_wrapper(scaled_value_and_grad, loss_fn, updated=())
    # One wrapper for all calls, as it remembers which patterns have met their modules. The policy stays in
    # force while the backward pass is traced, so that its sums and scatters follow the same rules.
    run = scaled_value_and_grad if policies is None else under(scaled_value_and_grad, policies)

    def grad_fn(loss_scale: Any, *args: Any) -> tuple[Any, Any]:
        loss_scale = as_loss_scale(loss_scale)
        cross_device.check_bound(axis_name, args)
        for i in (argnums,) if isinstance(argnums, int) else argnums:
            if not -len(args) <= i < len(args):
                raise ValueError(
                    f"argnums={argnums} asks for argument {i}, but the function got {len(args)} arguments "
                    "besides the loss scale."
                )
            check_floating(args[i], f"argument {i} of the loss function")
            own = cross_device.vary(args[i], axis_name)
            args = (*args[:i], own, *args[i % len(args) + 1 :])
        value, grads = run(loss_scale, *args)
        cross_device.check_averaged(value[0] if has_aux else value, grads, axis_name)
        return value, unscale(loss_scale, grads)

    return grad_fn


def average(
    grads: Any,
    params: Any,
    loss: jax.Array,
    policies: "str | dict | jmp.Policy | PolicyMap | None",
    loss_scale: Any,
    axis_name: AxisName | None,
    reduce_dtype: str,
) -> Any:
    """`parallel.average_gradients`, in float32 or in the compute dtype of the policy that governs each leaf."""
    travel_in = None
    if reduce_dtype == "compute" and policies is not None:
        compute = leaf_dtypes(params, as_policy_map(policies), "compute_dtype")
        travel_in = tuple(dtype if dtype in dtypes.HALF else None for _, _, dtype in compute)
    return cross_device.average_gradients(
        grads, params, loss, axis_name, loss_scale=as_loss_scale(loss_scale), travel_in=travel_in
    )


def all_finite(tree: Any, *, averaged_over: AxisName | None = None) -> jax.Array:
    """Whether every floating or complex leaf is free of inf and NaN; shape [] and dtype bool.

    Leaves that cannot be otherwise (integers, bools, keys, float0, None) count as finite. Inside `jax.shard_map` and
    `jax.pmap` it is one verdict for all devices, also where each holds another shard of `tree`.

    Args:
      tree: any pytree.
      averaged_over: axes over which `tree` is known to be the same, so that nobody needs to be asked.
    """
    # Zero times inf or NaN is NaN, and a sum of zeros is exact. On CPUs, XLA fuses a product into a sum, while of
    # `is_finite` it makes an array of bools. And lax rather than jnp, here and in `global_norm`, as each jnp
    # function is a jit of its own to trace, for every leaf.
    total: Any = np.zeros((), np.float32)
    for leaf in jax.tree.leaves(tree):
        for part in _real_parts(to_float32(leaf)) if _may_be_infinite(leaf) else []:
            zero = lax.reduce_sum(lax.mul(part, np.zeros((), part.dtype)), range(part.ndim))
            total = lax.add(total, zero.astype(jnp.float32))
    verdict = lax.eq(total, np.zeros((), np.float32))
    return cross_device.agree(verdict, averaged_over)


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
        lambda path, g: g if cross_device.is_overwritten(path) else loss_scale.unscale(to_float32(g)), grads
    )


def to_float32(tree: T) -> T:
    """Widens the floating leaves of fewer than 32 bits; float64 stays."""
    return jax.tree.map(cross_device.widened, tree)


def global_norm(grads: Any) -> jax.Array:
    """The Euclidean norm of all gradients together, shape [] and dtype float32."""
    groups: dict[frozenset[Any], list[Any]] = {}
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        if not cross_device.is_overwritten(path):
            groups.setdefault(cross_device.varying(grad), []).append(to_float32(grad))
    # Shards add up, while what is replicated counts once.
    squares = [cross_device.sum_over_shards(_sum_of_squares(group)) for group in groups.values()]
    return lax.sqrt(functools.reduce(lax.add, squares)) if squares else jnp.zeros([], jnp.float32)


def accumulate(
    grad_fn: Callable[[Any, Any, Any], tuple[Any, Any]],
    steps: int,
    carry: Any,
    batch: Any,
    rng: Any,
) -> tuple[Any, Any, Any]:
    """Runs `grad_fn` over equal microbatches and averages what it returns.

    Args:
      grad_fn: `(carry, microbatch, rng) -> ((carry, results), grads)`, with float32 gradients.
      steps: into how many microbatches to cut the batch.
      carry: what a microbatch hands to the next, such as batch statistics.
      batch: a pytree of arrays whose first axis is the batch.
      rng: a key, of which each microbatch gets its own, or None.

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
    first = jax.tree.map(lambda x: x[0], (microbatches, rngs))
    carry, shapes = _as_it_comes_out(grad_fn, carry, first)
    zeros = jax.tree.map(_zeros, shapes)

    def body(state: tuple[Any, Any], inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, total = state
        (carry, results), grads = grad_fn(carry, *inputs)
        return (carry, jax.tree_util.tree_map_with_path(_add, total, grads)), results

    (carry, total), results = lax.scan(body, (carry, zeros), (microbatches, rngs))
    grads = jax.tree_util.tree_map_with_path(
        lambda p, g: g if cross_device.is_overwritten(p) else g / steps, total
    )
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


def _sum_of_squares(leaves: list[Any]) -> jax.Array:
    parts = [part for x in leaves for part in _real_parts(x)]
    return functools.reduce(lax.add, [lax.reduce_sum(lax.square(p), range(p.ndim)) for p in parts])


def _real_parts(x: Any) -> list[jax.Array]:
    """A floating leaf itself, or the two parts of a complex one."""
    x = jnp.asarray(x)
    return [lax.real(x), lax.imag(x)] if jnp.iscomplexobj(x) else [x]


def _may_be_infinite(x: Any) -> bool:
    return isinstance(x, (float, complex)) or casting.is_inexact_array(x) or isinstance(x, np.inexact)


def _check_reduce_dtype(reduce_dtype: Any) -> None:
    if reduce_dtype not in REDUCE_DTYPES:
        raise ValueError(
            f"reduce_dtype must be 'float32' or 'compute' (the compute dtype of the policy), got {reduce_dtype!r}"
            f"{dtypes.did_you_mean(str(reduce_dtype), list(REDUCE_DTYPES))}"
        )


def describe(x: Any) -> str:
    """What an error message says of a wrong result."""
    if isinstance(x, (tuple, list)):
        return f"a {type(x).__name__} of {len(x)}"
    if isinstance(x, (np.ndarray, jax.Array)):
        return f"an array of dtype {x.dtype} and shape {list(x.shape)}"
    return f"{type(x).__name__} {x!r}" if isinstance(x, (int, float, str)) else type(x).__name__


def _add(path: tuple[Any, ...], total: Any, grad: Any) -> Any:
    return jnp.maximum(total, grad) if cross_device.is_overwritten(path) else total + grad


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
    cut = (shape[0] // steps, steps, *shape[1:])
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        first, *rest = sharding.spec
        sharding = sharding.update(spec=sharding.spec.update(partitions=(first, None, *rest)))
        return jnp.swapaxes(jnp.reshape(x, cut, out_sharding=sharding), 0, 1)
    return jnp.swapaxes(jnp.reshape(x, cut), 0, 1)


def _as_it_comes_out(grad_fn: Callable[..., Any], carry: Any, first: Any) -> tuple[Any, Any]:
    """The carry, varying over the mesh axes over which it comes out varying, and what gradients look like."""
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


def _summarise(x: jax.Array) -> jax.Array:
    """The results of all microbatches, stacked, as one."""
    if x.dtype == jnp.bool_:
        return jnp.all(x, axis=0)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.sum(x, axis=0, dtype=x.dtype)
    return jnp.mean(to_float32(x), axis=0) if jnp.issubdtype(x.dtype, np.inexact) else x[-1]
