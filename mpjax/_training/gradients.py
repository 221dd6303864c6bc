"""Gradients under a policy and a loss scale: the one pipeline that everything which trains goes through.

    loss → gradient → unscale → reduce → finite

`gradient_fn` is that pipeline. `value_and_grad`, `make_train_step` and `mpjax.nnx.value_and_grad` each bring their loss
function into one form and call it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._frameworks.autocast import under
from mpjax._precision import casting, dtypes, rules
from mpjax._precision.policy_map import PolicyMap, as_policy_map
from mpjax._training import cross_device, overwritten
from mpjax._training.accumulation import accumulate
from mpjax._training.finite import all_finite, global_norm, to_float32
from mpjax._training.loss_scale import LossScale, as_loss_scale
from mpjax._training.overwritten import Split
from mpjax._training.reduction import Reduction, average_gradients, average_state, combine_metrics
from mpjax._training.types import (
    AxisName,
    Finite,
    Grads,
    LossFn,
    Metrics,
    ModelState,
    Params,
    Policies,
    PyTree,
)

# `(params, model_state, *inputs) -> (loss, (model_state, metrics, aux))`, see `gradient_fn`.
PipelineLoss = Callable[..., tuple[jax.Array, tuple[ModelState, Metrics, PyTree]]]


class Outcome(NamedTuple):
    """What the pipeline makes of a batch.

    Attributes:
      loss: unscaled, of all microbatches and replicas, shape [] and dtype float32.
      metrics: of all microbatches and replicas.
      model_state: in the dtypes of the one before, the same on all replicas.
      aux: other results of the loss function, this replica's own.
      grads: float32 and unscaled, of all microbatches and replicas, in the structure of the parameters.
      finite: whether all of them are, the same on every device.
    """

    loss: jax.Array
    metrics: Metrics
    model_state: ModelState
    aux: PyTree
    grads: Grads
    finite: Finite

    def grad_norm(self) -> jax.Array:
        """The Euclidean norm of the gradients together, shape [] and dtype float32."""
        return global_norm(overwritten.split(self.grads).trained)


def value_and_grad(
    loss_fn: LossFn,
    policies: Policies | None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: AxisName | None = None,
    reduce_dtype: str = "float32",
) -> Callable[..., tuple[Any, Grads, Finite]]:
    """Like `jax.value_and_grad`, under policies and a loss scale.

        loss, grads, finite = mpjax.value_and_grad(loss_fn, "p=f32,c=f16,o=f32")(loss_scale, params, batch)

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

    def pipeline_loss(params: Params, model_state: None, *args: Any) -> Any:
        loss, aux = split_loss(loss_fn(*_with_params(args, argnums, params)), has_aux)
        return loss, (model_state, {}, aux)

    functools.update_wrapper(pipeline_loss, loss_fn, updated=())
    policy_map = None if policies is None else as_policy_map(policies)
    run = gradient_fn(pipeline_loss, policy_map, Reduction(axis_name, reduce_dtype))

    @functools.wraps(loss_fn)
    def value_and_grad_fn(loss_scale: LossScale, *args: Any) -> tuple[Any, Grads, Finite]:
        params = _params_of(args, argnums)
        out = run(as_loss_scale(loss_scale), params, None, *args)
        return ((out.loss, out.aux) if has_aux else out.loss), out.grads, out.finite

    return value_and_grad_fn


def gradient_fn(
    loss_fn: PipelineLoss, policies: PolicyMap | None, reduction: Reduction, accumulate_steps: int = 1
) -> Callable[..., Outcome]:
    """The pipeline from a loss function to gradients that an optimizer can take.

    Args:
      loss_fn: `(params, model_state, *inputs) -> (loss, (model_state, metrics, aux))`. Its loss has passed
        `split_loss` or `check_loss`.
      policies: what governs it and the modules it calls, in forward and backward, or None.
      reduction: over which replicas to average, and how.
      accumulate_steps: into how many microbatches to cut the inputs, which are then `(batch, rng)`.

    Returns:
      A function of `(loss_scale, params, model_state, *inputs)` that returns an `Outcome`.
    """
    local = _local_gradients(loss_fn, policies, reduction)

    def run(loss_scale: LossScale, params: Params, model_state: ModelState, *inputs: Any) -> Outcome:
        cross_device.check_bound(reduction.axis_name, (params, inputs))
        own = cross_device.vary(params, reduction.axis_name)

        def microbatch(model_state: ModelState, *inputs: Any) -> Any:
            (loss, (new, metrics, aux)), grads = local(loss_scale, own, model_state, *inputs)
            cross_device.check_averaged(loss, own, reduction.axis_name)
            new = casting.cast_to_dtypes(new, casting.dtypes_of(model_state))
            return (new, (loss, metrics, aux)), _unscale(loss_scale, grads)

        if accumulate_steps == 1:
            (new, (loss, metrics, aux)), grads = microbatch(model_state, *inputs)
        else:
            new, (loss, metrics, aux), grads = accumulate(microbatch, accumulate_steps, model_state, *inputs)
        averaged = overwritten.merge(average_gradients(grads, params, loss, reduction, policies, loss_scale))
        return Outcome(
            loss=combine_metrics(loss, reduction),
            metrics=combine_metrics(metrics, reduction),
            model_state=average_state(new, model_state, reduction),
            aux=aux,
            grads=averaged,
            finite=all_finite(averaged, averaged_over=reduction.axis_name),
        )

    return run


