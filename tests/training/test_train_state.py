import inspect

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
from flax import struct
from flax.core import FrozenDict
from flax.training import train_state as flax_train_state
from trees import Layer, Pair, same

import mpjax

F16_MIXED, BF16_MIXED = "p=f32,c=f16,o=f32", "p=f32,c=bf16,o=f32"


def create(params, tx=None, policy="float32", **kwargs):
    tx = tx or optax.sgd(1.0)
    return mpjax.TrainState.create(apply_fn=None, params=params, tx=tx, policy=policy, **kwargs)


def arrays(state):
    """What a skipped step may not touch."""
    return state.params, state.opt_state, state.model_state


# --------------------------------------------------------------------------------------------- create


def test_a_new_state_starts_at_zero_with_int32_arrays():
    state = create({"w": jnp.ones(2)})
    for count in (state.step, state.skipped):
        assert isinstance(count, jax.Array)
        assert (count.dtype, count.shape, int(count)) == (np.int32, (), 0)


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [("f32", "float32"), (BF16_MIXED, "float32"), ("bf16", "bfloat16"), ("p=f16,c=f32", "float16")],
)
def test_parameters_are_stored_in_their_param_dtype(policy, dtype):
    state = create({"a": {"w": jnp.ones(2)}, "b": jnp.ones(2)}, policy=policy)
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {dtype}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_that_have_lost_bits_already_are_refused_where_float32_is_stored(dtype):
    with pytest.raises(ValueError) as e:
        create({"a": {"w": jnp.ones(2, dtype)}, "b": jnp.ones(2)}, policy=BF16_MIXED)
    assert f"'a/w' is {dtype}, its policy stores float32" in str(e.value)
    assert "'b'" not in str(e.value)
    assert "mpjax.cast_params(params, policy)" in str(e.value)


def test_without_a_policy_precision_is_left_alone_as_by_flax():
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.float16), "c": jnp.ones(2)}
    state = create(params, policy=None)
    assert same(state.params, params)
    assert state.policy is None
    assert isinstance(state.loss_scale, mpjax.NoOpLossScale)


@pytest.mark.parametrize("policy", ["f16", "bf16", BF16_MIXED])
def test_the_optimizer_state_is_float32_under_every_policy(policy):
    state = create({"w": jnp.ones(2)}, optax.adam(1e-3), policy)
    assert {x.dtype.name for x in jax.tree.leaves(state.opt_state)} == {"float32", "int32"}


def test_each_parameter_is_stored_as_the_entry_for_its_module_says():
    params = {
        "attn": {"query": {"kernel": jnp.ones(2)}},
        "mlp": {"kernel": jnp.ones(2)},
        "scale": jnp.ones(1),
    }
    state = create(params, policy={"attn": "p=bf16", "mlp": "p=f16,c=f32", "*": "f32"})
    assert jax.tree.map(lambda x: x.dtype.name, state.params) == {
        "attn": {"query": {"kernel": "bfloat16"}},
        "mlp": {"kernel": "float16"},
        "scale": "float32",
    }


def test_a_params_collection_is_no_part_of_a_modules_path():
    state = create({"params": {"head": {"kernel": jnp.ones(2)}}}, policy={"head": "p=bf16", "*": "f32"})
    assert state.params["params"]["head"]["kernel"].dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", [dict, FrozenDict])
def test_parameters_come_back_in_the_container_they_came_in(kind):
    state = create(kind({"w": jnp.ones(2)}), policy="bf16")
    assert type(state.params) is kind
    assert type(state.apply_gradients(grads=kind({"w": jnp.ones(2)})).params) is kind


@pytest.mark.parametrize(
    "params",
    [
        pytest.param((jnp.ones(2), [jnp.ones(1)]), id="tuple"),
        pytest.param(Pair(jnp.ones(2), None), id="namedtuple"),
        pytest.param(Layer(jnp.ones(2), jnp.ones(1)), id="dataclass"),
        pytest.param({}, id="empty"),
        pytest.param(jnp.ones(2), id="array"),
    ],
)
def test_parameters_may_be_any_pytree(params):
    state = create(params)
    state = state.apply_gradients(grads=params)
    assert same(state.params, jax.tree.map(jnp.zeros_like, params))


