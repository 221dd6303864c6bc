"""Where the leaves of a training state lie, and that they stay there."""

import functools
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import F16, FULLY, MIXED, PARAMS, TENSOR, Way, batch, create, loss, mesh_of, put, shardings

import mpjax

SPECS = pytest.mark.parametrize("specs", [TENSOR, FULLY, MIXED], ids=["tensor", "fully", "mixed"])


def param_shardings(mesh, specs):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def same_shardings(state, expected):
    return all(
        x.sharding.is_equivalent_to(s, x.ndim)
        for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
    )


# ------------------------------------------------------------------------------------------------- creation


@SPECS
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_adams_moments_are_sharded_like_their_parameters_and_the_rest_on_every_device(specs, kind):
    mesh = mesh_of(4, 2, kind)
    state = create(mesh, specs)
    expected, everywhere = param_shardings(mesh, specs), NamedSharding(mesh, P())
    adam = state.opt_state[0]
    for tree in (state.params, adam.mu, adam.nu):
        assert shardings(tree) == expected
    for x in (state.step, state.skipped, adam.count, *jax.tree.leaves(state.loss_scale)):
        assert x.sharding == everywhere
        assert x.committed


@pytest.mark.parametrize("name", sorted(optimizers.EVERY))
def test_what_any_optimizer_keeps_of_a_parameters_shape_is_sharded_like_it_and_all_on_the_mesh(name):
    mesh = mesh_of(4, 2)
    state = create(mesh, MIXED, tx=optimizers.EVERY[name]())
    for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state):
        param = state.params.get(jax.tree_util.keystr(path[-1:], simple=True))
        beside = param is not None and param.shape == x.shape
        assert x.sharding.is_equivalent_to(param.sharding if beside else NamedSharding(mesh, P()), x.ndim), (
            path
        )


def test_masks_wrappers_and_extra_fields_are_recognised():
    class State(mpjax.TrainState):
        average: object = None

    mesh = mesh_of(4, 2)
    mask = jax.tree.map(lambda x: x.ndim == 2, PARAMS)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.masked(optax.adam(1e-3), mask))
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    state = State.create(apply_fn=None, params=put(PARAMS, mesh, MIXED), tx=tx, policy=F16, average=zeros)
    mu = state.opt_state[1].inner_state[0].mu
    assert mu["in"].sharding == state.params["in"].sharding
    assert shardings(state.average) == shardings(state.params)


def test_model_state_that_is_sharded_stays_and_other_model_state_goes_everywhere():
    mesh = mesh_of(4, 2)
    mine = NamedSharding(mesh, P("model"))
    model_state = {
        "table": jax.device_put(jnp.ones(16), mine),
        "mean": jnp.zeros(16),
        "key": jax.random.key(0),
    }
    state = create(mesh, MIXED, model_state=model_state)
    assert state.model_state["table"].sharding == mine
    assert state.model_state["mean"].sharding == NamedSharding(mesh, P())
    assert state.model_state["key"].sharding.is_equivalent_to(NamedSharding(mesh, P()), 0)


def test_a_state_of_one_device_stays_there():
    assert {len(s.device_set) for s in jax.tree.leaves(shardings(create()))} == {1}


@SPECS
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_state_is_created_under_jit_right_where_it_belongs(specs, kind):
    mesh = mesh_of(4, 2, kind)
    make = functools.partial(create, policy=F16)
    expected = mpjax.state_shardings(jax.eval_shape(make), param_shardings(mesh, specs))
    state = jax.jit(make, out_shardings=expected)()
    outright = create(mesh, specs)
    for trees in (shardings(state), shardings(outright)):
        assert jax.tree.leaves(trees) == jax.tree.leaves(expected)


def test_shardings_of_another_structure_are_refused_with_both():
    with pytest.raises(ValueError) as e:
        mpjax.state_shardings(create(), {"in": NamedSharding(mesh_of(8), P())})
    assert (
        "The shardings have another structure than the parameters of the state: PyTreeDef({'in': *})"
        in str(e.value)
    )
    assert "expected PyTreeDef({'bias': *, 'in': *, 'out': *, 'shift': *})" in str(e.value)


@pytest.mark.parametrize("specs", [MIXED, dict.fromkeys(PARAMS, None) | {"in": 3}])
def test_specs_without_a_mesh_are_refused_with_the_way_to_make_shardings(specs):
    with pytest.raises(ValueError) as e:
        mpjax.state_shardings(create(), specs)
    assert "Expected a jax.sharding.NamedSharding for each parameter, got" in str(e.value)
    assert "NamedSharding(mesh, PartitionSpec(…))" in str(e.value)


