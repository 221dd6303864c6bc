import dataclasses
import functools

import flax.jax_utils
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import optax.contrib
import optimizers
import pytest
from flax.core import FrozenDict
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from programs import operand_dtypes, trace
from trees import same

import mpjax

F16_MIXED, BF16_MIXED = "p=f32,c=f16,o=f32", "p=f32,c=bf16,o=f32"


def create(params, tx=None, policy="float32", **kwargs):
    tx = tx or optax.sgd(1.0)
    params = jax.tree.map(jnp.copy, params)  # tests that donate the state share them
    return mpjax.TrainState.create(apply_fn=None, params=params, tx=tx, policy=policy, **kwargs)


def product_loss(params, batch, rng):
    """A linear model, so that its gradient is the mean of the batch."""
    del rng
    return (batch["x"] @ params["w"]).astype(jnp.float32).mean()


def batch_of(*rows):
    return {"x": jnp.asarray(rows, jnp.float32)}


W = {"w": jnp.ones((2, 1))}
GOOD, BAD = batch_of([1.0, 2.0], [3.0, 4.0]), batch_of([1.0, np.inf], [3.0, 4.0])


def arrays(state):
    """What a skipped step may not touch."""
    return state.params, state.opt_state, state.model_state


# --------------------------------------------------------------------------------------------- one step


def test_a_step_moves_the_parameters_against_the_mean_gradient():
    state, metrics = mpjax.make_train_step(product_loss)(create(W), GOOD)
    np.testing.assert_array_equal(state.params["w"], [[1 - 2.0], [1 - 3.0]])
    assert (int(state.step), int(state.skipped)) == (1, 0)
    assert float(metrics["loss"]) == 5.0


@pytest.mark.parametrize("policy", ["float32", BF16_MIXED, F16_MIXED])
@pytest.mark.parametrize(
    "scale",
    [mpjax.NoOpLossScale(), mpjax.StaticLossScale(1024.0), mpjax.DynamicLossScale(1024.0)],
    ids=["none", "static", "dynamic"],
)
def test_a_step_is_the_same_with_every_policy_and_loss_scale_where_numbers_are_exact(policy, scale):
    state, metrics = mpjax.make_train_step(product_loss)(create(W, policy=policy, loss_scale=scale), GOOD)
    np.testing.assert_array_equal(state.params["w"], [[-1.0], [-2.0]])
    assert (float(metrics["loss"]), bool(metrics["finite"])) == (5.0, True)
    np.testing.assert_allclose(float(metrics["grad_norm"]), np.sqrt(13.0), rtol=1e-6)
    assert float(metrics["loss_scale"]) == float(scale.loss_scale)


def test_matmuls_of_the_step_take_the_compute_dtype_forward_and_backward():
    state = create(W, policy=BF16_MIXED)
    pairs = operand_dtypes(mpjax.make_train_step(product_loss), state, GOOD)
    assert pairs == [("bfloat16", "bfloat16")] * 2


def test_a_state_without_a_policy_trains_in_the_precision_that_comes():
    state = create(W, policy=None)
    step = mpjax.make_train_step(product_loss)
    assert operand_dtypes(step, state, GOOD) == [("float32", "float32")] * 2
    np.testing.assert_array_equal(step(state, GOOD)[0].params["w"], [[-1.0], [-2.0]])


def test_the_order_of_a_step_is_scale_gradients_float32_unscale_average_finite_optimizer():
    events = []

    @functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
    @dataclasses.dataclass(frozen=True)
    class Recording:
        loss_scale = 4.0

        def scale(self, loss):
            events.append(("scale", loss.dtype.name, loss.shape))
            return loss * 4.0

        def unscale(self, grads):
            events.extend(("unscale", g.dtype.name, g.shape) for g in jax.tree.leaves(grads))
            return jax.tree.map(lambda g: g / 4.0, grads)

        def adjust(self, finite):
            events.append(("adjust", finite.dtype.name, finite.shape))
            return self

    def update(grads, state, params=None):
        jax.debug.callback(lambda g: events.append(("optimizer", g.dtype.name, g.tolist())), grads["w"])
        return grads, state

    tx = optax.GradientTransformation(lambda params: (), update)
    state = create({"w": jnp.ones(2, jnp.float16)}, tx, "f16", loss_scale=Recording())

    def loss(params, batch, rng):
        events.append(("loss", params["w"].dtype.name, batch.shape))
        return (params["w"].astype(jnp.float32) * batch).sum()

    step = mpjax.make_train_step(loss, accumulate_steps=1)
    step(state, jnp.asarray([1.0, 3.0]))
    jax.effects_barrier()
    assert events == [
        ("loss", "float16", (2,)),
        ("scale", "float32", ()),
        ("unscale", "float32", (2,)),
        ("adjust", "bool", ()),
        ("optimizer", "float32", [1.0, 3.0]),
    ]