@pytest.mark.parametrize(
    ("policy", "cls"),
    [
        (F16_MIXED, mpjax.DynamicLossScale),
        (BF16_MIXED, mpjax.NoOpLossScale),
        ("float32", mpjax.NoOpLossScale),
    ],
)
def test_the_loss_scale_is_what_the_policy_needs(policy, cls):
    assert isinstance(create({"w": jnp.ones(2)}, policy=policy).loss_scale, cls)


def test_a_loss_scale_of_ones_own_replaces_what_the_policy_needs():
    state = create({"w": jnp.ones(2)}, policy=F16_MIXED, loss_scale=mpjax.StaticLossScale(8.0))
    assert state.loss_scale == mpjax.StaticLossScale(8.0)


def test_a_loss_scale_of_jmps_is_taken():
    state = create({"w": jnp.ones(2)}, loss_scale=jmp.DynamicLossScale(jnp.float32(8.0), period=3))
    assert (float(state.loss_scale.loss_scale), state.loss_scale.period) == (8.0, 3)


def test_the_policy_is_kept_as_a_static_map():
    state = create({"w": jnp.ones(2)}, policy=BF16_MIXED)
    assert state.policy == mpjax.PolicyMap(default=BF16_MIXED)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [(jnp.arange(3), "int32"), (np.ones(2, bool), "bool"), (jax.random.key(0), "key<fry>"), (99, "int")],
)
def test_a_parameter_that_is_not_floating_is_refused_with_its_path(leaf, dtype):
    with pytest.raises(TypeError) as e:
        create({"dense": {"w": jnp.ones(2), "count": leaf}})
    assert f"params has {dtype}" in str(e.value)
    assert "'dense/count'" in str(e.value)
    assert "keep counters and keys in the model state" in str(e.value)


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_a_loss_scale_of_no_use_is_refused_even_when_it_lies_on_a_device(value):
    with pytest.raises(ValueError, match=f"loss_scale must be a positive finite number, got {value}"):
        create({"w": jnp.ones(2)}, loss_scale=mpjax.DynamicLossScale(jnp.float32(value)))


def test_a_loss_scale_that_is_a_number_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"got 1024\.0 of type float.*mpjax\.StaticLossScale\(factor\)"):
        create({"w": jnp.ones(2)}, loss_scale=1024.0)


def test_creation_runs_inside_jit_and_eval_shape():
    tx = optax.adam(1e-3)
    make = lambda: mpjax.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx, policy=F16_MIXED)
    state = jax.jit(make)()
    assert same(state, make())
    assert jax.tree.structure(jax.eval_shape(make)) == jax.tree.structure(state)


@pytest.mark.parametrize(
    "policy",
    [
        "f32",
        "bf16",
        {"a": "p=bf16", "*": "f32"},
        jmp.get_policy("p=f16,c=f32"),
        mpjax.PolicyMap(default="bf16"),
    ],
)
def test_cast_params_casts_as_create_does(policy):
    params = {"a": {"w": jnp.ones(2)}, "b": {"w": np.ones(2, np.float32)}}
    cast = mpjax.cast_params(params, policy)
    assert same(jax.tree.map(jnp.asarray, cast), create(params, policy=policy).params)


def test_cast_params_leaves_what_is_right_already_as_the_same_object():
    params = {"w": jnp.ones(2)}
    assert mpjax.cast_params(params, "f32") is params


# --------------------------------------------------------------------------------------------- flax


def test_it_is_a_train_state_of_flax():
    assert issubclass(mpjax.TrainState, flax_train_state.TrainState)


def test_every_field_and_argument_of_flaxs_exists():
    theirs = flax_train_state.TrainState
    for field in theirs.__dataclass_fields__:
        assert field in mpjax.TrainState.__dataclass_fields__
    for method in ("create", "apply_gradients"):
        names = inspect.signature(getattr(theirs, method)).parameters
        assert set(names) <= set(inspect.signature(getattr(mpjax.TrainState, method)).parameters)


