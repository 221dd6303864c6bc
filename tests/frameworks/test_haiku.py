"""What only Haiku has: functions that are transformed, lifting, name scopes, and its own policies."""

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frameworks import BF16, F16, X, assert_near, dtypes_of, operands
from promotion import standard_promotion

import mpjax
from mpjax import autocast

KEY = jax.random.key(0)


def transformed(fn: Callable[..., Any]) -> tuple[Any, Any, Any]:
    """What `hk.transform_with_state` makes of it, with parameters and state."""
    model = hk.transform_with_state(fn)
    with standard_promotion():  # Haiku's own layers mix dtypes
        return model, *jax.jit(model.init)(KEY, X)


def under(fn: Callable[..., Any], policies: Any) -> tuple[Any, Any, Any]:
    """The function `(params, x) -> output` under policies, its parameters and state."""
    model, params, state = transformed(fn)
    run = autocast(model.apply, policies, cast_output=False)
    return lambda params, x: run(params, state, KEY, x)[0], params, state


def matmuls(run: Any, params: Any) -> dict[str, set[str]]:
    return {row.module: {row.operands} for row in mpjax.audit(run, params, X).matmuls}


# ------------------------------------------------------------------------------------------------ paths


def test_modules_made_in_init_have_haiku_s_own_paths_and_explain_knows_their_parameters() -> None:
    model = hk.transform(lambda x: hk.nets.MLP([4, 3])(x))
    table = mpjax.explain(model, {"mlp/~/linear_1": F16, "*": BF16}, X)
    assert [(row.path, row.cls, row.pattern, row.parameters) for row in table.rows] == [
        ("mlp", "MLP", "*", 0),
        ("mlp/~/linear_0", "Linear", "*", 36),
        ("mlp/~/linear_1", "Linear", "mlp/~/linear_1", 15),
    ]


def test_several_top_level_modules_have_policies_of_their_own() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return hk.Linear(3, name="head")(jax.nn.relu(hk.Linear(8, name="body")(x)))

    run, params, _ = under(fn, {"head": "p=f32,c=f32,o=f32", "*": BF16})
    assert matmuls(run, params) == {"body": {"bfloat16"}, "head": {"float32"}}
    assert run(params, X).dtype == "float32"


def test_layers_of_a_sequential_are_modules_of_their_own() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return hk.Sequential([hk.Linear(8, name="a"), jax.nn.relu, hk.Linear(3, name="b")], name="all")(x)

    run, params, _ = under(fn, {"b": F16, "*": BF16})
    assert {path: d for path, d in matmuls(run, params).items() if path} == {
        "a": {"bfloat16"},
        "b": {"float16"},
    }


def test_name_scopes_are_part_of_the_path() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with hk.name_scope("scope"):
            return hk.Linear(3, name="linear")(x)

    run, params, _ = under(fn, {"scope/linear": F16, "*": BF16})
    assert list(params) == ["scope/linear"]
    assert operands(run, params, X) == {"float16"}


# ------------------------------------------------------------------------- transforms within modules


class Stack(hk.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return hk.layer_stack(3, name="layers")(lambda x: hk.Linear(8, name="linear")(x).astype(x.dtype))(x)


class Lifts(hk.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        inner = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(8, name="linear")(x)))
        params = hk.lift(inner.init, name="layers")(hk.maybe_next_rng_key(), x)
        return jax.vmap(inner.apply, (None, 0))(params, x)


@pytest.mark.parametrize("cls", [Stack, Lifts])
def test_modules_of_a_lifted_transform_have_the_path_of_their_parameters_and_inherit(cls: type) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return cls(name="model")(x)

    path = "model/layers/linear"
    for policies in ({path: F16, "*": BF16}, {"model": F16, "*": BF16}):
        run, params, _ = under(fn, policies)
        assert list(params) == [path]
        assert matmuls(run, params) == {path: {"float16"}}
        table = mpjax.explain(hk.transform(fn), policies, X)
        assert table[path].parameters == sum(x.size for x in jax.tree.leaves(params))
    init = autocast(hk.transform(fn).init, {path: "p=bf16", "*": BF16}, cast_output=False)
    assert dtypes_of(jax.eval_shape(init, KEY, X)) == {"bfloat16"}


def test_modules_may_be_called_in_scan_remat_vmap_cond_and_while() -> None:
    def fn(x: jax.Array) -> jax.Array:
        linear = hk.Linear(8, name="linear")
        same = lambda x: linear(x).astype(x.dtype)
        x = hk.remat(same)(x)
        x = hk.scan(lambda c, _: (same(c), None), x, None, length=2)[0]
        x = hk.vmap(same, split_rng=False)(x)
        x = hk.cond(x[0, 0, 0] > 0, same, same, x)
        return hk.fori_loop(0, 2, lambda i, x: same(x), x)

    run, params, _ = under(fn, {"linear": BF16, "*": F16})
    assert operands(run, params, X) == {"bfloat16"}
    assert list(matmuls(run, params)) == ["linear"]
    plain, *_ = under(fn, "float32")
    assert_near(run(params, X), plain(params, X), 0.05)