def loss_at(run: Callable[[Params], Outcome], dtypes_of_params: tuple[np.dtype | None, ...]) -> LossFn:
    """The loss as a function of the parameters alone, for optimizers that evaluate it themselves.

    Its derivative is what the pipeline computes: scaled while it is computed, averaged over microbatches and replicas.
    Nothing is traced until the function is called, and no gradients are where it is not differentiated.

    Args:
      run: the pipeline on one batch, as a function of the parameters.
      dtypes_of_params: what the parameters are stored in, to which an optimizer's float32 ones are rounded.

    Returns:
      A function of parameters that returns the unscaled loss, shape [] and dtype float32. It can be differentiated
      in forward and in reverse mode, any number of times.
    """

    def outcome(params: Params) -> Outcome:
        return run(casting.cast_to_dtypes(params, dtypes_of_params))

    # Not jax.custom_vjp, which optax's line searches, differentiating in forward mode, would refuse.
    @jax.custom_jvp
    def loss(params: Params) -> jax.Array:
        return outcome(params).loss

    @loss.defjvp
    def loss_jvp(primals: tuple[Params], tangents: tuple[Params]) -> tuple[jax.Array, jax.Array]:
        out = outcome(primals[0])
        grads, directions = (overwritten.split(tree).trained for tree in (out.grads, tangents[0]))
        slopes = jax.tree.map(_slope, grads, directions)
        return out.loss, functools.reduce(jnp.add, jax.tree.leaves(slopes)).astype(out.loss.dtype)

    return loss


def unscale(loss_scale: LossScale, grads: Grads) -> Grads:
    """The gradients of the loss, in float32, from those of the scaled loss; the state of fp8 layers is no gradient."""
    return overwritten.merge(_unscale(loss_scale, overwritten.split(grads)))


def check_floating(tree: PyTree, what: str) -> None:
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


def split_loss(out: Any, has_aux: bool) -> tuple[jax.Array, PyTree]:
    """The loss and the auxiliary results of a loss function, both checked."""
    if has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
        raise ValueError(f"With has_aux=True loss_fn must return (loss, aux), got {describe(out)}.")
    loss, aux = out if has_aux else (out, None)
    return check_loss(loss, "" if has_aux else " If it returns (loss, aux), say has_aux=True."), aux


def check_loss(loss: Any, hint: str = "") -> jax.Array:
    """The loss itself, if it is a float32 scalar.

    Raises:
      ValueError: describing what it is, and how to make a float32 scalar of it.
    """
    dtype = getattr(loss, "dtype", None)
    shape = getattr(loss, "shape", None)
    if dtype is None:
        raise ValueError(f"loss_fn must return the loss, a float32 scalar, got {describe(loss)}.{hint}")
    if shape != () or not dtypes.is_floating(dtype) or dtype.itemsize < 4:
        raise ValueError(
            f"The loss must be a float32 scalar, got dtype {dtype} and shape {list(shape or ())}. Reduce it with "
            "jnp.mean, and compute it in float32: decorate the loss with mpjax.full_precision, or give the "
            "model's output float32 with 'o=f32' in its policy."
        )
    return loss


def describe(x: Any) -> str:
    """What an error message says of a wrong result."""
    if isinstance(x, (tuple, list)):
        return f"a {type(x).__name__} of {len(x)}"
    if isinstance(x, (np.ndarray, jax.Array)):
        return f"an array of dtype {x.dtype} and shape {list(x.shape)}"
    return f"{type(x).__name__} {x!r}" if isinstance(x, (int, float, str)) else type(x).__name__


def _local_gradients(
    loss_fn: PipelineLoss, policies: PolicyMap | None, reduction: Reduction
) -> Callable[..., tuple[Any, Split]]:
    """`(loss_scale, params, model_state, *inputs) -> ((loss, results), grads)`, of this device and still scaled."""

    def scaled_gradients(
        loss_scale: LossScale, params: Params, model_state: ModelState, *inputs: Any
    ) -> tuple[Any, Split]:
        def scaled_loss(params: Params) -> tuple[jax.Array, Any]:
            loss, results = loss_fn(params, model_state, *inputs)
            return loss_scale.scale(loss), (loss, results)

        with rules.gradients_in_compute_dtype(reduction.in_compute_dtype):
            grads, results = jax.grad(scaled_loss, has_aux=True)(params)
        return results, overwritten.split(grads)

    functools.update_wrapper(scaled_gradients, loss_fn, updated=())
    # The policy stays in force while the backward pass is traced, so that its sums and scatters follow the same rules.
    return scaled_gradients if policies is None else under(scaled_gradients, policies)


def _unscale(loss_scale: LossScale, grads: Split) -> Split:
    return Split(loss_scale.unscale(to_float32(grads.trained)), grads.overwritten)


def _slope(grad: jax.Array, direction: jax.Array) -> jax.Array:
    """What a leaf contributes to the change of the loss in a direction."""
    return cross_device.sum_over_shards(jnp.sum(grad * to_float32(direction)))


def _params_of(args: tuple[Any, ...], argnums: int | Sequence[int]) -> Params:
    """The arguments to differentiate with respect to, checked."""
    for i in (argnums,) if isinstance(argnums, int) else argnums:
        if not -len(args) <= i < len(args):
            raise ValueError(
                f"argnums={argnums} asks for argument {i}, but the function got {len(args)} arguments "
                "besides the loss scale."
            )
        check_floating(args[i], f"argument {i} of the loss function")
    return args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)


def _with_params(args: tuple[Any, ...], argnums: int | Sequence[int], params: Params) -> list[Any]:
    """The arguments, with those to differentiate with respect to replaced."""
    replaced = list(args)
    pairs = [(argnums, params)] if isinstance(argnums, int) else zip(argnums, params, strict=True)
    for i, value in pairs:
        replaced[i] = value
    return replaced