@pytest.mark.parametrize(
    "tx", [optax.sgd(0.1, momentum=0.9), optax.adamw(1e-2), optax.adam(optax.linear_schedule(1, 0, 5))]
)
def test_in_float32_it_trains_as_flaxs(tx):
    params = {"w": jnp.asarray([1.0, -2.0]), "b": jnp.asarray(0.5)}
    ours, theirs = (
        cls.create(apply_fn=None, params=params, tx=tx)
        for cls in (mpjax.TrainState, flax_train_state.TrainState)
    )
    for i in range(3):
        grads = jax.tree.map(lambda p: p * (0.3 + i), params)
        ours, theirs = (
            jax.jit(lambda s, g: s.apply_gradients(grads=g))(ours, grads),
            theirs.apply_gradients(grads=grads),
        )
    for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert int(ours.step) == theirs.step == 3


def test_a_linen_model_trains_with_it_as_with_flaxs():
    model = nn.Dense(2)
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    state = mpjax.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.5))
    grads = jax.grad(lambda p: state.apply_fn({"params": p}, jnp.ones((1, 3))).sum())(state.params)
    state = state.apply_gradients(grads=grads)
    np.testing.assert_allclose(state.params["bias"], [-0.5, -0.5])


class WithExtras(mpjax.TrainState):
    batch_stats: dict = struct.field(default_factory=dict)
    ema: dict = struct.field(default_factory=dict)
    note: str = struct.field(pytree_node=False, default="")


def test_a_subclass_adds_fields_of_its_own():
    state = WithExtras.create(
        apply_fn=None,
        params={"w": jnp.ones(2)},
        tx=optax.sgd(1.0),
        batch_stats={"mean": jnp.zeros(2)},
        note="a",
    )
    new = state.apply_gradients(grads={"w": jnp.ones(2)}, batch_stats={"mean": jnp.ones(2)}, note="b")
    np.testing.assert_array_equal(new.batch_stats["mean"], [1.0, 1.0])
    assert (type(new), new.note) == (WithExtras, "b")


def test_a_skip_keeps_the_fields_of_a_subclass_but_a_static_one_is_set_outright():
    state = WithExtras.create(
        apply_fn=None,
        params={"w": jnp.ones(2)},
        tx=optax.sgd(1.0),
        batch_stats={"mean": jnp.zeros(2)},
        note="a",
    )
    new = state.apply_gradients(
        grads={"w": jnp.full(2, np.nan)}, batch_stats={"mean": jnp.full(2, np.nan)}, note="b"
    )
    np.testing.assert_array_equal(new.batch_stats["mean"], [0.0, 0.0])
    assert new.note == "b"


def test_replace_and_tree_map_work_as_on_flaxs():
    state = create({"w": jnp.ones(2)}, policy=F16_MIXED)
    assert int(state.replace(step=jnp.int32(5)).step) == 5
    doubled = jax.tree.map(lambda x: x * 2, state)
    np.testing.assert_array_equal(doubled.params["w"], [2.0, 2.0])
    assert doubled.policy == state.policy


def test_it_is_replicated_and_unreplicated_as_flaxs():
    state = create({"w": jnp.ones(2)}, policy=F16_MIXED)
    assert same(flax.jax_utils.unreplicate(flax.jax_utils.replicate(state)), state)


# --------------------------------------------------------------------------------------------- skipping


def trained(state, flags):
    step = jax.jit(lambda s, g, finite: s.apply_gradients(grads=g, finite=finite))
    for finite in flags:
        grads = jax.tree.map(lambda p: jnp.full_like(p, 1.0 if finite else np.nan), state.params)
        state = step(state, grads, finite)
    return state


EVERY_OPTIMIZER = pytest.mark.parametrize("make", optimizers.EVERY.values(), ids=optimizers.EVERY)


@EVERY_OPTIMIZER
def test_a_skipped_step_leaves_parameters_and_optimizer_state_bit_identical(make):
    state = trained(create({"w": jnp.ones((2, 3)), "b": jnp.ones(3)}, make(), BF16_MIXED), [True])
    skipped = trained(state, [False])
    assert same(arrays(skipped), arrays(state))
    assert (int(skipped.step), int(skipped.skipped)) == (2, 1)


def test_after_a_skip_training_goes_on_as_if_it_had_not_been():
    make = lambda: create({"w": jnp.ones(2)}, optax.adam(1e-2))
    assert same(arrays(trained(make(), [True, False, False, True])), arrays(trained(make(), [True, True])))