def test_gradients_are_clipped_after_unscaling():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    step = mpjax.make_train_step(lambda p, batch, rng: (p["w"] * batch).sum())
    state = create({"w": jnp.zeros(2)}, tx, F16_MIXED, loss_scale=mpjax.StaticLossScale(2.0**15))
    for grads, update in (([3.0, 4.0], [0.6, 0.8]), ([0.003, 0.004], [0.003, 0.004])):
        new, _ = step(state, jnp.asarray(grads))
        np.testing.assert_allclose(new.params["w"], -np.asarray(update), rtol=1e-6)


def test_gradients_are_not_halved_on_a_growth_step():
    state = create(W, policy=F16_MIXED, loss_scale=mpjax.DynamicLossScale(8.0, period=1))
    step = mpjax.make_train_step(product_loss)
    for i in range(3):
        state, metrics = step(state, GOOD)
        assert float(metrics["loss_scale"]) == 8.0 * 2**i
        np.testing.assert_array_equal(state.params["w"], [[1 - 2.0 * (i + 1)], [1 - 3.0 * (i + 1)]])


# --------------------------------------------------------------------------------------------- skipping


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(1)(x)


MODEL = Normalized()


def normalized_loss(params, model_state, batch, rng):
    del rng
    out, new = MODEL.apply({"params": params, **model_state}, batch["x"], mutable=["batch_stats"])
    loss = (out.astype(jnp.float32) ** 2).mean()
    return loss, (new, {"largest": jnp.abs(out).max()})


VARIABLES = jax.jit(MODEL.init)(jax.random.key(0), jnp.ones((2, 2)))
ADAM = optax.adam(1e-2)


def normalized_state(policy=F16_MIXED, **kwargs):
    variables = jax.tree.map(jnp.copy, VARIABLES)
    return create(
        variables["params"],
        ADAM,
        policy,
        model_state={"batch_stats": variables["batch_stats"]},
        **kwargs,
    )


NORMALIZED_STEP = jax.jit(mpjax.make_train_step(normalized_loss, has_model_state=True))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_skipped_step_is_a_transaction_that_did_not_happen(bad):
    step = NORMALIZED_STEP
    state, _ = step(normalized_state(loss_scale=mpjax.DynamicLossScale(2.0**10)), GOOD)
    skipped, metrics = step(state, batch_of([1.0, bad], [3.0, 4.0]))
    assert same(arrays(skipped), arrays(state))
    assert not metrics["finite"]
    assert (int(skipped.step), int(skipped.skipped), int(skipped.opt_state[0].count)) == (2, 1, 1)
    assert (float(state.loss_scale.loss_scale), float(skipped.loss_scale.loss_scale)) == (2.0**10, 2.0**9)


def test_parameters_optimizer_and_model_state_wait_for_one_conditional():
    conditionals = [
        eqn for eqn in trace(NORMALIZED_STEP, normalized_state(), GOOD) if eqn.primitive.name == "cond"
    ]
    assert len(conditionals) == 1


def test_batch_statistics_move_with_an_applied_step_and_stay_finite_float32():
    state = normalized_state(BF16_MIXED)
    new, _ = NORMALIZED_STEP(state, GOOD)
    assert not same(new.model_state, state.model_state)
    assert {x.dtype.name for x in jax.tree.leaves(new.model_state)} == {"float32"}
    assert bool(mpjax.all_finite(new.model_state))


def test_an_overflow_by_the_scale_is_skipped_and_halved_until_gradients_fit():
    state = create(W, policy=F16_MIXED, loss_scale=mpjax.DynamicLossScale(2.0**20))
    step, scales = jax.jit(mpjax.make_train_step(product_loss)), []
    for _ in range(8):
        state, metrics = step(state, GOOD)
        scales += [float(metrics["loss_scale"])] if metrics["finite"] else []
    # Half the scale reaches each of the two rows, and 2^16 is above 65504. The gradient itself is float32.
    assert scales[0] == 2.0**16
    assert int(state.skipped) == 4
    np.testing.assert_array_equal(state.params["w"], [[1 - 2.0 * 4], [1 - 3.0 * 4]])


def test_without_a_loss_scale_a_bad_step_is_skipped_too():
    state = create(W, policy=BF16_MIXED)
    assert isinstance(state.loss_scale, mpjax.NoOpLossScale)
    new, metrics = mpjax.make_train_step(product_loss)(state, BAD)
    assert not metrics["finite"]
    assert same(arrays(new), arrays(state))


# --------------------------------------------------------------------------------------------- compiling

SCALES = pytest.mark.parametrize(
    "scale",
    [
        pytest.param(lambda: mpjax.NoOpLossScale(), id="none"),
        pytest.param(lambda: mpjax.StaticLossScale(8.0), id="static"),
        pytest.param(lambda: mpjax.DynamicLossScale(8.0, period=2), id="dynamic"),
        pytest.param(lambda: jmp.NoOpLossScale(), id="jmp none"),
        pytest.param(lambda: jmp.StaticLossScale(8.0), id="jmp static"),
        pytest.param(lambda: jmp.DynamicLossScale(jnp.float32(8.0), period=2), id="jmp dynamic"),
    ],
)


