"""Every optimizer and wrapper of the installed optax: a skipped step, and a finite one."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import optimizers
import pytest
from flax import nnx
from trees import same

import mpjax

PARAMS = {"w": jnp.asarray([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]]), "b": jnp.asarray([0.1, -0.2, 0.3])}
X = jnp.asarray([[1.0, 2.0], [-1.0, 0.5], [0.25, -2.0], [3.0, 1.0]])
GOOD = {"x": X, "y": jnp.ones((4, 3))}
OTHER = {"x": X[::-1] * 0.5, "y": jnp.zeros((4, 3))}
BAD = {"x": X.at[1, 0].set(np.inf), "y": jnp.ones((4, 3))}


def loss_fn(params: Any, batch: Any, rng: Any = None) -> jax.Array:
    del rng
    return jnp.mean((batch["x"] @ params["w"] + params["b"][None] - batch["y"]) ** 2)


def create(tx: Any, params: Any = PARAMS, **kwargs: Any) -> mpjax.TrainState:
    return mpjax.TrainState.create(apply_fn=None, params=params, tx=tx, **kwargs)


def arrays(state: mpjax.TrainState) -> Any:
    """What a skipped step may not touch."""
    return state.params, state.opt_state, state.model_state


def params_for(name: str) -> Any:
    return optax.LookaheadParams.init_synced(PARAMS) if name == "optax.lookahead" else PARAMS


def plain_update(name: str, tx: Any, params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
    """Parameters and optimizer state after a step as one takes it with optax alone."""
    value_fn = functools.partial(loss_fn, batch=batch)
    value, grad = jax.value_and_grad(value_fn)(getattr(params, "fast", params))  # of optax.lookahead
    extra = {"value": value, "grad": grad, "value_fn": lambda params: value_fn(params)}
    if name in ("optax.contrib.sophia", "optax.contrib.hutchinson_estimator_diag_hessian"):
        extra = {"obj_fn": value_fn}
    takes_them = isinstance(tx, (optax.GradientTransformationExtraArgs, optax.MultiSteps))
    takes_them &= name != "optax.contrib.sam"  # whose update has no **extra_args
    updates, opt_state = tx.update(grad, opt_state, params, **(extra if takes_them else {}))
    return optax.apply_updates(params, updates), opt_state


def lookahead_step(state: mpjax.TrainState, batch: Any) -> tuple[mpjax.TrainState, Any]:
    _, grads, finite = mpjax.value_and_grad(loss_fn, None)(mpjax.NoOpLossScale(), state.params.fast, batch)
    seen = {"seen": state.model_state["seen"] + 1}
    return state.apply_gradients(grads=grads, finite=finite, model_state=seen), {"finite": finite}


ROWS = sorted(set(optimizers.transformations()) - set(optimizers.NO_ROW))


def test_each_transformation_that_has_arguments_or_no_row_exists() -> None:
    known = {*optimizers.ARGUMENTS, *optimizers.NO_ROW}
    assert known - set(optimizers.transformations()) == set()
    assert len(ROWS) > 100


@pytest.mark.parametrize("name", ROWS)
def test_a_skipped_step_changes_nothing_and_a_finite_one_is_that_of_plain_optax(name: str) -> None:
    tx = optimizers.make(name)
    state = create(tx, params_for(name), model_state={"seen": jnp.zeros([], jnp.int32)})

    def counting_loss(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        return loss_fn(params, batch), ({"seen": model_state["seen"] + 1}, {})

    step = mpjax.make_train_step(counting_loss, has_model_state=True)
    if name == "optax.lookahead":  # whose gradients are those of the fast parameters alone
        step = lookahead_step
    # Under jit both branches of the step's conditional have to agree; then operation by operation, for which
    # nothing is compiled.
    traced, _ = jax.eval_shape(step, state, GOOD)
    chex.assert_trees_all_equal_shapes_and_dtypes(traced, state)
    with jax.disable_jit():
        params, opt_state = params_for(name), tx.init(params_for(name))
        for batch in (GOOD, BAD, OTHER):
            before = state
            state, metrics = step(state, batch)
            assert bool(metrics["finite"]) == (batch is not BAD)
            if batch is BAD:
                assert same(arrays(state), arrays(before))
                continue
            params, opt_state = plain_update(name, tx, params, opt_state, batch)
            # The same operations on the same numbers: every bit.
            assert same(jax.tree.leaves(state.params), jax.tree.leaves(params))
            assert same(
                jax.tree.leaves(state.opt_state), jax.tree.leaves(jax.tree.map(jnp.asarray, opt_state))
            )
    assert (int(state.step), int(state.skipped), int(state.model_state["seen"])) == (3, 1, 2)


# --------------------------------------------------------------------------------------------- further arguments


def test_a_transformation_that_is_not_given_the_loss_is_named_with_the_way_out() -> None:
    for tx in (
        optax.contrib.reduce_on_plateau(),
        optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau()),
        optax.masked(optax.contrib.reduce_on_plateau(), {"w": True, "b": True}),
    ):
        with pytest.raises(TypeError) as e:
            create(tx).apply_gradients(grads=PARAMS)
        assert (
            "The optimizer's transformation 'reduce_on_plateau' asks for 'value', which it was not given."
            in str(e.value)
        )
        assert "pass the unscaled loss as value=…" in str(e.value)
    with pytest.raises(TypeError, match=r"'hutchinson' asks for 'obj_fn'.* as value_fn=…"):
        create(optax.contrib.sophia(1e-2)).apply_gradients(grads=PARAMS)


def test_a_wrapper_that_does_not_pass_the_loss_on_is_named_as_the_reason() -> None:
    tx = optax.GradientTransformation(
        optax.polyak_sgd().init, lambda u, s, p: optax.polyak_sgd().update(u, s, p)
    )
    outer = optax.GradientTransformationExtraArgs(tx.init, lambda u, s, p=None, **extra: tx.update(u, s, p))
    with pytest.raises(TypeError) as e:
        mpjax.make_train_step(loss_fn)(create(outer), GOOD)
    assert "asks for 'value', which it was not given. A wrapper around it, such as optax.lookahead" in str(
        e.value
    )


def test_an_argument_of_ones_own_is_named_and_can_be_given() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, temperature: Any, **extra: Any) -> Any:
        return jax.tree.map(lambda g: -temperature * g, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    with pytest.raises(TypeError, match=r"asks for 'temperature'.*extra_args=\{'temperature': …\}"):
        mpjax.make_train_step(loss_fn)(create(tx), GOOD)
    new = create(tx).apply_gradients(grads=PARAMS, extra_args={"temperature": 1.0})
    np.testing.assert_array_equal(new.params["w"], jnp.zeros((2, 3)))


def test_an_optimizer_that_looks_at_the_loss_never_sees_one_that_is_not_finite() -> None:
    def infinite(params: Any, batch: Any, rng: Any) -> jax.Array:
        return loss_fn(params, batch) + jax.lax.stop_gradient(batch["more"])

    step = mpjax.make_train_step(infinite)
    batch = GOOD | {"more": jnp.float32(np.inf)}
    for tx in (optax.contrib.momo(), optax.inject_hyperparams(optax.polyak_sgd)(max_learning_rate=0.5)):
        state = create(tx)
        new, metrics = step(state, batch)
        assert not metrics["finite"]
        assert same(arrays(new), arrays(state))
        assert int(new.skipped) == 1
    _, metrics = step(create(optax.adam(1e-2)), batch)  # which does not look at it
    assert metrics["finite"]


def test_the_loss_is_not_traced_again_for_an_optimizer_that_does_not_evaluate_it() -> None:
    traces = []

    def counted(params: Any, batch: Any, rng: Any) -> jax.Array:
        traces.append(None)
        return loss_fn(params, batch)

    for tx in (optax.adam(1e-2), optax.polyak_sgd()):
        jax.eval_shape(mpjax.make_train_step(counted), create(tx), GOOD)
    assert len(traces) == 2


@pytest.mark.parametrize("policy", ["p=f32,c=bf16,o=f32", "p=f32,c=f16,o=f32"])
def test_a_line_search_under_a_half_policy_and_a_loss_scale_decreases_the_loss(policy: str) -> None:
    state = create(optax.lbfgs(), policy=policy)
    step = jax.jit(mpjax.make_train_step(loss_fn, accumulate_steps=2))
    losses = []
    for _ in range(4):
        state, metrics = step(state, GOOD)
        losses.append(float(metrics["loss"]))
    assert int(state.skipped) == 0
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("check_vma", [True, False])
def test_replicas_evaluate_the_loss_of_the_whole_batch(check_vma: bool) -> None:
    """A line search then takes the same steps as on one device, on each of them."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    state = create(optax.lbfgs())
    step = jax.shard_map(
        mpjax.make_train_step(loss_fn, axis_name="data"),
        mesh=mesh,
        in_specs=(spec(), spec("data")),
        out_specs=(spec(), spec()),
        check_vma=check_vma,
    )
    new, _ = jax.jit(step)(state, GOOD)
    expected, _ = jax.jit(mpjax.make_train_step(loss_fn))(state, GOOD)
    chex.assert_trees_all_close(new.params, expected.params, rtol=1e-4)
    assert not same(new.params, state.params)