def test_non_finite_gradients_are_never_applied_however_many_come_in_a_row():
    state = create({"w": jnp.ones(2)}, optax.adam(1e-2))
    after = trained(state, [False] * 50)
    assert same(arrays(after), arrays(state))
    assert (int(after.step), int(after.skipped)) == (50, 50)


def test_whether_to_step_is_decided_from_the_gradients_when_it_is_not_given():
    state = create({"w": jnp.ones(2)})
    assert int(state.apply_gradients(grads={"w": jnp.asarray([1.0, np.inf])}).skipped) == 1
    assert int(state.apply_gradients(grads={"w": jnp.asarray([1.0, 2.0])}).skipped) == 0


def test_a_flag_given_wins_over_the_gradients():
    state = create({"w": jnp.ones(2)}).apply_gradients(grads={"w": jnp.ones(2)}, finite=False)
    assert int(state.skipped) == 1
    np.testing.assert_array_equal(state.params["w"], [1.0, 1.0])


def test_a_schedule_does_not_advance_on_a_skip():
    state = create({"w": jnp.float32(0.0)}, optax.sgd(optax.linear_schedule(1.0, 0.0, 10)))
    for g in (np.inf, 1.0, 1.0):
        state = state.apply_gradients(grads={"w": jnp.float32(g)})
    np.testing.assert_allclose(float(state.params["w"]), -1.9, rtol=1e-6)
    assert (int(state.step), int(state.skipped)) == (3, 1)


def test_bias_correction_counts_applied_updates_only():
    state = trained(create({"w": jnp.ones(2)}, optax.adam(1e-2)), [True, False, True])
    assert int(state.opt_state[0].count) == 2


def test_moments_never_keep_a_nan():
    state = trained(create({"w": jnp.ones(2)}, optax.adam(1e-2)), [False, True])
    assert bool(mpjax.all_finite(state.opt_state))
    np.testing.assert_allclose(state.params["w"], [0.99, 0.99], rtol=1e-5)


def test_a_new_loss_scale_is_kept_on_a_skip():
    state = create({"w": jnp.ones(2)}, policy=F16_MIXED)
    scale = state.loss_scale.adjust(jnp.bool_(False))
    new = state.apply_gradients(grads={"w": jnp.full(2, np.inf)}, loss_scale=scale)
    assert float(new.loss_scale.loss_scale) == 2.0**14


def test_model_state_of_a_skipped_step_is_dropped():
    stats = {"mean": jnp.asarray([1.0, 2.0]), "count": jnp.int32(3)}
    state = create({"w": jnp.ones(2)}, model_state=stats)
    bad = {"mean": jnp.asarray([np.nan, np.inf]), "count": jnp.int32(4)}
    skipped = state.apply_gradients(grads={"w": jnp.full(2, np.nan)}, model_state=bad)
    assert same(skipped.model_state, stats)
    applied = state.apply_gradients(grads={"w": jnp.ones(2)}, model_state=bad)
    assert same(applied.model_state, bad)


# --------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("policy", ["f16", F16_MIXED], ids=["half weights", "float32 masters"])
@EVERY_OPTIMIZER
def test_zero_float16_gradients_give_exactly_zero_updates(make, policy):
    params = {"w": jnp.full((2, 3), 0.7), "b": jnp.full(3, -1.5)}
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float16), params)
    state = create(params, make(), policy)
    new = jax.lax.fori_loop(0, 3, lambda _, s: s.apply_gradients(grads=zeros), state)
    assert same(new.params, state.params)
    assert (int(new.step), int(new.skipped)) == (3, 0)
    assert bool(mpjax.all_finite(new.opt_state))


@pytest.mark.parametrize("policy", ["f16", "bf16", F16_MIXED])
@EVERY_OPTIMIZER
def test_no_step_changes_a_dtype_of_the_state(make, policy):
    state = create({"w": jnp.full((2, 3), 0.7), "b": jnp.full(3, -1.5)}, make(), policy)
    new = jax.eval_shape(lambda s: s.apply_gradients(grads=jax.tree.map(jnp.ones_like, s.params)), state)
    assert jax.tree.map(jnp.result_type, new) == jax.tree.map(jnp.result_type, state)