@SCALES
def test_a_step_can_be_lowered_and_compiled_ahead_of_time(scale):
    state = create(W, optax.adam(1e-2), F16_MIXED, loss_scale=scale())
    step = jax.jit(mpjax.make_train_step(product_loss), donate_argnums=0)
    compiled = step.lower(state, GOOD).compile()
    for _ in range(2):
        state, metrics = compiled(state, GOOD)
    assert int(state.step) == 2
    assert bool(metrics["finite"])


@pytest.mark.parametrize("value", [8, 8.0, np.float64(8), jnp.float32(8), jnp.bfloat16(8)], ids=repr)
@pytest.mark.filterwarnings("ignore:Expected floating type")
def test_any_number_of_steps_takes_one_trace_whatever_the_scale_was_built_from(value):
    traces = []

    def loss(params, batch, rng):
        traces.append(None)
        return product_loss(params, batch, rng)

    state = create(W, optax.adam(1e-2), F16_MIXED, loss_scale=mpjax.DynamicLossScale(value, period=2))
    step = jax.jit(mpjax.make_train_step(loss), donate_argnums=0)
    for batch in (GOOD, BAD, GOOD, GOOD):
        state, _ = step(state, batch)
    assert len(traces) == 1
    assert float(state.loss_scale.loss_scale) == 8.0


@SCALES
def test_a_donated_state_is_gone_and_no_warning_is_given(scale):
    state = create(W, optax.adam(1e-2), F16_MIXED, loss_scale=scale())
    step = jax.jit(mpjax.make_train_step(product_loss), donate_argnums=0)
    old = jax.tree.leaves(state)
    state, _ = step(state, GOOD)
    assert all(x.is_deleted() for x in old)
    state, _ = step(state, BAD)
    assert int(state.step) == 2


def test_model_state_is_donated_too():
    state = normalized_state()
    old = jax.tree.leaves(state)
    jax.jit(NORMALIZED_STEP, donate_argnums=0)(state, GOOD)
    assert all(x.is_deleted() for x in old)


@pytest.mark.parametrize(
    "tx", [optimizers.keeps_params(), optax.contrib.schedule_free_sgd(0.1), optax.adam(0.1)]
)
def test_an_optimizer_that_keeps_the_parameters_can_be_donated(tx):
    state = create({"w": jnp.ones((2, 1))}, tx)
    step = jax.jit(mpjax.make_train_step(product_loss), donate_argnums=0)
    for _ in range(2):
        state, _ = step(state, GOOD)
    assert int(state.step) == 2


def test_a_restored_state_goes_on_in_the_same_trace_to_the_same_numbers():
    traces = []

    def loss(params, batch, rng):
        traces.append(None)
        return product_loss(params, batch, rng)

    def fresh():
        return mpjax.TrainState.create(apply_fn=None, params=W, tx=tx, policy=F16_MIXED, loss_scale=scale)

    tx = optax.adam(1e-2)
    scale = mpjax.DynamicLossScale(jnp.float32(256.0), jnp.int32(17), 20, min_loss_scale=0.5)
    step = jax.jit(mpjax.make_train_step(loss))
    state, _ = step(fresh(), GOOD)
    restored = flax.serialization.from_bytes(fresh(), flax.serialization.to_bytes(state))
    for batch in (GOOD, BAD, GOOD, GOOD):
        state, _ = step(state, batch)
        restored, _ = step(restored, batch)
    assert same(jax.tree.leaves(restored), jax.tree.leaves(state))
    assert len(traces) == 1


def test_one_step_function_serves_states_of_different_policies():
    step = jax.jit(mpjax.make_train_step(product_loss))
    for policy, dtype in (
        (BF16_MIXED, "bfloat16"),
        (F16_MIXED, "float16"),
        ("float32", "float32"),
        (BF16_MIXED, "bfloat16"),
    ):
        state = create(W, policy=policy, loss_scale=mpjax.NoOpLossScale())
        assert operand_dtypes(step, state, GOOD) == [(dtype, dtype)] * 2
        assert int(step(state, GOOD)[0].step) == 1


@pytest.mark.parametrize("policy", [F16_MIXED, BF16_MIXED])
def test_no_float64_appears_in_the_state_when_x64_is_enabled(policy):
    with jax.enable_x64(True):
        state = create(
            {"w": jnp.ones((2, 1), jnp.float32)}, optax.adam(optax.linear_schedule(1.0, 0.0, 10)), policy
        )
        new, metrics = jax.jit(mpjax.make_train_step(product_loss, accumulate_steps=2))(state, GOOD)
        names = {x.dtype.name for x in jax.tree.leaves((state, new, metrics))}
    assert names == {"float32", "int32", "bool"}