def test_an_optimizer_whose_state_changes_its_structure_is_refused() -> None:
    with pytest.raises(ValueError, match="The optimizer's state has another structure after an update"):
        create(optax.monitor({"norm": lambda updates: optax.tree.norm(updates)})).apply_gradients(
            grads=PARAMS
        )


class Line(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(PARAMS["w"])
        self.b = nnx.Param(PARAMS["b"])

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...] + self.b[...][None]


def line_loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def test_the_optimizer_of_nnx_passes_the_loss_on_and_skips_one_that_is_not_finite() -> None:
    model = mpjax.nnx.apply_policy(Line(), "float32")
    optimizer = mpjax.nnx.Optimizer(model, optax.polyak_sgd())
    loss, grads, finite = mpjax.nnx.value_and_grad(line_loss)(optimizer.loss_scale, model, GOOD)
    with pytest.raises(TypeError, match="'scale_by_polyak' asks for 'value', which it was not given"):
        optimizer.apply_gradients(model, grads, finite)
    assert not optimizer.apply_gradients(model, grads, finite, value=jnp.float32(np.inf))
    assert same(model.w[...], PARAMS["w"])
    assert optimizer.apply_gradients(model, grads, finite, value=loss)
    expected, _ = mpjax.make_train_step(loss_fn)(create(optax.polyak_sgd()), GOOD)
    chex.assert_trees_all_close({"w": model.w[...], "b": model.b[...]}, expected.params, rtol=1e-6)