def test_a_method_and_a_transparent_lift_belong_to_their_module() -> None:
    class Two(hk.Module):
        def encode(self, x: jax.Array) -> jax.Array:
            return hk.Linear(4, name="linear")(x)

    run, params, _ = under(lambda x: Two(name="two").encode(x), {"two/~encode/linear": F16, "*": BF16})
    assert list(params) == ["two/~encode/linear"]
    assert operands(run, params, X) == {"float16"}


@pytest.mark.parametrize("core", [hk.LSTM, hk.GRU, hk.VanillaRNN])
@pytest.mark.parametrize("how", ["dynamic", "static", "scan"])
def test_recurrent_cores_unroll_and_take_half_operands(core: Any, how: str) -> None:
    def fn(x: jax.Array) -> Any:
        cell, xs = core(6, name="cell"), jnp.swapaxes(x, 0, 1)
        start = cell.initial_state(x.shape[0])
        if how == "scan":
            step = lambda state, x: cell(x, state)[::-1]
            return hk.scan(step, start, xs)[1]
        return {"dynamic": hk.dynamic_unroll, "static": hk.static_unroll}[how](cell, xs, start)[0]

    run, params, _ = under(fn, BF16)
    assert operands(run, params, X) == {"bfloat16"}
    assert run(params, X).dtype == "float32"


# --------------------------------------------------------------------------------- parameters and state


@pytest.mark.parametrize("policy", [BF16, F16, "bf16"])
def test_init_under_a_policy_gives_the_parameters_and_the_state_of_init_without_one(policy: str) -> None:
    def fn(x: jax.Array) -> jax.Array:
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(8)(x), is_training=True)
        return hk.Linear(3)(x)

    model, params, _ = transformed(fn)
    made, state = jax.jit(autocast(model.init, policy, cast_output=False))(KEY, X)
    dtype = mpjax.get_policy(policy).param_dtype
    assert dtypes_of(made) == {dtype.name}
    assert_near(
        made, params, 2**-8 if dtype.itemsize == 2 else 1e-6
    )  # XLA may fuse the two programs differently
    assert dtypes_of(state) == {"float32", "int32"}


@pytest.mark.parametrize("make", [lambda: hk.LayerNorm(-1, True, True), lambda: hk.RMSNorm(-1)])
def test_norms_of_large_half_values_are_right(make: Callable[[], Any]) -> None:
    x = jnp.array([[0, 300, -300, 0]], jnp.float16)
    model = hk.without_apply_rng(hk.transform(lambda x: make()(x)))
    out = autocast(model.apply, "f16")(model.init(KEY, x.astype(jnp.float32)), x)
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out[0], [0, 1.414, -1.414, 0], atol=1e-3)


def test_a_cache_that_is_asked_for_in_another_dtype_than_the_compute_dtype_has_it() -> None:
    class Cache(hk.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            cache = hk.get_state("cache", x.shape, jnp.bfloat16, init=jnp.zeros)
            hk.set_state("cache", cache + x)
            return x

    model = hk.transform_with_state(lambda x: Cache()(x))
    _, state = autocast(model.init, F16, cast_output=False)(KEY, X)
    assert dtypes_of(state) == {"bfloat16"}
    _, state = autocast(model.apply, F16, cast_output=False)({}, state, KEY, X)
    assert dtypes_of(state) == {"bfloat16"}


def test_a_policy_of_haiku_s_own_may_be_set_beside() -> None:
    class Own(hk.Linear):
        pass

    ours = mpjax.get_policy("p=f32,c=f16,o=f32")
    hk.mixed_precision.set_policy(Own, ours)
    try:
        run, params, _ = under(lambda x: hk.Linear(3, name="b")(Own(8, name="a")(x)), BF16)
        assert operands(run, params, X) == {"bfloat16"}
        assert operands(
            lambda p, x: transformed(lambda x: Own(8, name="a")(x))[0].apply(p, {}, KEY, x)[0], params, X
        ) == {"float16"}
    finally:
        hk.mixed_precision.clear_policy(Own)


def test_a_function_with_parameters_outside_of_modules_runs() -> None:
    def fn(x: jax.Array) -> jax.Array:
        w = hk.get_parameter("w", (8, 8), init=hk.initializers.RandomNormal())
        return hk.Linear(3, name="linear")(x @ w)

    run, params, _ = under(fn, {"linear": F16, "*": BF16})
    assert matmuls(run, params) == {"": {"bfloat16"}, "linear": {"float16"}}
    assert operands(run, params, X) == {"bfloat16", "float16"}


def test_apply_policy_names_the_way_for_haiku() -> None:
    with pytest.raises(
        TypeError, match=r"model of haiku, whose modules follow the policy of the function that calls"
    ):
        mpjax.apply_policy(hk.transform(lambda x: hk.Linear(3)(x)), BF16)