# --------------------------------------------------------------------------------------------- metrics


def test_metrics_are_ours_then_the_users():
    step = mpjax.make_train_step(lambda p, b, rng: (product_loss(p, b, rng), {"acc": 0.5, "n": 3}))
    _, metrics = step(create(W), GOOD)
    assert list(metrics) == ["loss", "grad_norm", "loss_scale", "finite", "acc", "n"]
    assert (float(metrics["acc"]), int(metrics["n"])) == (0.5, 3)
    assert all(isinstance(x, jax.Array) for x in metrics.values())


def test_loss_and_grad_norm_are_unscaled_and_the_loss_scale_is_the_one_this_step_used():
    def loss(params, batch, rng):
        return (params["p"] ** 2).sum(), {"acc": jnp.float32(0.5)}

    state = create({"p": jnp.float32(3.0)}, loss_scale=mpjax.DynamicLossScale(1024.0, period=1))
    state, metrics = mpjax.make_train_step(loss)(state, None)
    assert {k: float(v) for k, v in metrics.items()} == {
        "loss": 9.0,
        "grad_norm": 6.0,
        "loss_scale": 1024.0,
        "finite": 1.0,
        "acc": 0.5,
    }
    assert float(state.loss_scale.loss_scale) == 2048.0


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_the_norm_of_large_gradients_is_taken_in_float32(accumulate_steps):
    step = mpjax.make_train_step(
        lambda p, b, rng: (p["w"].astype(jnp.float32) * b.mean()).sum(), accumulate_steps=accumulate_steps
    )
    state = create({"w": jnp.ones(1, jnp.float16)}, policy="f16", loss_scale=mpjax.NoOpLossScale())
    _, metrics = step(state, jnp.full(2, 300.0))
    assert float(metrics["grad_norm"]) == 300.0


def test_users_metrics_of_microbatches_are_averaged_added_up_and_anded():
    def loss(params, batch, rng):
        correct = (batch["x"][:, 0] > 1).sum().astype(jnp.int32)
        return product_loss(params, batch, rng), {
            "mean": batch["x"][:, 0].mean(),
            "correct": correct,
            "all": correct > 0,
            "nested": {"half": batch["x"].astype(jnp.float16).mean()},
        }

    _, metrics = mpjax.make_train_step(loss, accumulate_steps=2)(create(W), GOOD)
    assert (float(metrics["mean"]), int(metrics["correct"]), bool(metrics["all"])) == (2.0, 1, False)
    assert float(metrics["nested"]["half"]) == 2.5
    assert metrics["nested"]["half"].dtype == np.float32


# --------------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize(
    ("steps", "policy"), [(1, F16_MIXED), (2, "float32"), (2, BF16_MIXED), (8, F16_MIXED)]
)
def test_microbatches_give_the_gradients_of_the_full_batch(policy, steps):
    batch = {"x": jnp.asarray(np.random.default_rng(0).integers(-8, 8, (8, 2)), jnp.float32)}
    scale = mpjax.StaticLossScale(64.0)
    full, _ = mpjax.make_train_step(product_loss)(create(W, policy=policy, loss_scale=scale), batch)
    state, metrics = mpjax.make_train_step(product_loss, accumulate_steps=steps)(
        create(W, policy=policy, loss_scale=scale), batch
    )
    np.testing.assert_allclose(state.params["w"], full.params["w"], rtol=1e-6)
    np.testing.assert_allclose(
        float(metrics["loss"]), float((batch["x"] @ W["w"]).mean()), rtol=1e-3, atol=1e-6
    )
    assert int(state.step) == 1


def test_one_bad_microbatch_skips_the_step_and_the_scale_moves_once():
    step = jax.jit(mpjax.make_train_step(product_loss, accumulate_steps=4))
    state = create(W, policy=F16_MIXED, loss_scale=mpjax.DynamicLossScale(1024.0, period=1))
    rows = [[1.0, 1.0]] * 3
    skipped, metrics = step(state, batch_of(*rows, [np.inf, 1.0]))
    assert not metrics["finite"]
    assert float(skipped.loss_scale.loss_scale) == 512.0
    assert same(arrays(skipped), arrays(state))
    applied, _ = step(state, batch_of(*rows, [1.0, 1.0]))
    assert float(applied.loss_scale.loss_scale) == 2048.0


def test_the_scale_does_not_change_inside_an_accumulation_window():
    state = create(
        {"w": jnp.float32(0.0)}, policy=F16_MIXED, loss_scale=mpjax.DynamicLossScale(4.0, period=1)
    )
    step = mpjax.make_train_step(lambda p, b, rng: (p["w"] * b).mean(), accumulate_steps=2)
    state, _ = step(state, jnp.ones(2))
    assert float(state.params["w"]) == -1.0


