"""Samples a continuation of a text from a byte-level model."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

TEMPERATURE = 0.7


def continue_text(
    forward: Callable[[chex.ArrayTree, jax.Array], jax.Array],
    params: chex.ArrayTree,
    prompt: np.ndarray,
    key: jax.Array,
    length: int,
    temperature: float = TEMPERATURE,
) -> np.ndarray:
    """Returns the bytes that the model writes after a prompt, shape [length].

    Args:
      forward: from parameters and tokens of shape [1, context] to logits [1, context, vocabulary].
      params: its parameters.
      prompt: exactly one context of tokens, shape [context].
      key: PRNG key.
      length: bytes to write.
      temperature: below 1 prefers likely bytes.
    """

    def write(params: chex.ArrayTree, window: jax.Array, key: jax.Array) -> jax.Array:
        def one_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = forward(params, window[None])[0, -1]
            byte = jax.random.categorical(key, logits / temperature).astype(window.dtype)
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(one_byte, window, jax.random.split(key, length))[1]

    return np.asarray(jax.jit(write)(params, jnp.asarray(prompt), key))


def to_text(tokens: np.ndarray) -> str:
    """Bytes as text that may be printed."""
    text = bytes(tokens.tolist()).decode(errors="replace")
    # A model that learnt little writes control characters, which a terminal would obey.
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def count_letters(tokens: np.ndarray) -> int:
    """How many of the bytes are letters, which tells prose from tables and code."""
    return sum(chr(token).isalpha() for token in tokens.tolist() if token < 128)
