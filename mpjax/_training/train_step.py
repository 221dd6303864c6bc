"""One training step: joins the parts, holds no mechanism of its own."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._precision import casting
from mpjax._training.gradients import (
    Outcome,
    PipelineLoss,
    check_floating,
    check_loss,
    describe,
    gradient_fn,
    loss_at,
)
from mpjax._training.loss_scale import as_loss_scale
from mpjax._training.optimizer import is_finite_for
from mpjax._training.reduction import Reduction
from mpjax._training.train_state import TrainState, check_params, shaped_like
from mpjax._training.types import AxisName, Batch, LossFn, Metrics, ModelState, Params, PRNGKey

OUR_METRICS = ("loss", "grad_norm", "loss_scale", "finite")


def make_train_step(
    loss_fn: LossFn,
    *,
    accumulate_steps: int = 1,
    axis_name: AxisName | None = None,
    reduce_dtype: str = "float32",
    has_model_state: bool = False,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Returns a function that takes one step under the policy and the loss scale of a `TrainState`.

        step = jax.jit(mpjax.make_train_step(loss_fn), donate_argnums=0)
        state, metrics = step(state, batch, rng)

    An optimizer that asks for more than gradients gets it: the unscaled loss of all microbatches and replicas as
    `value`, the gradients as `grad`, and as `value_fn` (or `obj_fn`) a function of the parameters that evaluates the
    loss on the same batch under the same policy. So `optax.contrib.reduce_on_plateau`, `optax.polyak_sgd`,
    `optax.lbfgs` and `optax.contrib.sophia` work as they are.

    Args:
      loss_fn: `(params, batch, rng) -> loss` or `(loss, metrics)`, or with `has_model_state`
        `(params, model_state, batch, rng) -> (loss, (model_state, metrics))`. The loss is a float32 scalar,
        `metrics` a dict. It needs to know nothing of precision.
      accumulate_steps: the batch is cut into that many microbatches, whose gradients are averaged in float32.
        The loss scale is the same for all of them, and the step is taken or skipped as a whole.
      axis_name: the mapped axis (or several), as of `jax.pmap` or `jax.shard_map`, over which the batch is split, to
        average over. Leave it out under `jax.jit` with sharded arrays.
      reduce_dtype: `"float32"`, or `"compute"` to add gradients up between devices in the compute dtype of their
        policy: half the bytes, fewer digits.
      has_model_state: whether the model has state of its own, such as batch statistics.

    Returns:
      `step(state, batch, rng=None) -> (state, metrics)`. Metrics are loss (unscaled), grad_norm, loss_scale
      (that this step used) and finite (whether the step was taken), then the user's: over microbatches and replicas
      floating ones are averaged, integers (counts) added up.

    Raises:
      ValueError: if an option is not one of those above; when called, if `axis_name` is not an axis of replicas, the
        batch is not divisible, `loss_fn` returns something else, or the parameters are not stored as the policy says.
    """
    if isinstance(accumulate_steps, bool) or not isinstance(accumulate_steps, int) or accumulate_steps < 1:
        raise ValueError(f"accumulate_steps must be a positive whole number, got {accumulate_steps!r}.")

    reduction = Reduction(axis_name, reduce_dtype)
    pipeline_loss = _pipeline_loss(loss_fn, has_model_state)

    def step(state: TrainState, batch: Batch, rng: PRNGKey | None = None) -> tuple[TrainState, Metrics]:
        check_floating(state.params, "params")
        if state.policy is not None:
            check_params(state.params, state.policy)
        run = gradient_fn(pipeline_loss, state.policy, reduction, accumulate_steps)

        def run_at(params: Params) -> Outcome:
            return run(as_loss_scale(state.loss_scale), params, state.model_state, batch, rng)

        out = run_at(state.params)
        finite = is_finite_for(state.tx, out.finite, out.loss, axis_name)
        ours = {
            "loss": out.loss,
            "grad_norm": out.grad_norm(),
            "loss_scale": jnp.asarray(state.loss_scale.loss_scale, jnp.float32),
            "finite": finite,
        }
        state = state.apply_gradients(
            grads=out.grads,
            finite=finite,
            value=out.loss,
            value_fn=loss_at(run_at, casting.dtypes_of(state.params)),
            loss_scale=state.loss_scale.adjust(finite),
            **({"model_state": out.model_state} if has_model_state else {}),
        )
        return state, ours | out.metrics

    return step


def _pipeline_loss(loss_fn: LossFn, has_model_state: bool) -> PipelineLoss:
    """`loss_fn` in the form of the gradient pipeline, with its results checked."""

    def pipeline_loss(params: Params, model_state: ModelState, batch: Batch, rng: PRNGKey | None) -> Any:
        if not has_model_state:
            loss, metrics = _checked(loss_fn(params, batch, rng))
            return loss, (model_state, metrics, None)
        loss, new, metrics = _checked_with_state(loss_fn(params, model_state, batch, rng))
        return loss, (shaped_like(new, model_state, "model_state"), metrics, None)

    functools.update_wrapper(pipeline_loss, loss_fn, updated=())
    return pipeline_loss


def _checked(out: Any) -> tuple[jax.Array, Metrics]:
    """What `loss_fn` returned as `(loss, metrics)`."""
    if not isinstance(out, (tuple, list)):
        return check_loss(out), {}
    if not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError(f"loss_fn must return loss or (loss, metrics), got {describe(out)}.")
    return check_loss(out[0]), _checked_metrics(out[1], " For model state say has_model_state=True.")


def _checked_with_state(out: Any) -> tuple[jax.Array, ModelState, Metrics]:
    """What `loss_fn` returned as `(loss, model_state, metrics)`."""
    if not (_is_pair(out) and _is_pair(out[1])):
        raise ValueError(
            f"With has_model_state=True loss_fn must return (loss, (model_state, metrics)), got {describe(out)}."
        )
    loss, (model_state, metrics) = out
    return check_loss(loss), model_state, _checked_metrics(metrics, "")


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2


def _checked_metrics(metrics: Any, hint: str) -> Metrics:
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"The metrics that loss_fn returns must be a dict of arrays, got {describe(metrics)}.{hint}"
        )
    if clash := sorted(set(metrics) & set(OUR_METRICS)):
        raise ValueError(
            f"loss_fn returns the metric '{clash[0]}', a name that the step itself reports; rename it. Taken are "
            f"{', '.join(OUR_METRICS)}."
        )
    return jax.tree.map(jnp.asarray, dict(metrics))