def test_a_thousand_and_twenty_four_half_gradients_of_one_average_to_one():
    state = create({"w": jnp.zeros(1, jnp.bfloat16)}, policy="bf16")
    step = mpjax.make_train_step(
        lambda p, b, rng: (p["w"].astype(jnp.float32) * b).sum(), accumulate_steps=1024
    )
    new, metrics = step(state, jnp.ones(1024))
    assert float(metrics["grad_norm"]) == 1.0
    assert float(new.params["w"][0]) == -1.0


def test_batch_statistics_go_from_one_microbatch_to_the_next():
    def loss(params, model_state, batch, rng):
        return (params["w"] * batch).sum(), ({"seen": model_state["seen"] * 10 + batch.sum()}, {})

    state = create({"w": jnp.float32(1.0)}, model_state={"seen": jnp.float32(0.0)})
    new, _ = mpjax.make_train_step(loss, accumulate_steps=3, has_model_state=True)(
        state, jnp.asarray([1.0, 2.0, 3.0])
    )
    assert float(new.model_state["seen"]) == 123.0


@pytest.mark.parametrize(("steps", "shape"), [(2, (3, 2)), (4, (2, 2)), (3, (4, 2))])
def test_a_batch_that_is_not_divisible_is_refused_with_leaf_and_shape(steps, shape):
    with pytest.raises(ValueError) as e:
        mpjax.make_train_step(product_loss, accumulate_steps=steps)(create(W), {"x": jnp.ones(shape)})
    assert (
        f"The batch cannot be cut into accumulate_steps={steps} equal parts: leaf 'x' has shape {list(shape)}"
        in str(e.value)
    )
    assert f"Its first axis must be a multiple of {steps}" in str(e.value)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "2", None])
def test_accumulate_steps_that_is_no_positive_whole_number_is_refused(steps):
    with pytest.raises(ValueError) as e:
        mpjax.make_train_step(product_loss, accumulate_steps=steps)
    assert f"accumulate_steps must be a positive whole number, got {steps!r}" in str(e.value)


# --------------------------------------------------------------------------------------------- rng


def noise_loss(params, batch, rng):
    return (params["w"] * jax.random.uniform(rng, (2,))).sum() + 0 * batch.sum(), {
        "u": jax.random.uniform(rng)
    }


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_the_loss_gets_the_key_of_the_step_as_it_is(key):
    _, metrics = mpjax.make_train_step(noise_loss)(create({"w": jnp.ones(2)}), jnp.ones(2), key(7))
    assert float(metrics["u"]) == float(jax.random.uniform(key(7)))


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_each_microbatch_gets_a_key_of_its_own(key):
    _, metrics = mpjax.make_train_step(noise_loss, accumulate_steps=2)(
        create({"w": jnp.ones(2)}), jnp.ones(2), key(7)
    )
    draws = [float(jax.random.uniform(k)) for k in jax.random.split(key(7), 2)]
    assert draws[0] != draws[1]
    np.testing.assert_allclose(float(metrics["u"]), np.mean(draws), rtol=1e-6)


@pytest.mark.parametrize("policy", [BF16_MIXED, F16_MIXED])
def test_the_same_key_gives_the_same_dropout_under_every_policy(policy):
    dropout = nn.Dropout(0.5, deterministic=False)

    def loss(params, batch, rng):
        kept = dropout.apply({}, jnp.ones(64), rngs={"dropout": rng}) > 0
        return (params["w"] * batch).sum(), {"kept": kept}

    _, metrics = mpjax.make_train_step(loss)(
        create({"w": jnp.ones(2)}, policy=policy), jnp.ones(2), jax.random.key(1)
    )
    expected = dropout.apply({}, jnp.ones(64), rngs={"dropout": jax.random.key(1)}) > 0
    assert 16 < int(expected.sum()) < 48
    np.testing.assert_array_equal(metrics["kept"], expected)


# --------------------------------------------------------------------------------------------- replicas

REPLICAS = 4
KINDS = pytest.mark.parametrize("kind", ["pmap", "shard_map", "shard_map without checks"])


def on_replicas(step, kind, state, batch):
    """State and metrics after a step, each leaf with a first axis for the replicas."""
    if kind == "pmap":
        batch = jax.tree.map(lambda x: x.reshape(REPLICAS, -1, *x.shape[1:]), batch)
        state = flax.jax_utils.replicate(state, jax.local_devices()[:REPLICAS])
        return jax.pmap(step, axis_name="i")(state, batch)
    mesh = Mesh(np.asarray(jax.devices()[:REPLICAS]), ("i",))

    def block(state, batch):
        return jax.tree.map(lambda x: x[None], step(state, batch))

    specs = {"in_specs": (P(), P("i")), "out_specs": P("i"), "check_vma": kind == "shard_map"}
    return jax.jit(jax.shard_map(block, mesh=mesh, **specs))(state, batch)


