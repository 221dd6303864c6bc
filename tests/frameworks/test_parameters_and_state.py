"""What is stored in which dtype under a policy, and what gradients are worth, in every framework."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frameworks import (
    BF16,
    EVERY_FRAMEWORK,
    F16,
    HALF,
    NO_SCALE,
    X,
    assert_near,
    build,
    dtypes_of,
    operands,
)

import mpjax

# ---------------------------------------------------------------------------------------- parameters


@EVERY_FRAMEWORK
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [(BF16, "float32"), (F16, "float32"), ("bf16", "bfloat16"), ("p=f16,c=f16,o=f32", "float16")],
)
def test_parameters_are_stored_in_their_param_dtype_with_the_same_values(
    framework: str, policy: str, dtype: str
) -> None:
    model = build(framework, "Blocks", X)
    stored = model.params_under(policy)
    assert dtypes_of(stored) == {dtype}
    plain = jax.tree.leaves(model.params)
    for a, b in zip(jax.tree.leaves(stored), plain, strict=True):
        np.testing.assert_array_equal(a, b.astype(dtype))


@EVERY_FRAMEWORK
@pytest.mark.parametrize("how", ["loop", "scan"])
def test_each_module_stores_its_own_param_dtype(framework: str, how: str) -> None:
    model = build(framework, "Blocks", X, how=how)
    head = model.path("head")
    policies = {head: "p=f32,c=f32,o=f32", "*": "p=bf16,c=bf16,o=f32"}
    rows = model.explain(policies).rows
    assert {row.path: row.dtypes for row in rows if row.dtypes} == {
        row.path: ("float32",) if row.path == head else ("bfloat16",) for row in rows if row.parameters
    }
    flat, _ = jax.tree_util.tree_flatten_with_path(model.params_under(policies))
    for path, x in flat:
        assert x.dtype == ("float32" if "head" in jax.tree_util.keystr(path) else "bfloat16"), path


@EVERY_FRAMEWORK
def test_a_model_with_16_bit_parameters_keeps_its_float32_state(framework: str) -> None:
    model = build(framework, "Normalised", X[:, 0, :1])
    assert dtypes_of(model.params_under("bf16")) == {"bfloat16"}
    _, state = jax.eval_shape(model.under("bf16"), *arguments_under(model, "bf16"))
    assert floats(state) == floats(model.state) == {"float32"}


def arguments_under(model: Any, policies: Any) -> tuple[Any, ...]:
    return (model.params_under(policies), model.state, *model.inputs)


def stored(tree: Any) -> list[Any]:
    return [x.dtype for x in jax.tree.leaves(tree)]


def floats(tree: Any) -> set[str]:
    return {x.dtype.name for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


@EVERY_FRAMEWORK
def test_abstract_models_follow_the_policy(framework: str) -> None:
    model = build(framework, "Blocks", X)
    params, state, *inputs = jax.eval_shape(lambda *args: args, *arguments_under(model, "bf16"))
    assert jax.eval_shape(model.under("bf16"), params, state, *inputs)[0].dtype == "bfloat16"
    assert dtypes_of(jax.eval_shape(lambda: model.params_under("bf16"))) == {"bfloat16"}
    assert mpjax.audit(model.under("bf16"), params, state, *inputs).total_flops > 0


@EVERY_FRAMEWORK
@pytest.mark.parametrize(
    "remade",
    [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["deepcopy", "copy", "pickle"],
)
def test_copies_and_pickles_of_what_is_stored_are_the_same(framework: str, remade: Any) -> None:
    model = build(framework, "Spied", X, note=print)
    if framework in ("nnx", "equinox"):
        module = build(framework, "Pair", X).module
        governed = mpjax.apply_policy(module, {"last": "p=bf16,c=f32,o=f32", "*": BF16})
        again = remade(governed)
        assert type(again) is type(governed)
        assert type(again.first) is type(governed.first) is not type(module.first)
        assert again(X).tolist() == governed(X).tolist()
        assert jax.tree.structure(again) == jax.tree.structure(governed)
    policies = mpjax.PolicyMap({model.path("last"): "p=bf16,c=f32,o=f32"}, default=BF16)
    assert remade(policies) == policies


# ------------------------------------------------------------------------------------------- state


VARIANCE = {"linen": 9000.9, "nnx": 9000.9, "equinox": 9000.9, "haiku": 9000.0}


@EVERY_FRAMEWORK
@pytest.mark.parametrize("policy", [F16, "f16"])
def test_the_running_variance_of_large_values_is_float32_and_right(framework: str, policy: str) -> None:
    x = jnp.array([[300.0], [-300.0]], jnp.float16)
    model = build(framework, "Normalised", x.astype(jnp.float32))
    _, state = jax.jit(model.under(policy))(*arguments_under(model, policy)[:2], x)
    assert stored(state) == stored(model.state)
    leaves = [float(x.squeeze()) for x in jax.tree.leaves(state) if x.size == 1]
    assert any(np.isclose(x, VARIANCE[framework], rtol=1e-6) for x in leaves), leaves


@EVERY_FRAMEWORK
@HALF
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_state_that_a_module_computes_in_half_precision_keeps_its_stored_dtype(
    framework: str, policy: str, half: str, wrap: Any
) -> None:
    model = build(framework, "Stateful", X)
    _, state = wrap(model.under(policy))(*model.arguments())
    assert type(state) is type(model.state)
    assert stored(state) == stored(model.state)
    _, expected = model.under("float32")(*model.arguments())
    assert_near(state, expected)
    _, again = wrap(model.under(policy))(model.params, state, *model.inputs)
    counts = [int(x) for x in jax.tree.leaves(again) if x.dtype == "int32"]
    assert counts == [2]


@EVERY_FRAMEWORK
@HALF
def test_state_that_is_the_carry_of_a_scan_keeps_its_dtype(framework: str, policy: str, half: str) -> None:
    model = build(framework, "Stateful", X)
    run = model.under(policy)

    def steps(state: Any) -> Any:
        return jax.lax.scan(lambda state, x: run(model.params, state, x)[::-1], state, jnp.stack([X, X]))[0]

    mean = max(jax.tree.leaves(jax.jit(steps)(model.state)), key=jnp.size)
    assert_near(mean, max(jax.tree.leaves(jax.jit(run)(model.params, model.state, X)[1]), key=jnp.size))
    assert floats(jax.eval_shape(steps, model.state)) == {"float32"}


@EVERY_FRAMEWORK
@HALF
def test_dropout_masks_do_not_depend_on_the_policy(framework: str, policy: str, half: str) -> None:
    model = build(framework, "Dropped", X)
    stays = np.asarray(model.output("float32") != 0)
    assert 0.3 < stays.mean() < 0.7
    np.testing.assert_array_equal(model.output(policy) != 0, stays)


# --------------------------------------------------------------------------------------- gradients


@EVERY_FRAMEWORK
@HALF
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_gradients_are_float32_and_near_those_of_float32(
    framework: str, policy: str, half: str, inside: bool
) -> None:
    model = build(framework, "Blocks", X, how="scan of remat")
    policies = {r".*attn.*": "p=f32,c=f32,o=bf16", "*": policy}
    grads = jax.jit(model.grads(policies, inside=inside))(*model.arguments())
    assert dtypes_of(grads) == {"float32"}
    assert_near(grads, jax.jit(model.grads("float32"))(*model.arguments()), 0.05)


@EVERY_FRAMEWORK
@HALF
def test_a_weight_used_1000_times_in_scan_has_gradient_1000(framework: str, policy: str, half: str) -> None:
    model = build(framework, "Reuse", jnp.ones((1000, 1, 2)))
    run = model.call(policy)
    grad_fn = jax.jit(mpjax.value_and_grad(lambda *args: run(*args)[0], policy))
    (grads,) = jax.tree.leaves(grad_fn(NO_SCALE, *model.arguments())[1])
    assert grads.ravel().tolist() == [1000.0, 1000.0]


@EVERY_FRAMEWORK
@HALF
def test_a_tied_embedding_adds_up_both_gradients_in_float32(framework: str, policy: str, half: str) -> None:
    model = build(framework, "Tied", jnp.zeros(1000, jnp.int32))
    run = model.call(policy)
    grad_fn = jax.jit(mpjax.value_and_grad(lambda *args: jnp.sum(run(*args)[0]), policy))
    (grads,) = jax.tree.leaves(grad_fn(NO_SCALE, *model.arguments())[1])
    # 1000 lookups times 4 rows of the head, and 1000 of the head itself; bfloat16 has no 5000.
    assert grads[:, 0].tolist() == [5000.0, 1000.0, 1000.0, 1000.0]


@EVERY_FRAMEWORK
@HALF
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_a_recurrent_cell_returns_its_carry_in_the_dtype_of_its_argument(
    framework: str, cell: str, policy: str, half: str
) -> None:
    model = build(framework, "Recurrent", X, cell=cell)
    args = model.arguments()
    for inside in (True, False):
        assert operands(model.grads(policy, inside=inside), *args) == {half}
    found, expected = model.output(policy), model.output("float32")
    assert dtypes_of(found) == {"float32"}
    assert_near(found, expected, 0.05)


@EVERY_FRAMEWORK
def test_vmap_over_models_with_stacked_parameters_follows_the_policy(framework: str) -> None:
    model = build(framework, "Pair", X)
    policies = {model.path("last"): "p=f32,c=f32,o=f32", "*": BF16}
    run = model.under(policies)
    many = jax.vmap(lambda params, x: run(params, model.state, x)[0])
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), model.params)
    xs = jnp.stack([X, X])
    assert set(operands(many, stacked, xs)) == {"float32", "bfloat16"}
    out = jax.jit(many)(stacked, xs)
    assert out.dtype == "float32"
    assert_near(out[0], model.output(policies), 0.01)