def test_the_optimizer_of_nnx_evaluates_the_loss_of_a_line_search() -> None:
    model = mpjax.nnx.apply_policy(Line(), "float32")
    optimizer = mpjax.nnx.Optimizer(model, optax.lbfgs())
    loss, grads, finite = mpjax.nnx.value_and_grad(line_loss)(optimizer.loss_scale, model, GOOD)
    graphdef, _ = nnx.split(model)
    optimizer.apply_gradients(
        model, grads, finite, value=loss, value_fn=lambda params: line_loss(nnx.merge(graphdef, params), GOOD)
    )
    assert float(line_loss(model, GOOD)) < float(loss)


def test_the_state_of_fp8_layers_is_no_part_of_what_an_optimizer_sees_wherever_it_stands() -> None:
    inner = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
    for params, found in ((inner, lambda p: p), ({"model": inner}, lambda p: p["model"])):
        state = create(optax.lbfgs(), params)
        assert sum(x.shape == (1,) for x in jax.tree.leaves(state.opt_state)) == 0
        grads = jax.tree.map(lambda x: jnp.full_like(x, 7.0 if x.shape == (1,) else 1.0), params)
        value_fn = lambda p: jnp.sum(found(p)["params"]["w"] * found(p)["_overwrite_with_gradient"]["scale"])
        new = state.apply_gradients(grads=grads, value=jnp.float32(2.0), value_fn=value_fn)
        assert found(new.params)["_overwrite_with_gradient"]["scale"].tolist() == [7.0]
        assert float(found(new.params)["params"]["w"][0]) < 1.0