@KINDS
@pytest.mark.parametrize(("accumulate_steps", "policy"), [(1, BF16_MIXED), (2, F16_MIXED)])
def test_a_step_on_four_replicas_is_the_step_on_the_whole_batch(kind, accumulate_steps, policy):
    batch = {"x": jnp.asarray(np.random.default_rng(0).integers(-8, 8, (8, 2)), jnp.float32)}
    state = create(W, optax.sgd(1.0), policy, loss_scale=mpjax.DynamicLossScale(64.0, period=1))
    whole, expected = mpjax.make_train_step(product_loss)(state, batch)
    step = mpjax.make_train_step(product_loss, axis_name="i", accumulate_steps=accumulate_steps)
    new, metrics = on_replicas(step, kind, state, batch)
    np.testing.assert_allclose(new.params["w"], [whole.params["w"]] * REPLICAS, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], [expected["loss"]] * REPLICAS, rtol=1e-3)
    np.testing.assert_allclose(metrics["grad_norm"], [expected["grad_norm"]] * REPLICAS, rtol=1e-6)
    assert new.loss_scale.loss_scale.tolist() == [128.0] * REPLICAS
    assert new.step.tolist() == [1] * REPLICAS


@KINDS
def test_one_bad_replica_skips_the_step_on_all(kind):
    rows = np.ones((REPLICAS, 2), np.float32)
    rows[2, 0] = np.inf
    state = create(W, optax.adam(1e-2), F16_MIXED, loss_scale=mpjax.DynamicLossScale(64.0))
    new, metrics = on_replicas(
        mpjax.make_train_step(product_loss, axis_name="i"), kind, state, {"x": jnp.asarray(rows)}
    )
    assert metrics["finite"].tolist() == [False] * REPLICAS
    assert new.skipped.tolist() == [1] * REPLICAS
    assert new.loss_scale.loss_scale.tolist() == [32.0] * REPLICAS
    for i in range(REPLICAS):
        assert same(jax.tree.map(lambda x: x[i], arrays(new)), arrays(state))


@KINDS
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_batch_statistics_of_replicas_are_averaged(kind, accumulate_steps):

    def loss(params, model_state, batch, rng):
        stats = {"mean": model_state["mean"] * 0 + batch.mean(), "count": model_state["count"] + 1}
        return (params["w"] * batch).sum(), (stats, {})

    state = create({"w": jnp.float32(1.0)}, model_state={"mean": jnp.float32(0.0), "count": jnp.int32(0)})
    step = mpjax.make_train_step(loss, axis_name="i", has_model_state=True, accumulate_steps=accumulate_steps)
    new, _ = on_replicas(step, kind, state, jnp.repeat(jnp.asarray([1.0, 2.0, 3.0, 6.0]), 2))
    assert new.model_state["mean"].tolist() == [3.0] * REPLICAS
    assert new.model_state["count"].tolist() == [accumulate_steps] * REPLICAS


@KINDS
def test_users_metrics_of_replicas_are_averaged_counted_and_combined(kind):
    def loss(params, batch, rng):
        metrics = {"mean": batch.mean(), "n": jnp.int32(batch.size), "ok": batch.mean() < 5}
        return (params["w"] * batch).sum(), metrics

    step = mpjax.make_train_step(loss, axis_name="i")
    _, metrics = on_replicas(step, kind, create({"w": jnp.float32(1.0)}), jnp.asarray([1.0, 2.0, 3.0, 6.0]))
    assert metrics["mean"].tolist() == [3.0] * REPLICAS
    assert metrics["n"].tolist() == [4] * REPLICAS
    assert metrics["ok"].tolist() == [False] * REPLICAS


def test_gradients_are_averaged_in_float32_over_eight_replicas():
    step = mpjax.make_train_step(lambda p, b, rng: (p["w"].astype(jnp.float32) * b).sum(), axis_name="i")
    state = create({"w": jnp.zeros(1, jnp.float16)}, policy="f16", loss_scale=mpjax.NoOpLossScale())
    _, metrics = jax.vmap(step, in_axes=(None, 0), axis_name="i")(state, jnp.full((8, 1), 10000.0))
    assert metrics["grad_norm"].tolist() == [10000.0] * 8


# --------------------------------------------------------------------------------------------- fp8


@jax.custom_vjp
def with_scale(x, scale):
    """As fp8 layers do: what arrives as the gradient of `scale` is its next value, the largest |x|."""
    return x * 1.0


with_scale.defvjp(lambda x, scale: (x * 1.0, x), lambda x, g: (g, jnp.abs(x).max()[None]))

FP8_PARAMS = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"scale": jnp.ones(1)}}


