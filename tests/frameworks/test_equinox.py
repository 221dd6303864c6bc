"""What only Equinox has: filtered transformations, state objects, modules that are pytrees, fields of all kinds."""

import abc
import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frameworks import BF16, F16, X, assert_near, dtypes_of, normal, operands
from in_equinox import Blocks, Methods, Normalised, Stateful, each

import mpjax
from mpjax import apply_policy, autocast

KEY = jax.random.key(0)
HEAD_FLOAT32 = {"head": "p=f32,c=f32,o=f32", "*": BF16}


def call(model: Any, *args: Any) -> Any:
    return model(*args)


def array_operands(fn: Callable[..., Any], model: Any, *args: Any) -> set[str]:
    """The dtypes that matmuls of `fn(model, *args)` take."""
    arrays, static = eqx.partition(model, eqx.is_array)
    return operands(
        lambda arrays, *args: eqx.filter(fn(eqx.combine(arrays, static), *args), eqx.is_array), arrays, *args
    )


@pytest.fixture
def model() -> Any:
    return apply_policy(Blocks(KEY), HEAD_FLOAT32)


# -------------------------------------------------------------------------------- a model is a pytree


def test_the_original_model_is_unchanged_and_the_copy_is_of_the_same_classes() -> None:
    plain = Blocks(KEY)
    copied = apply_policy(plain, "bf16")
    assert isinstance(copied, Blocks)
    assert isinstance(copied.embed, eqx.nn.Linear)
    assert (type(copied).__name__, type(plain), type(plain.embed)) == ("Blocks", Blocks, eqx.nn.Linear)
    assert (dtypes_of(eqx.filter(plain, eqx.is_array)), dtypes_of(eqx.filter(copied, eqx.is_array))) == (
        {"float32"},
        {"bfloat16"},
    )


def test_a_model_under_policies_gets_the_new_ones(model: Any) -> None:
    again = apply_policy(model, F16)
    assert array_operands(call, again, X) == {"float16"}
    assert type(again).__mro__[1] is Blocks


def test_the_policy_is_carried_through_partition_combine_and_tree_at(model: Any) -> None:
    combined = eqx.combine(*eqx.partition(model, eqx.is_array))
    assert jax.tree.structure(combined) == jax.tree.structure(model)
    replaced = eqx.tree_at(lambda m: m.embed.weight, model, jnp.zeros((8, 8)))
    for other in (combined, replaced, jax.tree.map(lambda x: x, model)):
        assert array_operands(call, other, X) == {"float32", "bfloat16"}


def test_models_under_equal_policies_are_of_equal_structure_so_that_jit_does_not_retrace(model: Any) -> None:
    again = apply_policy(Blocks(KEY), HEAD_FLOAT32)
    traces: list[int] = []

    @eqx.filter_jit
    def run(model: Any, x: jax.Array) -> jax.Array:
        traces.append(1)
        return model(x)

    assert run(model, X).tolist() == run(again, X).tolist()
    assert len(traces) == 1
    run(apply_policy(Blocks(KEY), BF16), X)
    run(Blocks(KEY), X)
    assert len(traces) == 3


def test_filter_jit_filter_grad_and_filter_vmap_follow_the_policy(model: Any) -> None:
    grads = eqx.filter_jit(eqx.filter_grad(lambda m, x: jnp.sum(m(x) ** 2)))
    assert array_operands(grads, model, X) == {"float32", "bfloat16"}
    assert dtypes_of(grads(model, X)) == {"float32"}
    mapped = eqx.filter_vmap(call, in_axes=(None, 0))
    assert array_operands(mapped, model, X[:, None]) == {"float32", "bfloat16"}


def test_stacked_layers_made_by_filter_vmap_store_their_param_dtype_and_scan() -> None:
    model = apply_policy(Blocks(KEY, how="scan"), {"blocks": "p=bf16,c=bf16,o=bf16", "*": BF16})
    assert model.blocks.mlp.weight.dtype == jnp.bfloat16
    assert model.blocks.mlp.weight.shape == (2, 8, 8)
    assert (model.head.weight.dtype, eqx.filter_jit(model)(X).dtype) == ("float32", "float32")


def test_a_bound_method_is_a_pytree_that_carries_the_policy(model: Any) -> None:
    method = apply_policy(Methods(KEY), BF16).encode
    assert dtypes_of(eqx.filter(method, eqx.is_array)) == {"float32"}
    assert array_operands(lambda f, x: f(x), method, X) == {"bfloat16"}
    assert (
        autocast(lambda f, x: f(x), {".*": BF16, "*": BF16}, cast_output=False)(method, X).dtype == "float32"
    )