# ------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(
    ("name", "accumulate_steps"),
    [
        *(
            ("jit", 1),
            ("jit, 4×2", 1),
            ("jit, fully sharded", 1),
            ("explicit, fully sharded", 1),
            ("shard_map, 4×2", 1),
        ),
        *(("jit, mixed", 2), ("explicit, 4×2", 2), ("shard_map, 4×2", 2)),
    ],
)
def test_a_step_keeps_every_sharding_donates_silently_and_is_traced_once(name, accumulate_steps):
    way = Way(name, accumulate_steps=accumulate_steps)
    before = shardings(way.state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            old = way.state
            way(batch(row=3 if i == 1 else None))
            assert same_shardings(way.state, before)
            assert all(x.is_deleted() for x in jax.tree.leaves(old.params))
    assert way.traces == 1


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
        return nn.Dense(8)(nn.relu(x))


def normed_loss(params, model_state, batch, rng):
    logits, new = Normed().apply({"params": params, **model_state}, batch["x"], mutable=["batch_stats"])
    return jnp.mean((logits - batch["y"]) ** 2), (new, {})


@pytest.mark.parametrize("kind", ["jit", "pmap", "shard_map"])
def test_batch_statistics_are_those_of_one_device_or_the_mean_of_the_replicas(kind):
    variables = jax.jit(Normed().init)(jax.random.key(0), jnp.ones((2, 8)))
    params, model_state = variables["params"], {"batch_stats": variables["batch_stats"]}
    data = {key: batch()[key] for key in ("x", "y")}

    def state_of():
        return mpjax.TrainState.create(
            apply_fn=None,
            params=params,
            tx=optax.sgd(0.1),
            policy=F16,
            model_state=model_state,
            loss_scale=mpjax.NoOpLossScale(),
        )

    axis_name = None if kind == "jit" else "data"
    step = mpjax.make_train_step(normed_loss, has_model_state=True, axis_name=axis_name)
    mesh = mesh_of(8)
    if kind == "pmap":
        args = (
            jax.tree.map(lambda x: jnp.stack([x] * 8), state_of()),
            jax.tree.map(lambda x: x.reshape(8, 2, 8), data),
        )
        new = jax.tree.map(lambda x: x[0], jax.pmap(step, axis_name="data")(*args)[0])
    elif kind == "shard_map":
        new, _ = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))(
            state_of(), data
        )
    else:
        everywhere = jax.tree.map(lambda _: P(), params)
        params = put(jax.tree.map(np.asarray, params), mesh, everywhere)
        new, _ = jax.jit(step)(state_of(), put(data, mesh, {"x": P("data"), "y": P("data")}))
    assert bool(new.skipped == 0)
    hidden = data["x"] @ np.asarray(params["Dense_0"]["kernel"])
    mean = 0.5 * hidden.mean(0)
    stats = new.model_state["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(stats["mean"], mean, atol=2e-3)
    # Under jit the variance is that of the whole batch; a replica knows that of its two examples.
    parts = hidden[None] if kind == "jit" else hidden.reshape(8, 2, 16)
    np.testing.assert_allclose(stats["var"], 0.5 + 0.5 * parts.var(1).mean(0), atol=2e-3)


def nnx_model(mesh):
    model = nnx.Sequential(
        nnx.Linear(8, 16, rngs=nnx.Rngs(0)),
        nnx.BatchNorm(16, rngs=nnx.Rngs(1)),
        nnx.Linear(16, 8, rngs=nnx.Rngs(2)),
    )
    model = mpjax.nnx.apply_policy(model, F16)
    state = nnx.state(model)
    nnx.update(model, jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P("data"))), state))
    return model


