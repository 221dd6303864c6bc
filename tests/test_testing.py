"""`mpjax.testing`: assertions that pass where precision is right, and say what is wrong where it is not."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training import train_state as flax_train_state

import mpjax
from mpjax import testing

BF16 = "p=f32,c=bf16,o=f32"
X, W = jnp.ones((4, 8)), jnp.full((8, 8), 0.1)


def loss_fn(params, batch, rng):
    return jnp.mean((batch @ params["w"]) ** 2)


def make_state(policy=BF16, **kwargs):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    return mpjax.TrainState.create(apply_fn=None, params={"w": W}, tx=tx, policy=policy, **kwargs)


STEP = jax.jit(mpjax.make_train_step(loss_fn))


# ------------------------------------------------------------------------------- assert_policy_holds


def test_a_train_step_holds_its_policy():
    testing.assert_policy_holds(STEP, make_state(), X, policies=BF16)


def test_a_function_that_does_not_hold_a_policy_fails_with_the_matmul():
    with pytest.raises(AssertionError) as caught:
        testing.assert_policy_holds(lambda x, w: x @ w, X, W, policies=BF16)
    message = str(caught.value)
    assert message.startswith("<lambda> does not hold the policy 'p=full,c=bf16,o=full':")
    assert "error: silent-upcast in (model), forward, " in message
    assert "float32[4,8] × float32[8,8] → float32[4,8]: 100.0 % of the FLOPs" in message


def test_shapes_are_enough():
    state = jax.eval_shape(make_state)
    testing.assert_policy_holds(STEP, state, jax.ShapeDtypeStruct((4, 8), jnp.float32), policies=BF16)


# ------------------------------------------------------------------------------ assert_no_findings


def half_exp(x):
    return jnp.exp(x.astype(jnp.float16))


def test_a_clean_function_has_no_findings():
    testing.assert_no_findings(lambda x, w: x @ w, X, W, severity="note")


def test_a_finding_fails_and_prints_itself():
    with pytest.raises(AssertionError) as caught:
        testing.assert_no_findings(half_exp, X)
    assert "half_exp has findings of severity 'warning' or above:" in str(caught.value)
    assert "warning: half-range in (model), forward, " in str(caught.value)
    assert "'exp' runs in float16." in str(caught.value)


def test_a_warning_is_no_error_and_may_be_meant():
    testing.assert_no_findings(half_exp, X, severity="error")
    testing.assert_no_findings(half_exp, X, ignore={".*": "half-range"})


def test_an_unknown_severity_is_quoted():
    with pytest.raises(ValueError, match="Unknown severity 'bad'"):
        testing.assert_no_findings(half_exp, X, severity="bad")


# ------------------------------------------------------------------------------- assert_traces_once


def test_a_train_step_traces_once():
    testing.assert_traces_once(STEP, make_state("p=f32,c=f16,o=f32"), X)


def test_a_state_that_changes_its_dtype_is_named():
    def step(state, x):
        return {"w": state["w"], "mean": state["mean"].astype(jnp.float32) * 0.9 + x.mean()}, x.sum()

    state = {"w": W, "mean": jnp.zeros([], jnp.bfloat16)}
    with pytest.raises(AssertionError) as caught:
        testing.assert_traces_once(step, state, X)
    assert str(caught.value) == (
        "step is traced again by its second call, as its state changes:\n  mean: bfloat16[] becomes float32[]"
    )


def test_a_python_number_that_becomes_an_array_is_named():
    with pytest.raises(AssertionError, match=r"n: int32\[\], weakly typed becomes int32\[\]"):
        testing.assert_traces_once(lambda state: {"n": jnp.asarray(state["n"], jnp.int32)}, {"n": 0})


def test_a_step_that_returns_no_state_is_refused():
    with pytest.raises(
        AssertionError, match="does not return a state of the structure of its first argument"
    ):
        testing.assert_traces_once(lambda state, x: x, {"w": W}, X)


# ------------------------------------------------------------------------------- assert_skips_cleanly


@pytest.mark.parametrize("policy", ["float32", BF16, "p=f32,c=f16,o=f32"])
def test_a_train_step_skips_cleanly(policy):
    testing.assert_skips_cleanly(STEP, make_state(policy), X)


def test_a_step_that_applies_what_is_not_finite_is_caught():
    @jax.jit
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, None)
        return state.apply_gradients(grads=grads), loss

    state = flax_train_state.TrainState.create(apply_fn=None, params={"w": W}, tx=optax.adam(0.1))
    with pytest.raises(AssertionError) as caught:
        testing.assert_skips_cleanly(step, state, X)
    assert "A step whose gradients are not finite changed its state:" in str(caught.value)
    for path in ("params/w", "opt_state/0/mu/w", "opt_state/0/count"):
        assert f"\n  {path}" in str(caught.value)


def test_a_step_that_selects_parameters_only_keeps_nan_in_the_moments_and_is_caught():
    @jax.jit
    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch, None)
        new = state.apply_gradients(grads=grads)
        finite = mpjax.all_finite(grads)
        return new.replace(params=mpjax.select_tree(finite, new.params, state.params)), loss

    state = flax_train_state.TrainState.create(apply_fn=None, params={"w": W}, tx=optax.adam(0.1))
    with pytest.raises(AssertionError) as caught:
        testing.assert_skips_cleanly(step, state, X)
    assert "opt_state/0/mu/w" in str(caught.value)
    assert "params/w" not in str(caught.value)


def test_a_step_that_learns_nothing_proves_nothing():
    with pytest.raises(AssertionError, match="changed no parameter on a good batch"):
        testing.assert_skips_cleanly(lambda state, batch: state, make_state(), X)


def test_the_state_that_is_given_stays_as_it_is():
    state = make_state()
    testing.assert_skips_cleanly(jax.jit(mpjax.make_train_step(loss_fn), donate_argnums=0), state, X)
    assert jnp.isfinite(state.params["w"]).all()


def test_something_that_is_no_state_is_refused():
    with pytest.raises(TypeError, match="expects a state with the fields of a TrainState, got dict"):
        testing.assert_skips_cleanly(STEP, {"w": W}, X)


def test_a_function_without_a_matmul_shows_nothing_about_a_policy():
    with pytest.raises(AssertionError, match="sin has no matmul and no convolution"):
        testing.assert_policy_holds(jnp.sin, jnp.ones(3), policies="bfloat16")


def test_a_policy_with_a_misspelt_pattern_is_refused():
    with pytest.raises(ValueError, match="'haed' governs no module"):
        testing.assert_policy_holds(
            lambda x: x @ x, jnp.ones((3, 3)), policies={"haed": "float32", "*": "float32"}
        )


def test_a_step_whose_loss_scale_has_still_to_find_its_range_skips_cleanly():
    state = mpjax.TrainState.create(
        apply_fn=None, params={"w": jnp.ones((4, 4))}, tx=optax.adam(1e-3), policy="p=f32,c=f16,o=f32"
    )
    step = mpjax.make_train_step(lambda p, x, rng: jnp.mean((100 * (x @ p["w"])) ** 2))
    batch = jnp.ones((8, 4))
    assert not step(state, batch)[1]["finite"]
    testing.assert_skips_cleanly(step, state, batch)


def test_a_batch_that_is_never_finite_proves_nothing_about_a_skip():
    state = mpjax.TrainState.create(
        apply_fn=None, params={"w": jnp.ones(4)}, tx=optax.sgd(0.1), loss_scale=mpjax.DynamicLossScale()
    )
    step = mpjax.make_train_step(lambda p, x, rng: jnp.sum(p["w"] * x))
    with pytest.raises(AssertionError, match="changed no parameter on a good batch"):
        testing.assert_skips_cleanly(step, state, jnp.full(4, jnp.inf))


def test_a_step_without_arguments_is_refused():
    with pytest.raises(TypeError, match="its state first, got none"):
        testing.assert_traces_once(lambda state: state)
