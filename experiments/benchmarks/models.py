"""The models of the benchmarks, in Flax, and the same in plain JAX with hand-written dtypes.

With `dtype=None` a Flax model names no dtype at all: that is what mpjax and jmp get. With a dtype it is what
Flax's own documentation recommends: the dtype on every layer, the loss in float32.
"""

import functools
from typing import TypeAlias

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

Params: TypeAlias = chex.ArrayTree


class MLP(nn.Module):
    """`layers` square matrices with a relu after each."""

    layers: int
    width: int
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.layers):
            x = nn.relu(nn.Dense(self.width, use_bias=False, dtype=self.dtype)(x))
        return x


def mlp_by_hand(params: Params, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`MLP` in plain JAX. A matrix is cast where it is used."""
    x = x.astype(dtype)
    for i in range(len(params["params"])):
        x = jax.nn.relu(x @ params["params"][f"Dense_{i}"]["kernel"].astype(dtype))
    return x


class Block(nn.Module):
    """A transformer block, before `nn.scan`: carry in, carry out."""

    heads: int
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: jax.Array, unused: None = None) -> tuple[jax.Array, None]:
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        h = nn.LayerNorm(use_bias=False, dtype=self.dtype, name="attn_norm")(x)
        q, k, v = (_heads(dense(width, name=name)(h), self.heads) for name in ("query", "key", "value"))
        x = x + dense(width, name="out")(_causal_attention(q, k, v).reshape(x.shape))
        h = nn.LayerNorm(use_bias=False, dtype=self.dtype, name="mlp_norm")(x)
        h = nn.gelu(dense(4 * width, name="mlp_in")(h))
        return x + dense(width, name="mlp_out")(h), None


class GPT(nn.Module):
    """A decoder-only transformer with a tied head."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    scanned: bool = False
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        small = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocabulary, self.width, embedding_init=small, dtype=self.dtype, name="embed")
        position = self.param("position", small, (tokens.shape[-1], self.width))
        x = embed(tokens)
        x = x + position[None].astype(x.dtype)
        if self.scanned:
            blocks = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
            )
            x, _ = blocks(self.heads, self.dtype, name="blocks")(x, None)
        else:
            for i in range(self.layers):
                x, _ = Block(self.heads, self.dtype, name=f"block_{i}")(x)
        return embed.attend(nn.LayerNorm(use_bias=False, dtype=self.dtype, name="norm")(x))


def gpt_by_hand(params: Params, tokens: jax.Array, heads: int, dtype: DTypeLike) -> jax.Array:
    """`GPT` (not scanned) in plain JAX: matmuls and activations in `dtype`, norms and softmax in float32."""
    p = params["params"]
    table = p["embed"]["embedding"]
    x = table.astype(dtype)[tokens] + p["position"][None].astype(dtype)
    for i in range(sum(name.startswith("block_") for name in p)):
        b = p[f"block_{i}"]
        h = _norm(x, b["attn_norm"]["scale"])
        q, k, v = (_heads(h @ b[name]["kernel"].astype(dtype), heads) for name in ("query", "key", "value"))
        x = x + _causal_attention(q, k, v).reshape(x.shape) @ b["out"]["kernel"].astype(dtype)
        h = _norm(x, b["mlp_norm"]["scale"])
        h = jax.nn.gelu(h @ b["mlp_in"]["kernel"].astype(dtype))
        x = x + h @ b["mlp_out"]["kernel"].astype(dtype)
    return _norm(x, p["norm"]["scale"]) @ table.astype(dtype).T


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer norm as Flax computes it: statistics in float32, the result in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean)
    return ((wide - mean) * (jax.lax.rsqrt(variance + 1e-6) * scale[None, None])).astype(x.dtype)


def _heads(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, -1)


def _causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Operands of shape [batch, length, heads, features]; logits, softmax and result in their dtype."""
    position = jnp.arange(q.shape[1])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
    scores = jnp.where(position[:, None] >= position[None], scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


class ResNet(nn.Module):
    """Residual blocks of two 3x3 convolutions with batch norm, and a classifier."""

    blocks: int
    channels: int
    classes: int = 10
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, self.channels, (3, 3), use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        x = nn.relu(norm()(conv()(images)))
        for _ in range(self.blocks):
            y = nn.relu(norm()(conv()(x)))
            x = nn.relu(x + norm()(conv()(y)))
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean(axis=(1, 2)))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean loss in nats, in float32."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
