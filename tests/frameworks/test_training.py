"""A few steps of training under a map, in every framework."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from frameworks import BF16, EVERY_FRAMEWORK, F16, HALF, Model, build, normal
from trees import bits

import mpjax

BATCH = (normal(16, 8), jnp.arange(16) % 3)


def training(model: Model, policies: Any) -> tuple[Any, Any]:
    """A state, and a jitted step on `BATCH`."""
    call = model.call(policies)

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        logits, model_state = call(params, model_state, batch[0])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch[1]).mean()
        return loss, (model_state, {"largest": jnp.abs(logits).max()})

    state = mpjax.TrainState.create(
        apply_fn=None,
        params=model.params_under(policies),
        tx=optax.adam(0.05),
        policy=policies,
        model_state=model.state,
    )
    return state, jax.jit(mpjax.make_train_step(loss_fn, has_model_state=True))


@EVERY_FRAMEWORK
@HALF
def test_a_model_trains_under_a_map_and_a_skipped_step_leaves_all_bit_identical(
    framework: str, policy: str, half: str
) -> None:
    model = build(framework, "Classifier", BATCH[0])
    state, step = training(model, {model.path("head"): "p=f32,c=f32,o=f32", "*": policy})
    losses = []
    for _ in range(8):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    assert (int(state.step), int(state.skipped), metrics["finite"].tolist()) == (8, 0, True)
    trained = (state.params, state.opt_state, state.model_state)
    assert {x.dtype.name for x in jax.tree.leaves(trained)} <= {"float32", "int32", "uint32"}
    skipped, metrics = step(state, (BATCH[0].at[0].set(jnp.inf), BATCH[1]))
    assert (int(skipped.step), int(skipped.skipped), metrics["finite"].tolist()) == (9, 1, False)
    after = (skipped.params, skipped.opt_state, skipped.model_state)
    assert [*map(bits, jax.tree.leaves(trained))] == [*map(bits, jax.tree.leaves(after))]


@EVERY_FRAMEWORK
def test_parameters_of_several_param_dtypes_train(framework: str) -> None:
    model = build(framework, "Classifier", BATCH[0])
    state, step = training(model, {model.path("body"): "p=bf16,c=bf16,o=bf16", "*": BF16})
    before = jax.tree.map(np.asarray, state.params)
    state, _ = step(state, BATCH)
    assert sorted({x.dtype.name for x in jax.tree.leaves(state.params)}) == ["bfloat16", "float32"]
    changed = jax.tree.map(lambda a, b: bool(np.any(a != np.asarray(b))), before, state.params)
    assert sum(jax.tree.leaves(changed)) >= 4


@EVERY_FRAMEWORK
def test_parameters_that_disagree_with_their_policy_are_refused_by_path(framework: str) -> None:
    model = build(framework, "Classifier", BATCH[0])
    policies = {model.path("head"): "p=f32,c=f32,o=f32", "*": F16}
    state, step = training(model, policies)
    halved = state.replace(params=mpjax.cast_to_half(state.params))
    path = model.path("body").replace("/", "/")
    with pytest.raises(
        ValueError, match=rf"Parameters disagree with the policy.*'{path}/\w+' is .*16, its policy"
    ):
        step(halved, BATCH)