def test_an_nnx_model_optimizer_and_state_keep_their_shardings():
    model = nnx_model(mesh := mesh_of(8))
    optimizer = mpjax.nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    sharded, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    for path, x in jax.tree_util.tree_leaves_with_path(nnx.state(optimizer)):
        assert x.sharding.is_equivalent_to(sharded if x.ndim else everywhere, x.ndim), path
    before = shardings((nnx.state(model), nnx.state(optimizer)))

    @nnx.jit
    def step(model, optimizer, batch):
        def loss_fn(model, batch):
            return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)

        value, grads, finite = mpjax.nnx.value_and_grad(loss_fn)(optimizer.loss_scale, model, batch)
        optimizer.apply_gradients(model, grads, finite)
        return value

    data = put({key: batch()[key] for key in ("x", "y")}, mesh, {"x": P("data"), "y": P("data")})
    losses = [float(step(model, optimizer, data)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert int(optimizer.skipped[...]) == 0
    assert same_shardings((nnx.state(model), nnx.state(optimizer)), before)


def test_an_nnx_model_on_replicas_averages_gradients_and_state():
    model = nnx_model(mesh_of(8))
    graphdef, state = nnx.split(model)
    data = {key: batch()[key] for key in ("x", "y")}

    def run(state, batch):
        model = nnx.merge(graphdef, state)
        loss_fn = lambda model, batch: jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)
        scale = mpjax.StaticLossScale(2.0**10)
        value, grads, finite = mpjax.nnx.value_and_grad(loss_fn, axis_name="data")(scale, model, batch)
        return value, grads, finite, nnx.state(model, nnx.BatchStat)

    run = jax.jit(jax.shard_map(run, mesh=mesh_of(8), in_specs=(P(), P("data")), out_specs=P()))
    _, grads, finite, stats = run(jax.tree.map(np.asarray, state), data)
    assert bool(finite)
    hidden = data["x"] @ np.asarray(state["layers"][0]["kernel"][...])
    np.testing.assert_allclose(stats["layers"][1]["mean"][...], 0.01 * hidden.mean(0), atol=1e-4)
    assert grads["layers"][2]["kernel"][...].shape == (16, 8)


# --------------------------------------------------------------------------------- gathered in the compute dtype


def test_fully_sharded_weights_are_gathered_in_the_compute_dtype():
    # float16, as XLA on CPU runs collectives of bfloat16 in float32.
    way = Way("jit, fully sharded")
    text = way.step.lower(way.state, way.put(batch())).compile().as_text()
    gathered = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather(?:-start)?\(", text)
    weights = [element for element, shape in gathered if shape in ("8,16", "16,8")]
    assert len(weights) >= 2
    assert set(weights) == {"f16"}


BF16 = "p=f32,c=bf16,o=f32"


def exported(fn, *args):
    return jax.export.export(jax.jit(fn), platforms=["tpu"])(*args).mlir_module()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_program_for_tpu_casts_a_sharded_weight_before_anything_else_happens_to_it(kind):
    mesh = mesh_of(8, 1, kind)
    params, data = put(PARAMS, mesh, FULLY), put(batch(), mesh, dict.fromkeys(batch(), P("data")))
    fn = mpjax.value_and_grad(
        lambda p, b: loss(
            p, b, None, out_spec=NamedSharding(mesh, P("data")) if kind is AxisType.Explicit else None
        ),
        BF16,
    )
    text = exported(lambda p, b: fn(mpjax.NoOpLossScale(), p, b), params, data)
    for shape in ("8x16", "16x8"):
        (argument,) = re.findall(
            rf"(%arg\d+): tensor<{shape}xf32> {{[^}}]*\"data\"[^}}]*}} *loc|(%arg\d+): tensor<{shape}xf32>",
            text,
        )[:1]
        name = next(n for n in argument if n)
        users = [
            line
            for line in text.splitlines()
            if re.search(rf"{name}\b(?!:)", line) and "func.func" not in line
        ]
        assert users
        assert all(f"(tensor<{shape}xf32>) -> tensor<{shape}xbf16>" in line for line in users), users


def test_without_checks_a_gathered_weight_has_no_gradient():
    def body(w):
        loss_fn = lambda w: jnp.sum(mpjax.all_gather(w, "data"))
        return mpjax.value_and_grad(loss_fn, BF16, axis_name="data")(mpjax.NoOpLossScale(), w)[1]

    fn = jax.shard_map(body, mesh=mesh_of(8), in_specs=P("data"), out_specs=P("data"), check_vma=False)
    with pytest.raises(ValueError) as e:
        jax.jit(fn)(PARAMS["in"])
    assert "mpjax.all_gather over 'data' cannot be differentiated here" in str(e.value)
    assert "Leave check_vma=True, its default" in str(e.value)


def test_inside_shard_map_a_weight_can_be_gathered_in_the_compute_dtype_and_its_gradient_scattered_in_float32():
    mesh = mesh_of(8)

    def body(params, batch):
        def loss_fn(params, batch):
            w = mpjax.all_gather(params["in"], "data", axis=0)
            return jnp.mean((batch["x"] @ w).astype(jnp.float32) ** 2)

        return mpjax.value_and_grad(loss_fn, BF16, axis_name="data")(mpjax.NoOpLossScale(), params, batch)[1]

    fn = jax.shard_map(
        body, mesh=mesh, in_specs=({"in": P("data")}, {"x": P("data")}), out_specs={"in": P("data")}
    )
    params, data = {"in": PARAMS["in"]}, {"x": batch()["x"]}
    text = exported(fn, params, data)
    assert re.search(r"all_gather.*: \(tensor<1x16xbf16>\) -> tensor<8x16xbf16>", text)
    assert re.search(r"reduce_scatter(?s:.*?): \(tensor<8x16xf32>\) -> tensor<1x16xf32>", text)
    expected = jax.grad(lambda w: jnp.mean((data["x"] @ w) ** 2))(params["in"])
    np.testing.assert_allclose(jax.jit(fn)(params, data)["in"], expected, atol=2e-2)
