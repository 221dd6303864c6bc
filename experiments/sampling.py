"""Lets a byte-level model go on with a text."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TEMPERATURE = 0.7


def continue_text(
    forward: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    prompt: np.ndarray,
    key: jax.Array,
    length: int,
    temperature: float = TEMPERATURE,
) -> str:
    """Returns what the model writes after a prompt.

    Args:
      forward: from parameters and tokens of shape [1, context] to logits [1, context, vocabulary].
      params: its parameters.
      prompt: exactly one context of tokens, shape [context].
      key: PRNG key.
      length: bytes to write.
      temperature: below 1 prefers likely bytes.
    """

    def write(params: Any, window: jax.Array, key: jax.Array) -> jax.Array:
        def one_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = forward(params, window[None])[0, -1]
            byte = jax.random.categorical(key, logits / temperature).astype(window.dtype)
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(one_byte, window, jax.random.split(key, length))[1]

    written = jax.jit(write)(params, jnp.asarray(prompt), key)
    text = bytes(np.asarray(written).tolist()).decode(errors="replace")
    # A model that learnt little writes control characters, which a terminal would obey.
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
