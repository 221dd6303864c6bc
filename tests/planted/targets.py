"""What the command line is pointed at."""

import sys
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

VALUE = 3


def clean() -> tuple[Any, ...]:
    return lambda x, w: x @ w, (jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 2), jnp.bfloat16))


def masked() -> tuple[Any, ...]:
    return lambda x: x + -1e9, (jnp.ones((4, 8), jnp.float16),)


def no_pair() -> Any:
    return 3


def broken() -> tuple[Any, ...]:
    def fails(x: Any) -> Any:
        return x @ x

    return fails, (jnp.ones((4, 8)),)


def text() -> tuple[Any, ...]:
    return lambda x: x, ("text",)


def model() -> tuple[Any, ...]:
    return nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)]), jnp.ones((1, 3))


def alone() -> Any:
    return nn.Dense(2)


def leaves() -> Any:
    sys.exit(0)
