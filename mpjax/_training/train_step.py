"""One training step: joins the parts, holds no mechanism of its own."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._precision.policy_map import PolicyMap
from mpjax._training import cross_device, gradients
from mpjax._training.train_state import TrainState, check_params, shaped_like

OUR_METRICS = ("loss", "grad_norm", "loss_scale", "finite")
Metrics = dict[str, Any]


def make_train_step(
    loss_fn: Callable[..., Any],
    *,
    accumulate_steps: int = 1,
    axis_name: Any = None,
    reduce_dtype: str = "float32",
    has_model_state: bool = False,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Returns a function that takes one step under the policy and the loss scale of a `TrainState`.

    Jit it, and donate the state: `jax.jit(make_train_step(loss_fn), donate_argnums=0)`.

    Args:
      loss_fn: `(params, batch, rng) -> loss` or `(loss, metrics)`, or with `has_model_state`
        `(params, model_state, batch, rng) -> (loss, (model_state, metrics))`. The loss is a float32 scalar,
        `metrics` a dict. It needs to know nothing of precision.
      accumulate_steps: the batch is cut into that many microbatches, whose gradients are averaged in float32.
        The loss scale is the same for all of them, and one verdict holds.
      axis_name: the mapped axis (or several), as of `jax.pmap` or `jax.shard_map`, over which the batch is split, to
        average over. Leave it out under `jax.jit` with sharded arrays.
      reduce_dtype: `"float32"`, or `"compute"` to add gradients up between devices in the compute dtype of their
        policy: half the bytes, fewer digits.
      has_model_state: whether the model has state of its own, such as batch statistics.

    Returns:
      `step(state, batch, rng=None) -> (state, metrics)`. Metrics are loss (unscaled), grad_norm, loss_scale
      (that this step used) and finite, then the user's: over microbatches and replicas floating ones are
      averaged, integers (counts) added up.

    Raises:
      ValueError: if an option is not one of those above; when called, if `axis_name` is not an axis of replicas, the
        batch is not divisible, `loss_fn` returns something else, or the parameters are not stored as the policy says.
    """
    if isinstance(accumulate_steps, bool) or not isinstance(accumulate_steps, int) or accumulate_steps < 1:
        raise ValueError(f"accumulate_steps must be a positive whole number, got {accumulate_steps!r}.")

    def loss_and_results(params: Any, model_state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        args = (params, model_state, batch, rng) if has_model_state else (params, batch, rng)
        return _checked(loss_fn(*args), has_model_state)

    functools.update_wrapper(loss_and_results, loss_fn, updated=())

    @functools.lru_cache(maxsize=8)
    def grad_fn_under(policies: PolicyMap | None) -> Callable[..., Any]:
        return gradients.value_and_unscaled_grad(
            loss_and_results, policies, axis_name=axis_name, reduce_dtype=reduce_dtype
        )

    grad_fn_under(None)  # which checks the options now

    def step(state: TrainState, batch: Any, rng: Any = None) -> tuple[TrainState, Metrics]:
        if state.policy is not None:
            check_params(state.params, state.policy)
        grad_fn = grad_fn_under(state.policy)

        def microbatch(model_state: Any, batch: Any, rng: Any) -> Any:
            (loss, (new, metrics)), grads = grad_fn(state.loss_scale, state.params, model_state, batch, rng)
            new = shaped_like(new, model_state, "model_state") if has_model_state else model_state
            return (new, {"loss": loss} | metrics), grads

        model_state, metrics, grads = gradients.accumulate(
            microbatch, accumulate_steps, state.model_state, batch, rng
        )
        grads = gradients.average(
            grads, state.params, metrics["loss"], state.policy, state.loss_scale, axis_name, reduce_dtype
        )
        model_state = cross_device.average_state(model_state, state.model_state, axis_name)
        metrics = cross_device.combine_metrics(metrics, axis_name)
        finite = gradients.all_finite(grads, averaged_over=axis_name)
        ours = {
            "loss": metrics.pop("loss"),
            "grad_norm": gradients.global_norm(grads),
            "loss_scale": jnp.asarray(state.loss_scale.loss_scale, jnp.float32),
            "finite": finite,
        }
        state = state.apply_gradients(
            grads=grads,
            finite=finite,
            loss_scale=state.loss_scale.adjust(finite),
            **({"model_state": model_state} if has_model_state else {}),
        )
        return state, ours | metrics

    return step


def _checked(out: Any, has_model_state: bool) -> tuple[Any, tuple[Any, Metrics]]:
    """What `loss_fn` returned as `(loss, (model_state, metrics))`."""
    pair = isinstance(out, tuple) and len(out) == 2
    if has_model_state:
        if not pair or not (isinstance(out[1], tuple) and len(out[1]) == 2):
            raise ValueError(
                "With has_model_state=True loss_fn must return (loss, (model_state, metrics)), got "
                f"{gradients.describe(out)}."
            )
        loss, (model_state, metrics) = out
    elif isinstance(out, (tuple, list)):
        if not pair:
            raise ValueError(f"loss_fn must return loss or (loss, metrics), got {gradients.describe(out)}.")
        loss, metrics = out
        model_state = None
    else:
        loss, model_state, metrics = out, None, {}
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"The metrics that loss_fn returns must be a dict of arrays, got {gradients.describe(metrics)}."
            + ("" if has_model_state else " For model state say has_model_state=True.")
        )
    if clash := sorted(set(metrics) & set(OUR_METRICS)):
        raise ValueError(
            f"loss_fn returns the metric '{clash[0]}', a name that the step itself reports; rename it. Taken are "
            f"{', '.join(OUR_METRICS)}."
        )
    return loss, (model_state, jax.tree.map(jnp.asarray, dict(metrics)))
