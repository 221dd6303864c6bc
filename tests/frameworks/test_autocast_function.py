"""`autocast` as a function of its inputs alone: what was called before does not show."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from mpjax import autocast

BF16 = "p=f32,c=bf16,o=f32"
X = jnp.ones((2, 4))
MODEL = nn.Dense(4)
PARAMS = MODEL.init(jax.random.key(0), X)


def half_or_model(x: jax.Array, use_model: bool) -> jax.Array:
    return MODEL.apply(PARAMS, x) if use_model else x.astype(jnp.bfloat16)


@pytest.mark.parametrize("before", [[], [True], [False], [True, False, True]])
def test_the_dtype_of_a_result_does_not_depend_on_earlier_calls(before: list[bool]) -> None:
    run = autocast(half_or_model, BF16)
    for use_model in before:
        run(X, use_model)
    assert [run(X, use_model).dtype for use_model in (False, True)] == ["float32", "float32"]


def test_results_are_cast_to_the_output_dtype_whether_modules_ran_or_not() -> None:
    run = autocast(half_or_model, "p=f32,c=f32,o=bf16")
    assert [run(X, use_model).dtype for use_model in (False, True)] == ["bfloat16", "bfloat16"]


def test_a_function_that_returns_parameters_says_cast_output_false() -> None:
    policy = "p=f32,c=bf16,o=bf16"
    cast = autocast(MODEL.init, policy)(jax.random.key(0), X)
    stored = autocast(MODEL.init, policy, cast_output=False)(jax.random.key(0), X)
    assert {x.dtype.name for x in jax.tree.leaves(cast)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(stored)} == {"float32"}


def test_scalars_integers_and_keys_are_returned_unchanged() -> None:
    def fn(x: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.sum(x), jnp.arange(3), jax.random.key(0), x

    total, count, key, x = autocast(fn, "p=f32,c=bf16,o=bf16")(X)
    assert (total.dtype, count.dtype, x.dtype) == ("float32", "int32", "bfloat16")
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4, name="dense")(x)


class Pair(nn.Module):
    def setup(self) -> None:
        self.encoder = nn.jit(Encoder)()
        self.decoder = Encoder()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decoder(self.encoder(x))

    def encode(self, x: jax.Array) -> jax.Array:
        return self.encoder(x)


@pytest.mark.parametrize("pattern", [Encoder, nn.Dense, ".*dense", "encoder/dense"])
def test_a_pattern_for_modules_that_an_inner_jit_hides_the_second_time_is_no_error(pattern: object) -> None:
    model = Pair()
    params = model.init(jax.random.key(0), X)
    run = autocast(model.apply, {pattern: "f32", "*": BF16})
    assert [run(params, X).dtype for _ in range(3)] == ["float32"] * 3


def test_a_pattern_that_governs_no_module_is_an_error_at_every_first_call() -> None:
    model = Pair()
    params = model.init(jax.random.key(0), X)
    for _ in range(2):
        run = autocast(model.apply, {"encodre": "f32", "*": BF16})
        jax.clear_caches()
        with pytest.raises(ValueError, match=r"'encodre' governs no module.*closest paths are 'encoder'"):
            run(params, X)


def test_a_call_of_one_model_does_not_hide_that_a_pattern_governs_none_of_another() -> None:
    run = autocast(lambda model, params: model.apply(params, X), {"dense": "f32", "*": BF16})
    run(Encoder(), Encoder().init(jax.random.key(0), X))
    with pytest.raises(ValueError, match="'dense' governs no module"):
        run(MODEL, PARAMS)


def test_an_outer_function_is_not_credited_with_the_modules_of_an_inner_one() -> None:
    inner = autocast(lambda x: Encoder().apply(ENCODER, x), {"dense": "f32", "*": BF16})
    outer = autocast(lambda x: inner(x) + MODEL.apply(PARAMS, x), {"nowhere": "f32", "*": BF16})
    with pytest.raises(ValueError, match="'nowhere' governs no module"):
        outer(X)


ENCODER = Encoder().init(jax.random.key(0), X)

NARROW = pytest.mark.parametrize(
    ("policy", "field", "limit"),
    [
        ("p=f32,c=f8_e4m3fn,o=f32", "compute_dtype float8_e4m3fn", "448"),
        ("p=f32,c=bf16,o=f8_e5m2", "output_dtype float8_e5m2", "57344"),
        ("p=f4_e2m1fn,c=bf16,o=f32", "param_dtype float4_e2m1fn", "6"),
    ],
)


@NARROW
def test_a_dtype_that_needs_a_scale_is_refused_with_the_way_out(policy: str, field: str, limit: str) -> None:
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    for use in (
        lambda: autocast(lambda x: x, policy),
        lambda: autocast(lambda x: x, {"head": policy, "*": BF16}),
        lambda: mpjax.apply_policy(model, policy),
        lambda: mpjax.value_and_grad(lambda x: x, policy),
    ):
        with pytest.raises(ValueError) as error:
            use()
        message = str(error.value)
        assert f"has {field}, to which mpjax does not cast without a scale: it ends at {limit}" in message
        assert "Use bfloat16 or float16 there, as in 'p=f32,c=bf16,o=f32'." in message


def test_a_function_is_no_model_to_apply_a_policy_to() -> None:
    with pytest.raises(
        TypeError, match=r"expects a module of flax.nnx or Equinox, got function.*autocast\(fn"
    ):
        mpjax.apply_policy(lambda x: x, BF16)


def test_a_linen_model_is_told_how_it_follows_a_policy() -> None:
    with pytest.raises(
        TypeError, match=r"Dense is a model of flax.linen, whose modules follow.*mpjax.autocast"
    ):
        mpjax.apply_policy(MODEL, BF16)
