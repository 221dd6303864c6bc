"""One step on many devices: what they decide, average and report."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import DEVICES, F16, PARAMS, Way, batch, create, loss, mesh_of, on_every_device

import mpjax
from mpjax._training import gradients

BF16 = "p=f32,c=bf16,o=f32"
DATA_PARALLEL = ["jit", "explicit", "pmap", "shard_map", "shard_map without checks"]
TENSOR_PARALLEL = [
    *("jit, 4×2", "explicit, 4×2", "shard_map, 4×2", "shard_map without checks, 4×2"),
    *("explicit shard_map, 4×2", "partial shard_map, 4×2"),
]


def arrays(state):
    """What a skipped step may not touch."""
    return state.params, state.opt_state, state.model_state


def values(x):
    """The value of a scalar on each device."""
    return [float(np.asarray(s.data).ravel()[0]) for s in x.addressable_shards]


# ------------------------------------------------------------------------------------------------- one finite flag


@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_one_bad_device_of_eight_skips_the_step_on_all(name):
    way = Way(name)
    before = on_every_device(arrays(way.state))
    metrics = way(batch(row=11))
    assert not metrics["finite"]
    assert np.isfinite(metrics["loss"])
    assert on_every_device(arrays(way.state)) == before
    assert values(way.state.loss_scale.loss_scale) == [2.0**9] * DEVICES
    assert values(way.state.skipped) == values(way.state.step) == [1] * DEVICES


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_one_bad_tensor_parallel_shard_skips_the_step_on_all_devices(name):
    way = Way(name)
    before = on_every_device(arrays(way.state))
    metrics = way(batch(column=9))
    assert not metrics["finite"]
    assert np.isfinite(metrics["loss"])
    assert on_every_device(arrays(way.state)) == before
    assert values(way.state.loss_scale.loss_scale) == [2.0**9] * DEVICES
    assert values(way.state.skipped) == [1] * DEVICES


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_finite_is_one_flag_for_all_shards(check_vma):
    x = np.ones(8, np.float32)
    x[5] = np.nan
    finite = jax.shard_map(
        lambda x: mpjax.all_finite(x)[None],
        mesh=mesh_of(4, 2),
        in_specs=P(("data", "model")),
        out_specs=P(("data", "model")),
        check_vma=check_vma,
    )
    assert jax.jit(finite)(x).tolist() == [False] * 8
    assert jax.jit(finite)(np.ones(8, np.float32)).tolist() == [True] * 8


def collectives(way, kinds="all-reduce|reduce-scatter|all-gather"):
    """Result types of the collectives of a compiled step."""
    text = way.step.lower(way.state, way.put(batch())).compile().as_text()
    return re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", text)


@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_averaged_gradients_need_no_collective_for_the_finite_flag(name):
    assert not [types for types in collectives(Way(name)) if re.search(r"\b(pred|[su]32|[su]8)\[", types)]


@pytest.mark.parametrize("name", ["jit, fully sharded", "jit, mixed", *TENSOR_PARALLEL])
def test_sharded_gradients_need_one_collective_at_most_for_the_finite_flag(name, monkeypatch):
    """However many sets of mesh axes they are sharded over: under jit it travels with the sums of the gradient norm."""
    with_flag = len(collectives(Way(name)))
    monkeypatch.setattr(gradients, "all_finite", lambda grads, **kwargs: jnp.array(True))
    without = len(collectives(Way(name)))
    assert with_flag - without <= 1


# ------------------------------------------------------------------------------------------- the same curve

CURVES = [
    *(
        "jit",
        "jit, 4×2",
        "jit, fully sharded",
        "jit, mixed",
        "explicit",
        "explicit, 4×2",
        "explicit, fully sharded",
    ),
    *(
        "pmap",
        "shard_map",
        "shard_map, 4×2",
        "shard_map without checks",
        "explicit shard_map, 4×2",
        "partial shard_map, 4×2",
    ),
]


@functools.cache
def curve(name, policy, accumulate_steps=1):
    """Losses, gradient norms and whether the step was taken, over six steps of which the third is faulty."""
    scale = mpjax.DynamicLossScale(2.0**10, period=2)
    way = Way(
        name,
        policy=policy,
        tx=optax.sgd(0.1, momentum=0.9),
        loss_scale=scale,
        accumulate_steps=accumulate_steps,
    )
    steps = [way(batch(row=5 if i == 2 else None)) for i in range(6)]
    assert way.traces == 1 or name == "pmap"  # which JAX traces anew for the sharding that its own result has
    return tuple(
        np.asarray([step[key] for step in steps]) for key in ("loss", "grad_norm", "finite", "loss_scale")
    )


# The longest sums have 128 terms (the loss), and in whatever order float32 adds them up, the result moves by at most
# 128 · 2^-24 = 8e-6 of the terms' size. Five steps of a rate that contracts do not enlarge it.
FLOAT32_NOISE = 2e-5
# Activations are rounded to 11 bits, and a sum that moves by float32 noise may be rounded the other way.
FLOAT16_NOISE = 2.0**-10


@pytest.mark.parametrize("name", CURVES)
def test_the_loss_curve_is_that_of_one_device_within_float32_reduction_noise(name):
    losses, norms, finite, _ = curve(name, "float32")
    expected_losses, expected_norms, expected_finite, _ = curve("one device", "float32")
    assert finite.tolist() == expected_finite.tolist() == [True, True, False, True, True, True]
    np.testing.assert_allclose(losses, expected_losses, rtol=FLOAT32_NOISE)
    np.testing.assert_allclose(norms[finite], expected_norms[finite], rtol=FLOAT32_NOISE)
    assert expected_losses[-1] < 0.9 * expected_losses[0]


@pytest.mark.parametrize(
    ("name", "accumulate_steps"),
    [
        *(("jit, mixed", 1), ("pmap", 1), ("shard_map, 4×2", 1)),
        *(("jit", 2), ("explicit, 4×2", 2), ("pmap", 2), ("shard_map, 4×2", 2)),
    ],
)
def test_in_float16_the_same_steps_are_skipped_and_the_scale_is_the_same(name, accumulate_steps):
    losses, norms, finite, scales = curve(name, F16, accumulate_steps)
    expected_losses, expected_norms, _, expected_scales = curve("one device", F16)
    assert finite.tolist() == [True, True, False, True, True, True]
    assert scales.tolist() == expected_scales.tolist() == [2.0**n for n in (10, 10, 11, 10, 10, 11)]
    np.testing.assert_allclose(losses, expected_losses, rtol=FLOAT16_NOISE)
    np.testing.assert_allclose(norms[finite], expected_norms[finite], rtol=FLOAT16_NOISE)


def test_in_bfloat16_the_curve_is_that_of_one_device_within_bfloat16_rounding():
    losses, *_ = curve("shard_map, 4×2", BF16)
    np.testing.assert_allclose(losses, curve("one device", BF16)[0], rtol=2.0**-7)


# ------------------------------------------------------------------------------------------- right averages

REPLICATED = P()


def sharded_grads(loss_fn, axis_name, params_spec=REPLICATED, check_vma=True):
    """Loss and gradients of w = [1, …, 8] for x = [0, …, 7], one of each or all of w on each of eight devices."""
    fn = mpjax.value_and_grad(loss_fn, "float32", axis_name=axis_name)
    run = jax.shard_map(
        lambda w, x: fn(mpjax.NoOpLossScale(), w, x)[:2],
        mesh=mesh_of(DEVICES),
        in_specs=(params_spec, P("data")),
        out_specs=(P(), params_spec),
        check_vma=check_vma,
    )
    return jax.jit(run)(jnp.arange(1.0, 9.0), jnp.arange(8.0))


def test_a_loss_that_is_a_mean_of_all_replicas_already_gives_the_same_gradients():
    def mean_loss(w, x):
        return lax.pmean((w * x).sum(), "data")

    for check_vma in (True, False):
        value, grads = sharded_grads(mean_loss, "data", check_vma=check_vma)
        assert float(value) == 36 * 3.5
        assert grads.tolist() == [3.5] * 8


def test_a_gathered_shard_gets_the_gradient_of_the_mean_of_all_losses():
    def gathered_loss(w, x):
        return (lax.all_gather(w, "data", tiled=True) * x).sum()

    value, grads = sharded_grads(gathered_loss, "data", P("data"))
    assert float(value) == 36 * 3.5
    assert grads.tolist() == [3.5] * 8


def test_with_checks_gradients_that_would_be_summed_over_replicas_are_refused():
    with pytest.raises(ValueError) as e:
        sharded_grads(lambda w, x: (w * x).sum(), None)
    assert "The loss differs over the mesh axis 'data', over which parameters are the same" in str(e.value)
    assert "would be the sum over its 8 replicas, not the mean. Pass axis_name='data'" in str(e.value)
    assert "jax.lax.pmean(loss, 'data')" in str(e.value)


def test_replicas_with_parameters_of_their_own_need_no_axis_name():
    fn = mpjax.value_and_grad(lambda w, x: (w * x).sum(), "float32")
    run = jax.shard_map(
        lambda w, x: fn(mpjax.NoOpLossScale(), w, x)[1],
        mesh=mesh_of(8),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    assert jax.jit(run)(jnp.ones(8), jnp.arange(8.0)).tolist() == list(range(8))


@pytest.mark.parametrize("reduce_dtype", ["float32", "compute"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_eight_replicas_float16_gradients_of_10000_average_to_10000(check_vma, reduce_dtype):
    fn = mpjax.value_and_grad(
        lambda w, x: (w.astype(jnp.float32) * x).sum(), "f16", axis_name="data", reduce_dtype=reduce_dtype
    )
    run = jax.shard_map(
        lambda w, x: fn(mpjax.NoOpLossScale(), w, x)[1:],
        mesh=mesh_of(DEVICES),
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    grads, finite = jax.jit(run)(jnp.ones(1, jnp.float16), jnp.full(8, 10000.0))
    assert (grads.dtype, bool(finite)) == (np.float32, True)
    np.testing.assert_allclose(grads, [10000.0], rtol=0 if reduce_dtype == "float32" else 2.0**-10)


@pytest.mark.parametrize("name", ["jit", "pmap", "shard_map", "shard_map without checks"])
@pytest.mark.parametrize(("reduce_dtype", "element"), [("float32", "f32"), ("compute", "f16")])
def test_weight_gradients_are_added_up_in_float32_or_where_asked_in_the_compute_dtype(
    name, reduce_dtype, element
):
    reduced = " ".join(collectives(Way(name, reduce_dtype=reduce_dtype), "all-reduce"))
    both_weights = (f"{element}[8,16]", f"{element}[16,8]")
    assert sum(reduced.count(shape) for shape in both_weights) == 2
    assert not re.search(r"bf16|f64", reduced)


def test_gradients_that_float16_cannot_hold_unscaled_survive_a_reduction_in_float16():
    def mean(reduce_dtype):
        fn = mpjax.value_and_grad(lambda w, x: (w * x).sum(), F16, axis_name="i", reduce_dtype=reduce_dtype)
        scale = mpjax.StaticLossScale(2.0**20)
        return jax.vmap(lambda x: fn(scale, jnp.ones(1), x)[1], axis_name="i")(jnp.full((8, 1), 2.0**-26))

    np.testing.assert_array_equal(mean("compute"), mean("float32"))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_model_state_is_averaged_in_float32_and_the_same_on_all_devices(check_vma, accumulate_steps):
    def loss_fn(params, state, batch, rng):
        new = {
            "mean": batch.mean().astype(jnp.float16),
            "count": state["count"] + 1,
            "seen": batch.sum() > -1,
            "key": jax.random.split(state["key"])[0],
        }
        return (params * batch.mean()).sum(), (new, {})

    model_state = {
        "mean": jnp.float16(0.0),
        "count": jnp.int32(0),
        "seen": jnp.asarray(False),
        "key": jax.random.key(0),
    }
    new = on_eight_devices(loss_fn, model_state, P(), check_vma, accumulate_steps).model_state
    # The sum over the devices, 8 · 28000, is beyond float16.
    assert (float(new["mean"]), new["mean"].dtype) == (28000.0, np.float16)
    assert (int(new["count"]), bool(new["seen"])) == (accumulate_steps, True)


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_with_checks_each_devices_own_model_state_is_left_alone(accumulate_steps):
    def loss_fn(params, state, batch, rng):
        return (params * batch.mean()).sum(), (state + batch.mean(), {})

    new = on_eight_devices(loss_fn, jnp.zeros(8), P("data"), True, accumulate_steps)
    assert (new.model_state / accumulate_steps).tolist() == [7000.0 * (i + 0.5) for i in range(8)]


def on_eight_devices(loss_fn, model_state, spec, check_vma, accumulate_steps):
    """The state after a step in which the batches of the devices average to 28000."""
    state = mpjax.TrainState.create(
        apply_fn=None, params=jnp.ones(2), tx=optax.sgd(1.0), model_state=model_state
    )
    specs = jax.tree.map(lambda _: P(), state)
    specs = specs.replace(model_state=jax.tree.map(lambda _: spec, model_state))
    step = mpjax.make_train_step(
        loss_fn, axis_name="data", has_model_state=True, accumulate_steps=accumulate_steps
    )
    run = jax.shard_map(
        lambda state, batch: step(state, batch)[0],
        mesh=mesh_of(8),
        in_specs=(specs, P("data")),
        out_specs=specs,
        check_vma=check_vma,
    )
    return jax.jit(run)(state, jnp.repeat(7000.0 * (jnp.arange(8.0) + 0.5), 2))


# ------------------------------------------------------------------------------------------------- bad input


def step_with(axis_name, **options):
    return mpjax.make_train_step(loss, axis_name=axis_name, **options)


def test_an_axis_that_shard_map_does_not_have_is_named_with_those_it_has():
    def run(state, batch):
        return step_with("dta")(state, batch)[1]["loss"]

    state = create()
    mapped = jax.shard_map(run, mesh=mesh_of(4, 2), in_specs=(P(), P()), out_specs=P())
    with pytest.raises(ValueError) as e:
        jax.jit(mapped)(state, batch())
    assert "axis_name='dta' is no axis that the step is mapped over; bound here are 'data', 'model'" in str(
        e.value
    )
    assert "did you mean 'data'?" in str(e.value)


def test_an_axis_that_pmap_does_not_have_is_named_with_the_one_it_has():
    state, data = jax.tree.map(lambda x: np.stack([x] * 8), (create(), batch()))
    with pytest.raises(ValueError) as e:
        jax.pmap(step_with("dta"), axis_name="batch")(state, data)
    assert "axis_name='dta' is no axis that the step is mapped over; bound here are 'batch'" in str(e.value)
    assert "jax.pmap(step, axis_name='dta')" in str(e.value)


def test_an_axis_where_nothing_is_mapped_is_refused_with_the_ways_to_map():
    with pytest.raises(ValueError) as e:
        jax.jit(step_with(("data", "model")))(create(), batch())
    assert "axis_name='data' is no axis that the step is mapped over; no axis is bound here." in str(e.value)
    assert "inside jax.shard_map over a mesh with that axis" in str(e.value)
    assert "under jax.jit with sharded arrays leave axis_name out" in str(e.value)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_axis_name_under_jit_with_sharded_arrays_is_refused_as_not_needed(kind):
    mesh = mesh_of(4, 2, kind)
    state = create(mesh, jax.tree.map(lambda _: P(), PARAMS))
    with pytest.raises(ValueError) as e:
        jax.jit(step_with("data"))(state, batch())
    assert "it runs under jax.jit with arrays sharded over the mesh axes 'data', 'model'" in str(e.value)
    assert "Leave axis_name out" in str(e.value)


def test_value_and_grad_refuses_an_unbound_axis_too():
    with pytest.raises(ValueError, match=r"axis_name='dta' is no axis that the step is mapped over"):
        mpjax.value_and_grad(lambda w: w.sum(), "float32", axis_name="dta")(
            mpjax.NoOpLossScale(), jnp.ones(2)
        )


@pytest.mark.parametrize(
    "make",
    [lambda r: step_with(None, reduce_dtype=r), lambda r: mpjax.value_and_grad(loss, None, reduce_dtype=r)],
)
@pytest.mark.parametrize(
    ("given", "quoted"), [("compte", "'compte'; did you mean 'compute'?"), (jnp.bfloat16, "bfloat16")]
)
def test_another_reduce_dtype_is_refused_at_once(make, given, quoted):
    with pytest.raises(ValueError) as e:
        make(given)
    assert "reduce_dtype must be 'float32' or 'compute' (the compute dtype of the policy), got " in str(
        e.value
    )
    assert quoted in str(e.value)