def test_a_hundred_small_updates_move_a_float32_master_under_a_bfloat16_policy():
    state = create({"w": jnp.float32(1.0)}, optax.sgd(1.0), BF16_MIXED)
    step = jax.jit(lambda s: s.apply_gradients(grads={"w": jnp.float32(1e-3)}))
    for _ in range(100):
        state = step(state)
    np.testing.assert_allclose(float(state.params["w"]), 0.9000013, rtol=1e-6)


def test_a_thousand_small_weight_decays_move_a_float32_master():
    state = create({"w": jnp.float32(1.0)}, optax.adamw(1e-3, weight_decay=0.1), BF16_MIXED)
    state = jax.lax.fori_loop(0, 1000, lambda _, s: s.apply_gradients(grads={"w": jnp.float32(0.0)}), state)
    np.testing.assert_allclose(float(state.params["w"]), 0.9048327, rtol=2e-6)


def test_a_thousand_steps_of_a_moving_average_are_kept_in_float32():
    state = WithExtras.create(
        apply_fn=None,
        params={"w": jnp.float32(0.0)},
        tx=optax.sgd(1.0),
        policy=BF16_MIXED,
        ema={"w": jnp.float32(1.0)},
    )

    def step(_, state):
        return state.apply_gradients(
            grads={"w": jnp.float32(0.0)}, ema=optax.incremental_update(state.params, state.ema, 1e-3)
        )

    state = jax.lax.fori_loop(0, 1000, step, state)
    np.testing.assert_allclose(float(state.ema["w"]), 0.36770, rtol=2e-5)


def test_half_gradients_are_used_in_float32():
    state = create({"w": jnp.float32(0.0)}, optax.sgd(1.0))
    state = state.apply_gradients(grads={"w": jnp.float16(1e-3)})
    assert state.params["w"].dtype == np.float32
    assert float(state.params["w"]) == -float(np.float16(1e-3))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_norm_of_half_gradients_is_taken_in_float32(dtype):
    state = create({"w": jnp.zeros(1)}, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    state = state.apply_gradients(grads={"w": jnp.full(1, 300.0, dtype)})
    np.testing.assert_array_equal(state.params["w"], [-1.0])


def test_half_stored_parameters_are_clipped_in_float32_too():
    state = create({"w": jnp.zeros(1)}, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), "f16")
    state = state.apply_gradients(grads={"w": jnp.full(1, 300.0, jnp.float16)})
    np.testing.assert_array_equal(state.params["w"], np.asarray([-1.0], np.float16))


@EVERY_OPTIMIZER
def test_no_float64_appears_in_a_state_when_x64_is_enabled(make):
    with jax.enable_x64(True):
        state = create({"w": jnp.ones((2, 3), jnp.float32)}, make(), F16_MIXED)
        grads = {"w": jnp.ones((2, 3), jnp.float32)}
        new = jax.eval_shape(
            lambda s: s.apply_gradients(grads=grads, loss_scale=s.loss_scale.adjust(jnp.bool_(True))), state
        )
        for leaf in jax.tree.leaves((state, new)):
            assert leaf.dtype.name in ("float32", "int32"), leaf


# --------------------------------------------------------------------------------------------- structures


@pytest.mark.parametrize(
    "new", [{"mean": jnp.ones(2)}, {"mean": jnp.ones(2), "var": jnp.ones(2), "n": jnp.ones(1)}, {}]
)
def test_model_state_of_another_structure_is_refused_with_what_is_missing(new):
    state = create({"w": jnp.ones(2)}, model_state={"mean": jnp.ones(2), "var": jnp.ones(2)})
    with pytest.raises(ValueError) as e:
        state.apply_gradients(grads={"w": jnp.ones(2)}, model_state=new)
    assert "The new model_state has another structure than the state's" in str(e.value)
    for path in {"mean", "var", "n"} & (set(new) ^ {"mean", "var"}):
        assert f"['{path}']" in str(e.value)
    assert "create the state with model_state=… of the same structure" in str(e.value)


def test_model_state_comes_back_in_its_container_and_dtypes():
    state = create({"w": jnp.ones(2)}, model_state=FrozenDict({"mean": jnp.zeros(2, jnp.float32)}))
    new = state.apply_gradients(grads={"w": jnp.ones(2)}, model_state={"mean": jnp.ones(2, jnp.bfloat16)})
    assert same(new.model_state, FrozenDict({"mean": jnp.ones(2, jnp.float32)}))


