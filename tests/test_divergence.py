"""When training is given up, and what the error says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.divergence import (
    Divergence,
    DivergenceError,
    DivergenceMonitor,
    find_nonfinite,
    nonfinite_paths,
)


def metrics(finite: bool = True, scale: float = 8.0, loss: float = 1.0) -> dict[str, Any]:
    return {"loss": loss, "loss_scale": scale, "finite": finite}


def reasons(monitor: DivergenceMonitor, observed: list[dict[str, Any]]) -> list[str | None]:
    found = [monitor.observe(step, m) for step, m in enumerate(observed, 1)]
    return [f.reason if f else None for f in found]


def test_skipped_steps_count_in_a_row_only() -> None:
    bad, good = metrics(finite=False), metrics()
    assert reasons(DivergenceMonitor(max_skipped=3), [bad, bad, good, bad, bad]) == [None] * 5
    found = reasons(DivergenceMonitor(max_skipped=3), [bad, bad, bad])
    assert found == [None, None, "3 steps in a row were skipped, as their gradients were not finite"]


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_ends_training_at_once(loss: float) -> None:
    assert reasons(DivergenceMonitor(), [metrics(), metrics(loss=loss)]) == [None, f"the loss is {loss}"]


def test_a_skip_at_the_smallest_scale_ends_training_and_a_finite_step_there_does_not() -> None:
    monitor = DivergenceMonitor.for_loss_scale(mpjax.DynamicLossScale(4.0, min_loss_scale=2.0))
    observed = [metrics(False, 4.0), metrics(True, 2.0), metrics(False, 2.0)]
    assert reasons(monitor, observed) == [
        None,
        None,
        "the gradients are not finite even at the smallest loss scale, 2",
    ]
    without = DivergenceMonitor.for_loss_scale(mpjax.NoOpLossScale())
    assert reasons(without, [metrics(False, 1.0)]) == [None]


def test_the_history_of_the_scale_holds_its_last_eight_changes() -> None:
    monitor = DivergenceMonitor()
    for step in range(1, 11):
        monitor.observe(step, metrics(False, 2.0 ** (20 - step)))
        monitor.observe(step, metrics(False, 2.0 ** (20 - step)))
    found = monitor.observe(11, metrics(loss=np.nan, scale=1.0))
    assert found is not None
    assert found.scales == (*((step, 2.0 ** (20 - step)) for step in range(4, 11)), (11, 1.0))


def test_paths_name_leaf_kind_and_number() -> None:
    tree = {
        "a": jnp.array([jnp.nan, jnp.inf, -jnp.inf]),
        "b": [jnp.ones(2, jnp.bfloat16), jnp.array([1, jnp.inf], jnp.bfloat16)],
        "counts": jnp.arange(3),
        "key": jax.random.key(0),
    }
    assert nonfinite_paths(tree, "params") == [
        "'params/a' (1 NaN and 2 inf of 3)",
        "'params/b/1' (1 inf of 2)",
    ]
    assert nonfinite_paths(None) == []


def create(**params: Any) -> mpjax.TrainState:
    return mpjax.TrainState.create(
        apply_fn=None,
        params=params,
        tx=optax.sgd(0.1),
        policy="p=f32,c=f16,o=f32",
        loss_scale=mpjax.DynamicLossScale(2.0**15),
    )


def loss_fn(params: Any, batch: Any, rng: Any) -> Any:
    hidden = jnp.sum(params["inner"] * batch)  # whose gradient is the batch's
    return hidden + jnp.sum(params["outer"])


def test_the_gradient_of_the_failing_batch_is_taken_again_at_the_scale_of_its_step() -> None:
    state = create(inner=jnp.ones(2), outer=jnp.ones(2))
    batch = jnp.array([1e36, 1.0])
    assert find_nonfinite(loss_fn, state, batch) == ["'gradient/inner' (1 inf of 2)"]
    assert find_nonfinite(loss_fn, state, batch, loss_scale=1.0) == []


def test_the_microbatch_is_named() -> None:
    def mean_loss(params: Any, batch: Any, rng: Any) -> Any:
        jax.random.bits(rng)
        return jnp.mean(params["w"] * batch), {"more": jnp.ones([])}

    state, batch = create(w=jnp.ones([])), jnp.array([1.0, 1.0, 1e36, 1.0, 1.0, 1.0])
    found = find_nonfinite(mean_loss, state, batch, jax.random.key(0), accumulate_steps=3)
    assert found == ["'gradient of microbatch 2/w' (1 inf of 1)"]


@pytest.mark.parametrize(
    ("params", "batch", "found"),
    [
        ([jnp.nan, 1], [1, 1], ["'params/inner' (1 NaN of 2)"]),
        ([1, 1], [1, jnp.inf], ["'batch' (1 inf of 2)"]),
    ],
)
def test_causes_come_before_gradients(params: Any, batch: Any, found: list[str]) -> None:
    state = create(inner=jnp.array(params, float), outer=jnp.ones(2))
    assert find_nonfinite(loss_fn, state, jnp.array(batch, float)) == found


def test_the_error_names_step_reason_paths_scales_and_three_things_to_try() -> None:
    divergence = Divergence(7, "the loss is nan", ((1, 4.0), (6, 2.0)))
    lines = str(DivergenceError(divergence, ["'a'", "'b'", "'c'", "'d'"])).splitlines()
    assert lines[:4] == [
        "Training diverged at step 7: the loss is nan.",
        "Not finite: 'a', 'b', 'c' and 1 more.",
        "Loss scale: 4 from step 1, 2 from step 6.",
        "Three things to try:",
    ]
    assert [line[:3] for line in lines[4:]] == ["1. ", "2. ", "3. "]
    assert "1. Clean the data" in str(DivergenceError(divergence, ["'batch/x' (1 inf of 2)"]))
    assert "1. Go back to the last checkpoint" in str(
        DivergenceError(divergence, ["'params/x' (1 inf of 2)"])
    )


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_skipped must be at least 1, got 0"):
        DivergenceMonitor(max_skipped=0)