def fp8_loss(params, batch, rng):
    del rng
    return (
        with_scale(batch * params["params"]["w"][None], params["_overwrite_with_gradient"]["scale"])
    ).sum()


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_fp8_scales_are_neither_unscaled_nor_averaged(accumulate_steps):
    state = create(FP8_PARAMS, loss_scale=mpjax.StaticLossScale(1024.0))
    step = mpjax.make_train_step(fp8_loss, accumulate_steps=accumulate_steps)
    new, _ = step(state, jnp.asarray([[1.0, 2.0], [3.0, 7.0]]))
    assert new.params["_overwrite_with_gradient"]["scale"].tolist() == [7.0]


@KINDS
def test_fp8_scales_of_replicas_are_the_largest(kind):
    state = create(FP8_PARAMS, loss_scale=mpjax.StaticLossScale(1024.0))
    new, _ = on_replicas(
        mpjax.make_train_step(fp8_loss, axis_name="i"),
        kind,
        state,
        jnp.asarray([[1.0, 2.0], [3.0, 7.0], [0.0, 1.0], [1.0, 1.0]]),
    )
    assert new.params["_overwrite_with_gradient"]["scale"].tolist() == [[7.0]] * REPLICAS


def test_fp8_scales_are_no_part_of_the_gradient_norm():
    _, metrics = mpjax.make_train_step(fp8_loss)(create(FP8_PARAMS), jnp.asarray([[3.0, 4.0]]))
    assert float(metrics["grad_norm"]) == 5.0


@pytest.mark.filterwarnings("ignore")
def test_a_linen_fp8_layer_trains_under_a_scale():
    model = nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.ones((16, 16)))
    state = create(dict(variables), policy=BF16_MIXED, loss_scale=mpjax.StaticLossScale(1024.0))

    def loss(params, batch, rng):
        return model.apply(params, batch).astype(jnp.float32).mean()

    new, metrics = jax.jit(mpjax.make_train_step(loss))(state, jnp.full((16, 16), 8.0))
    assert bool(metrics["finite"])
    history = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(new.params["_overwrite_with_gradient"])
        if "input_amax_history" in jax.tree_util.keystr(path)
    ]
    assert float(jnp.max(history[0])) == 8.0


# --------------------------------------------------------------------------------------------- partial training


def test_adapters_train_in_float32_while_a_bfloat16_base_stays_bit_identical():
    base = {"w": jax.random.normal(jax.random.key(0), (4, 3), jnp.bfloat16)}
    adapters = {"a": jnp.ones((4, 2)), "b": jnp.zeros((2, 3))}

    def loss(params, model_state, batch, rng):
        base = model_state["base"]["w"].astype(jnp.float32)
        out = batch @ base + (batch @ params["a"]) @ params["b"]
        return (out.astype(jnp.float32) ** 2).mean(), (model_state, {})

    state = create(adapters, optax.adam(1e-2), BF16_MIXED, model_state={"base": base})
    step = jax.jit(mpjax.make_train_step(loss, has_model_state=True))
    new = state
    for _ in range(3):
        new, _ = step(new, jnp.ones((2, 4)))
    assert same(new.model_state, {"base": base})
    assert not same(new.params, state.params)
    assert {x.dtype.name for x in jax.tree.leaves((new.params, new.opt_state))} == {"float32", "int32"}


# --------------------------------------------------------------------------------------------- containers


@pytest.mark.parametrize("kind", [dict, FrozenDict])
def test_parameters_and_model_state_stay_in_their_containers(kind):
    def loss(params, model_state, batch, rng):
        return (params["w"] * batch).sum(), ({"mean": batch.mean()}, {})

    state = create(kind({"w": jnp.ones(2)}), policy=BF16_MIXED, model_state=kind({"mean": jnp.float32(0.0)}))
    new, _ = jax.jit(mpjax.make_train_step(loss, has_model_state=True))(state, jnp.ones(2))
    assert type(new.params) is kind
    assert type(new.model_state) is kind


def test_keys_ints_and_none_in_batch_and_model_state_pass_through():
    def loss(params, model_state, batch, rng):
        new = {"key": jax.random.split(model_state["key"])[0], "n": model_state["n"] + 1, "none": None}
        return (params["w"] * batch["x"]).sum(), (new, {"ids": batch["ids"].max()})

    model_state = {"key": jax.random.key(0), "n": jnp.int32(0), "none": None}
    batch = {
        "x": jnp.ones(2),
        "ids": jnp.asarray([2909, 32001, 50257]),
        "none": None,
        "flag": jnp.ones(1, bool),
    }
    state = create({"w": jnp.ones(2)}, policy=F16_MIXED, model_state=model_state)
    new, metrics = jax.jit(mpjax.make_train_step(loss, has_model_state=True))(state, batch)
    assert same(new.model_state["key"], jax.random.split(jax.random.key(0))[0])
    assert (int(new.model_state["n"]), int(metrics["ids"])) == (1, 50257)