def test_abstract_models_get_their_param_dtype() -> None:
    abstract = eqx.filter_eval_shape(Blocks, KEY)
    governed = apply_policy(abstract, "bf16")
    assert governed.embed.weight.dtype == jnp.bfloat16
    assert eqx.filter_eval_shape(call, governed, X).dtype == jnp.bfloat16


def test_a_serialised_model_is_read_into_one_under_policies(model: Any, tmp_path: Any) -> None:
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", model)
    like = apply_policy(Blocks(jax.random.key(1)), HEAD_FLOAT32)
    again = eqx.tree_deserialise_leaves(tmp_path / "model.eqx", like)
    assert again(X).tolist() == model(X).tolist()
    assert pickle.loads(pickle.dumps(model))(X).tolist() == model(X).tolist()


def test_the_model_prints(model: Any) -> None:
    assert "Blocks(" in repr(model)
    assert "Linear(" in str(model)


# -------------------------------------------------------------------------------------- modules of all kinds


class Abstract(eqx.Module):
    width: eqx.AbstractVar[int]

    @abc.abstractmethod
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies it."""


class Final(Abstract):
    weight: jax.Array = eqx.field(converter=jnp.asarray)
    width: int = eqx.field(static=True, default=8)
    activation: Callable[..., Any] = jax.nn.relu

    def __post_init__(self) -> None:
        self.weight = self.weight * 1.0

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(x @ self.weight)

    @property
    def size(self) -> int:
        return self.weight.size

    @staticmethod
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    @classmethod
    def make(cls) -> "Final":
        return cls(np.eye(8, dtype=np.float32))


def test_abstract_classes_converters_static_fields_and_post_init_are_respected() -> None:
    model = apply_policy(Final.make(), "bf16")
    assert (model.weight.dtype, model.width, model.size, model.double(2)) == ("bfloat16", 8, 64, 4)
    assert model.activation is jax.nn.relu
    assert array_operands(call, model, X) == {"bfloat16"}
    assert isinstance(model, Abstract)
    assert array_operands(call, apply_policy(Final.make(), {Abstract: F16, "*": BF16}), X) == {"float16"}


class Scale(eqx.Module):
    """Holds data, and cannot be called."""

    factor: jax.Array


class Holder(eqx.Module):
    scale: Scale
    layers: dict[str, Any]

    def __call__(self, x: jax.Array) -> jax.Array:
        return each(self.layers["only"][0], x * self.scale.factor)


def test_modules_without_call_and_modules_in_containers_have_paths() -> None:
    model = Holder(Scale(jnp.ones(8)), {"only": (eqx.nn.Linear(8, 3, key=KEY),)})
    policies = {
        "layers/only/0": "p=bf16,c=bf16,o=bf16",
        "scale": "p=f32,c=f32,o=f32",
        "*": "p=f16,c=f16,o=f32",
    }
    governed = apply_policy(model, policies)
    assert (governed.scale.factor.dtype, governed.layers["only"][0].weight.dtype) == ("float32", "bfloat16")
    assert [row.path for row in mpjax.explain(model, policies).rows] == ["", "layers/only/0", "scale"]
    # Data among the arguments of a function under a map is no model that would have to carry it.
    assert (
        autocast(lambda s, x: x * s.factor[None, None], {".*": BF16, "*": BF16})(Scale(jnp.ones(8)), X).dtype
        == "float32"
    )


def test_sequential_lambda_and_mlp_follow_the_policy() -> None:
    layers = [eqx.nn.Linear(8, 8, key=KEY), eqx.nn.Lambda(jax.nn.relu), eqx.nn.MLP(8, 4, 8, 2, key=KEY)]
    model = apply_policy(eqx.nn.Sequential(layers), {"layers/2/layers/0": F16, "*": BF16})
    assert array_operands(lambda m, x: each(m, x), model, X) == {"float16", "bfloat16"}
    assert each(model, X).dtype == "float32"


@pytest.mark.parametrize(
    "make",
    [
        lambda: eqx.nn.MultiheadAttention(2, 8, key=KEY),
        lambda: eqx.nn.Conv1d(4, 3, 3, key=KEY),
        lambda: eqx.nn.ConvTranspose1d(4, 3, 3, key=KEY),
        lambda: eqx.nn.Sequential([eqx.nn.GroupNorm(2, 4), eqx.nn.Conv1d(4, 3, 1, key=KEY)]),
    ],
    ids=["attention", "convolution", "transposed", "group norm"],
)
def test_layers_of_equinox_follow_the_policy_without_a_dtype(make: Callable[[], Any]) -> None:
    model = apply_policy(make(), BF16)

    def run(model: Any, x: jax.Array) -> jax.Array:
        return model(x, x, x) if isinstance(model, eqx.nn.MultiheadAttention) else model(x)

    grads = eqx.filter_grad(lambda m, x: jnp.sum(jnp.sin(run(m, x))))
    assert array_operands(run, model, X[0]) == array_operands(grads, model, X[0]) == {"bfloat16"}
    assert (run(model, X[0]).dtype, dtypes_of(grads(model, X[0]))) == ("float32", {"float32"})


def test_a_shared_node_stays_tied() -> None:
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self) -> None:
            pair = (eqx.nn.Embedding(4, 8, key=KEY), eqx.nn.Linear(8, 4, use_bias=False, key=KEY))
            self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

        def __call__(self, token: jax.Array) -> jax.Array:
            embed, head = self.shared()
            return head(embed(token))

    model = apply_policy(Tied(), BF16)
    assert len(jax.tree.leaves(eqx.filter(model, eqx.is_array))) == 1
    assert array_operands(call, model, jnp.array(1)) == {"bfloat16"}
    grads = eqx.filter_grad(lambda m, t: jnp.sum(m(t)))(model, jnp.array(1))
    assert dtypes_of(grads) == {"float32"}


# ---------------------------------------------------------------------------------------------- state


def test_inference_mode_of_a_model_under_policies() -> None:
    model, state = eqx.nn.make_with_state(Normalised)(KEY)
    governed = apply_policy(model, F16)
    x = jnp.array([[300.0], [-300.0]], jnp.float16)
    _, state = governed(x, state)
    assert type(state) is eqx.nn.State
    inference = eqx.nn.inference_mode(governed)
    assert type(inference) is type(governed)
    out, after = inference(x, state)
    assert out.dtype == jnp.float32
    assert np.isfinite(np.asarray(out)).all()
    assert dtypes_of(after) == {"float32", "int32"}


def test_state_that_has_been_replaced_may_not_be_used_again_under_a_policy_either() -> None:
    model, state = eqx.nn.make_with_state(Stateful)(KEY)
    governed = apply_policy(model, BF16)
    _, new = governed(X, state)
    with pytest.raises(ValueError, match="Attempted to use old state"):
        governed(X, state)
    governed(X, new)


def test_a_state_of_another_shape_is_still_refused() -> None:
    class Grows(eqx.Module):
        index: eqx.nn.StateIndex

        def __init__(self) -> None:
            self.index = eqx.nn.StateIndex(jnp.zeros(3))

        def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
            return x, state.set(self.index, jnp.zeros(4))

    model, state = eqx.nn.make_with_state(Grows)()
    with pytest.raises(ValueError, match="different structures/shapes/dtypes"):
        apply_policy(model, BF16)(X, state)


def test_a_part_of_the_state_is_updated_in_its_stored_dtype() -> None:
    class Parts(eqx.Module):
        layers: list[Stateful]

        def __init__(self, key: jax.Array) -> None:
            self.layers = [Stateful(key), Stateful(key)]

        def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
            for layer in self.layers:
                x, part = layer(x, state.substate(layer))
                state = state.update(part)
            return x, state

    model, state = eqx.nn.make_with_state(Parts)(KEY)
    expected = model(X, jax.tree.map(lambda x: x, state))[1]
    out, state = eqx.filter_jit(apply_policy(model, BF16))(X, state)
    assert (type(state), dtypes_of(state), out.dtype) == (eqx.nn.State, {"float32", "int32"}, "float32")
    assert_near(state, expected)


# -------------------------------------------------------------------------------------------- errors


def test_a_map_with_patterns_around_a_plain_model_is_refused_rather_than_ignored() -> None:
    with pytest.raises(
        ValueError,
        match=r"Equinox module Blocks does not carry them\. Pass mpjax\.apply_policy\(model, policies\)",
    ):
        autocast(call, HEAD_FLOAT32)(Blocks(KEY), X)


def test_a_plain_model_follows_the_policy_of_the_function_that_calls_it() -> None:
    assert array_operands(autocast(call, BF16), Blocks(KEY), normal(2, 4, 8)) == {"bfloat16"}
