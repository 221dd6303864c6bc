"""Strict promotion, which the whole suite runs under, does not hinder a policy, which mixes dtypes on purpose."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax

BF16 = "p=f32,c=bf16,o=f32"
X = jax.random.normal(jax.random.key(1), (2, 8))


def linen_layer() -> Callable[[jax.Array], jax.Array]:
    layer = nn.Dense(4, bias_init=nn.initializers.ones)
    variables = layer.init(jax.random.key(0), X)
    return lambda x: layer.apply(variables, x)


def nnx_layer() -> Callable[[jax.Array], jax.Array]:
    return nnx.Linear(8, 4, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(0))


LAYERS = pytest.mark.parametrize("make", [linen_layer, nnx_layer])


@LAYERS
def test_a_layer_with_a_bias_runs_under_a_bfloat16_policy(make: Callable[[], Callable]) -> None:
    layer = make()
    run = jax.jit(mpjax.autocast(lambda x: layer(x), BF16))
    for x in (X, X.astype(jnp.bfloat16)):
        out = run(x)
        assert out.dtype == np.float32
        np.testing.assert_allclose(out, layer(X), atol=0.02)


@LAYERS
def test_without_a_policy_strict_promotion_refuses_a_layer_that_mixes_dtypes(
    make: Callable[[], Callable],
) -> None:
    with pytest.raises(jax.dtypes.TypePromotionError):
        make()(X.astype(jnp.bfloat16))


def test_an_nnx_model_with_a_policy_of_its_own_runs_too() -> None:
    model = mpjax.nnx.apply_policy(nnx.Linear(8, 4, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(0)), BF16)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, X), nnx_layer()(X), atol=0.02)


def test_gradients_of_a_loss_that_mixes_dtypes_are_taken_under_a_policy() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(x @ w - jnp.ones((2, 4)))

    value, grads, finite = mpjax.value_and_grad(loss, BF16)(mpjax.NoOpLossScale(), jnp.ones((8, 4)), X)
    assert (value.dtype, grads.dtype, bool(finite)) == ("float32", "float32", True)


def test_strict_promotion_is_in_force_again_behind_a_policy() -> None:
    mpjax.autocast(lambda x: x.astype(jnp.bfloat16) + x, BF16)(X)
    with pytest.raises(jax.dtypes.TypePromotionError):
        X.astype(jnp.bfloat16) + X