# --------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("loss", "quoted"),
    [
        (lambda p, b, r: p["w"].astype(jnp.float16).sum(), "got dtype float16 and shape []"),
        (lambda p, b, r: p["w"], "got dtype float32 and shape [2, 1]"),
        (lambda p, b, r: (p["w"], {}), "got dtype float32 and shape [2, 1]"),
        (lambda p, b, r: jnp.int32(1), "got dtype int32 and shape []"),
    ],
)
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_loss_that_is_no_float32_scalar_is_refused_with_its_dtype_and_shape(loss, quoted, accumulate_steps):
    with pytest.raises(ValueError) as e:
        mpjax.make_train_step(loss, accumulate_steps=accumulate_steps)(create(W), GOOD)
    assert f"The loss must be a float32 scalar, {quoted}" in str(e.value)
    assert "decorate the loss with mpjax.full_precision" in str(e.value)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (lambda s: (s, {}, {}), "loss_fn must return loss or (loss, metrics), got a tuple of 3"),
        (lambda s: (s,), "loss_fn must return loss or (loss, metrics), got a tuple of 1"),
        (lambda s: (s, s), "The metrics that loss_fn returns must be a dict of arrays, got "),
        (lambda s: (s, None), "must be a dict of arrays, got NoneType"),
        (lambda s: (s, ({}, {})), "got a tuple of 2. For model state say has_model_state=True."),
        (lambda s: None, "loss_fn must return the loss, a float32 scalar, got NoneType"),
        (lambda s: {"loss": s}, "loss_fn must return the loss, a float32 scalar, got dict"),
    ],
)
def test_a_loss_function_that_returns_another_structure_is_refused(out, message):
    with pytest.raises(ValueError) as e:
        mpjax.make_train_step(lambda p, b, r: out(p["w"].sum()))(create(W), GOOD)
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("out", "got"),
    [
        (lambda s: s, "got "),
        (lambda s: (s, {}), "got a tuple of 2"),
        (lambda s: (s, ({}, {}, {})), "got a tuple of 2"),
        (lambda s: (s, {}, {}), "got a tuple of 3"),
    ],
)
def test_with_model_state_another_structure_is_refused(out, got):
    step = mpjax.make_train_step(lambda p, s, b, r: out(p["w"].sum()), has_model_state=True)
    with pytest.raises(ValueError) as e:
        step(create(W, model_state={}), GOOD)
    assert "With has_model_state=True loss_fn must return (loss, (model_state, metrics))" in str(e.value)
    assert got in str(e.value)


def test_model_state_of_another_structure_is_refused_with_what_is_missing():
    step = mpjax.make_train_step(
        lambda p, s, b, r: (p["w"].sum(), ({"mean": s["mean"]}, {})), has_model_state=True
    )
    state = create(W, model_state={"mean": jnp.zeros(2), "var": jnp.ones(2)})
    with pytest.raises(
        ValueError, match=r"The new model_state has another structure .*missing \[\"\['var'\]\"\]"
    ):
        step(state, GOOD)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "loss_scale", "finite"])
def test_a_metric_with_a_name_of_ours_is_refused(name):
    with pytest.raises(ValueError) as e:
        mpjax.make_train_step(lambda p, b, r: (p["w"].sum(), {name: 1.0, "acc": 1.0}))(create(W), GOOD)
    assert f"loss_fn returns the metric '{name}', a name that the step itself reports; rename it" in str(
        e.value
    )
    assert "Taken are loss, grad_norm, loss_scale, finite." in str(e.value)


def test_parameters_of_another_dtype_than_the_policys_are_refused_with_the_ways_out():
    state = create({"a": {"w": jnp.ones(2)}, "b": jnp.ones(2)})
    restored = state.replace(params={"a": {"w": jnp.ones(2, jnp.bfloat16)}, "b": jnp.ones(2)})
    with pytest.raises(ValueError) as e:
        mpjax.make_train_step(lambda p, b, r: p["b"].sum())(restored, None)
    assert "'a/w' is bfloat16, its policy stores float32" in str(e.value)
    assert "'b'" not in str(e.value)
    assert "mpjax.cast_params(params, policy)" in str(e.value)


def test_the_way_out_for_restored_parameters_works():
    state = create(W)
    restored = state.replace(params={"w": jnp.ones((2, 1), jnp.bfloat16)})
    restored = restored.replace(params=mpjax.cast_params(restored.params, state.policy))
    assert same(
        mpjax.make_train_step(product_loss)(restored, GOOD), mpjax.make_train_step(product_loss)(state, GOOD)
    )


def test_integer_parameters_that_slipped_into_a_state_are_refused_with_their_path():
    state = create(W).replace(params={"w": jnp.ones((2, 1)), "bins": {"edges": jnp.arange(3)}})
    with pytest.raises(TypeError) as e:
        mpjax.make_train_step(product_loss)(state, GOOD)
    assert "has int32 at 'bins/edges'" in str(e.value)


def test_an_error_of_the_users_own_comes_through_as_it_is():
    def loss(params, batch, rng):
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        mpjax.make_train_step(loss)(create(W), GOOD)
