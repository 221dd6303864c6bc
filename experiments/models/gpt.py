"""A decoder-only transformer over bytes, in `flax.nnx`."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

VOCABULARY = 256
"""Every byte is a token, so any file is a text and there is no tokenizer to ship."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTSize:
    """Size of the transformer."""

    layers: int = 3
    """Number of blocks, each attention and then an MLP."""
    width: int = 128
    """Features of the residual stream; a multiple of heads."""
    heads: int = 4
    """Attention heads per block."""
    context: int = 64
    """Bytes that the model sees at once."""
    dropout: float = 0.0
    """Share of features dropped in training, from 0 up to but not including 1."""


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array, **unused: object) -> jax.Array:
    """Attention in which a position sees itself and what came before.

    Args:
      query: shape [batch, length, heads, features].
      key: likewise.
      value: likewise.
      **unused: options of Flax's attention functions.

    Returns:
      Shape [batch, length, heads, features].
    """
    position = jnp.arange(query.shape[1])
    scores = jnp.einsum("bqhd,bkhd->bhqk", query / math.sqrt(query.shape[-1]), key)
    scores = jnp.where(position[:, None] >= position[None], scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


class Block(nnx.Module):
    """Pre-norm transformer block: attention and an MLP, each added to the residual stream."""

    def __init__(self, size: GPTSize, *, rngs: nnx.Rngs) -> None:
        self.attn_norm = nnx.LayerNorm(size.width, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(
            size.heads,
            size.width,
            use_bias=False,
            decode=False,
            attention_fn=causal_attention,
            rngs=rngs,
        )
        self.mlp_norm = nnx.LayerNorm(size.width, rngs=rngs)
        self.mlp_in = nnx.Linear(size.width, 4 * size.width, rngs=rngs)
        self.mlp_out = nnx.Linear(4 * size.width, size.width, rngs=rngs)
        self.dropout = nnx.Dropout(size.dropout)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        attn_key, mlp_key = (None, None) if key is None else jax.random.split(key)
        x = x + self.drop(self.attn(self.attn_norm(x)), attn_key)
        hidden = jax.nn.gelu(self.mlp_in(self.mlp_norm(x)))
        return x + self.drop(self.mlp_out(hidden), mlp_key)

    def drop(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return self.dropout(x, deterministic=key is None, rngs=key)


class GPT(nnx.Module):
    """Predicts, at every position, the byte that comes next.

    The output projection is the embedding table itself, so that table collects gradients from
    both ends of the network.
    """

    def __init__(self, size: GPTSize, *, rngs: nnx.Rngs) -> None:
        self.size = size
        small = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(VOCABULARY, size.width, embedding_init=small, rngs=rngs)
        self.position = nnx.Embed(size.context, size.width, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(size, rngs=rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, rngs=rngs)

    def __call__(self, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Maps tokens to the logits of their successors.

        Args:
          tokens: integers of shape [batch, length], with length at most `size.context`.
          key: PRNG key for dropout; without one nothing is dropped.

        Returns:
          Logits of shape [batch, length, 256].
        """
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[-1]))[None]
        for i, block in enumerate(self.blocks):
            x = block(x, None if key is None else jax.random.fold_in(key, i))
        return self.embed.attend(self.norm(x))
