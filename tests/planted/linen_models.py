"""Models in flax.linen whose dtypes are hand-written."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

HALF = jnp.float16
B16 = jnp.bfloat16


class Scaled(nn.Module):
    """The scale is a numpy number, which JAX does not take for a weak one."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(64, dtype=B16, name="first")(x)
        x = x * np.sqrt(64)  # planted: numpy scalar
        x = Inner(name="inner")(x)
        return nn.Dense(8, dtype=B16, name="last")(x)


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        w = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], 16))
        return x @ w.astype(B16)  # planted: upcast matmul


class HandNorm(nn.Module):
    """Layer norm written out in float16."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        var = (centred * centred).mean(-1, keepdims=True)  # planted: variance
        return centred / jnp.sqrt(var + 1e-8)  # planted: epsilon


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(32, dtype=HALF, name="dense")(x)
        return HandNorm(name="norm")(x)


class Attention(nn.Module):
    """Masks with a number that float16 does not have, by adding and by choosing."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (nn.Dense(16, dtype=HALF, name=name)(x) for name in "qkv")
        scores = jnp.einsum("bqd,bkd->bqk", q, k)
        position = jnp.arange(x.shape[1])
        scores = jnp.where(position[:, None] >= position[None], scores, -1e9)  # planted: mask by where
        weights = jax.nn.softmax(scores)  # planted: softmax
        return jnp.einsum("bqk,bkd->bqd", weights, v)


class Masked(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Attention(name="attention")(x)


class Recurrent(nn.Module):
    """A running total of a thousand bfloat16 numbers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def body(total: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
            return total + step, None  # planted: scan carry

        total, _ = jax.lax.scan(body, jnp.zeros(x.shape[1:], B16), x)
        return total


class Counting(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Recurrent(name="total")(x)


class TiedLanguageModel(nn.Module):
    """The embedding is cast once for all its lookups, as Flax's dtype argument has it."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(100, 16, dtype=B16, name="embed")
        x = embed(tokens)  # planted: tied embedding
        x = nn.Dense(16, dtype=B16, use_bias=False, name="dense")(x)
        return embed.attend(x)


class Pooled(nn.Module):
    """Cast up and down again in one place, rounded for nothing in another."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(16, name="dense")(x)
        x = x.astype(B16).astype(jnp.float32)  # planted: round trip
        return nn.Dense(4, name="head")(x)


def loss_of(model: nn.Module) -> Any:
    """The loss of a model as a function of its variables and an input."""

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.apply(variables, x).astype(jnp.float32))

    return loss