def test_a_state_without_model_state_refuses_one():
    with pytest.raises(ValueError, match="The new model_state has another structure than the state's"):
        create({"w": jnp.ones(2)}).apply_gradients(
            grads={"w": jnp.ones(2)}, model_state={"mean": jnp.ones(2)}
        )


# --------------------------------------------------------------------------------------------- saving


def test_a_saved_state_is_restored_bit_for_bit_with_its_loss_scale():
    scale = mpjax.DynamicLossScale(jnp.float32(256.0), jnp.int32(17), 40, 4, 0.5, max_loss_scale=2.0**20)
    state = create(
        {"w": jnp.ones(2)}, optax.adam(1e-2), F16_MIXED, loss_scale=scale, model_state={"n": jnp.int32(3)}
    )
    state = trained(state, [True, False])
    fresh = create({"w": jnp.zeros(2)}, optax.adam(1e-2), F16_MIXED, model_state={"n": jnp.int32(0)})
    restored = flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(state))
    assert same(jax.tree.map(jnp.asarray, restored.params), state.params)
    assert jax.tree.leaves(restored.loss_scale) == [256.0, 17]
    assert (restored.loss_scale.period, restored.loss_scale.factor) == (40, 4)
    assert (restored.loss_scale.min_loss_scale, restored.loss_scale.max_loss_scale) == (0.5, 2.0**20)
    assert (int(restored.step), int(restored.skipped)) == (2, 1)
    again = trained(restored, [True, True])
    assert same(arrays(again), arrays(trained(state, [True, True])))


@pytest.mark.parametrize(
    "damage", [lambda s: s.pop("loss_scale"), lambda s: s.update(loss_scale=np.float32(np.nan))]
)
def test_a_restored_state_whose_loss_scale_is_missing_or_nan_is_refused(damage):
    state = create({"w": jnp.ones(2)}, policy=F16_MIXED)
    saved = flax.serialization.to_state_dict(state)
    damage(saved["loss_scale"])
    with pytest.raises(ValueError, match=r"The restored loss scale .*state\.replace"):
        flax.serialization.from_state_dict(state, saved)


# --------------------------------------------------------------------------------------------- donation


def test_an_optimizer_that_keeps_the_parameters_does_not_share_their_buffers():
    state = create({"w": jnp.ones(2)}, optimizers.keeps_params())
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(buffers)) == len(buffers)


@pytest.mark.parametrize(
    "tx",
    [
        optimizers.keeps_params(),
        optax.contrib.schedule_free_sgd(0.1),
        optax.lookahead(optax.sgd(0.1), 2, 0.5),
    ],
)
def test_a_state_with_such_an_optimizer_can_be_donated(tx):
    params = {"w": jnp.ones(2)}
    if tx.init.__qualname__.startswith("lookahead"):
        params = optax.LookaheadParams.init_synced(params)
    state = create(params, tx)
    step = jax.jit(lambda s, g: s.apply_gradients(grads=g), donate_argnums=0)
    grads = {"w": jnp.ones(2)}
    for _ in range(2):
        state = step(state, grads)
    assert int(state.step) == 2


# --------------------------------------------------------------------------------------------- fp8


def test_fp8_scales_are_replaced_by_what_their_gradients_carry():
    params = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
    state = mpjax.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    grads = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"scale": jnp.full(1, 7.0)}}
    new = state.apply_gradients(grads=grads)
    np.testing.assert_array_equal(new.params["params"]["w"], [0.0, 0.0])
    np.testing.assert_array_equal(new.params["_overwrite_with_gradient"]["scale"], [7.0])


def test_fp8_scales_of_a_skipped_step_are_kept():
    params = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"scale": jnp.ones(1)}}
    state = mpjax.TrainState.create(apply_fn=None, params=params, tx=optax.adam(1.0))
    grads = {"params": {"w": jnp.full(2, np.inf)}, "_overwrite_with_gradient": {"scale": jnp.full(1, 7.0)}}
    assert same(arrays(state.apply_gradients(grads=grads)), arrays(state))
