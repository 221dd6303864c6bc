"""A problem is a model, its first parameters, a batch and an optimizer: what every contender trains."""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from experiments.benchmarks import models

Loss = Callable[..., tuple[jax.Array, chex.ArrayTree]]
"""`(params, model_state, batch) -> (float32 loss, model_state)`."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained.

    Attributes:
      params: float32 parameters; abstract where memory would end.
      model_state: batch statistics, or an empty dict.
      batch: of one step.
      tx: the optimizer.
      loss: the loss of a Flax model, made for a dtype; for None it names no dtype.
      by_hand: the same in plain JAX, made for a dtype; None if there is none.
    """

    params: chex.ArrayTree
    model_state: chex.ArrayTree
    batch: chex.ArrayTree
    tx: optax.GradientTransformation
    loss: Callable[[DTypeLike | None], Loss]
    by_hand: Callable[[DTypeLike], Loss] | None = None


def mlp(layers: int, width: int, batch: int, *, abstract: bool = False) -> Problem:
    """Square matrices and few examples: nearly all of the step is the optimizer."""
    x = jax.random.normal(jax.random.key(1), (batch, width))

    def loss(dtype: DTypeLike | None) -> Loss:
        model = models.MLP(layers, width, dtype)

        def fn(
            params: chex.ArrayTree, model_state: chex.ArrayTree, batch: chex.ArrayTree
        ) -> tuple[jax.Array, chex.ArrayTree]:
            out: Any = model.apply(params, batch)
            return jnp.mean(jnp.square(out.astype(jnp.float32))), model_state

        return fn

    def by_hand(dtype: DTypeLike) -> Loss:
        def fn(
            params: chex.ArrayTree, model_state: chex.ArrayTree, batch: chex.ArrayTree
        ) -> tuple[jax.Array, chex.ArrayTree]:
            out = models.mlp_by_hand(params, batch, dtype)
            return jnp.mean(jnp.square(out.astype(jnp.float32))), model_state

        return fn

    params = _init(models.MLP(layers, width), x, abstract)
    return Problem(params, {}, x, optax.adamw(1e-4), loss, by_hand)


def gpt(
    layers: int, width: int, batch: int, length: int, vocabulary: int, *, scanned: bool = False
) -> Problem:
    """Next-token prediction on random tokens; heads have 64 features."""
    heads = max(1, width // 64)
    tokens = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, vocabulary)

    def model(dtype: DTypeLike | None) -> models.GPT:
        return models.GPT(layers, width, heads, vocabulary, scanned, dtype)

    def loss(dtype: DTypeLike | None) -> Loss:
        def fn(
            params: chex.ArrayTree, model_state: chex.ArrayTree, batch: chex.ArrayTree
        ) -> tuple[jax.Array, chex.ArrayTree]:
            logits: Any = model(dtype).apply(params, batch[:, :-1])
            return models.cross_entropy(logits, batch[:, 1:]), model_state

        return fn

    def by_hand(dtype: DTypeLike) -> Loss:
        def fn(
            params: chex.ArrayTree, model_state: chex.ArrayTree, batch: chex.ArrayTree
        ) -> tuple[jax.Array, chex.ArrayTree]:
            logits = models.gpt_by_hand(params, batch[:, :-1], heads, dtype)
            return models.cross_entropy(logits, batch[:, 1:]), model_state

        return fn

    params = _init(model(None), tokens[:, :-1])
    return Problem(params, {}, tokens, optax.adamw(3e-4), loss, None if scanned else by_hand)


def resnet(blocks: int, channels: int, batch: int, size: int) -> Problem:
    """Image classification with batch norm."""
    images = jax.random.normal(jax.random.key(1), (batch, size, size, 3))
    labels = jax.random.randint(jax.random.key(2), (batch,), 0, 10)

    def loss(dtype: DTypeLike | None) -> Loss:
        model = models.ResNet(blocks, channels, dtype=dtype)

        def fn(
            params: chex.ArrayTree, model_state: chex.ArrayTree, batch: chex.ArrayTree
        ) -> tuple[jax.Array, chex.ArrayTree]:
            images, labels = batch
            logits, new = model.apply({**params, **model_state}, images, mutable=["batch_stats"])
            return models.cross_entropy(logits, labels), new

        return fn

    variables = _init(models.ResNet(blocks, channels), images)
    state = {"batch_stats": variables.pop("batch_stats")}
    return Problem(variables, state, (images, labels), optax.adamw(1e-3), loss)


def _init(model: nn.Module, inputs: jax.Array, abstract: bool = False) -> dict[str, chex.ArrayTree]:
    make: Any = jax.jit(model.init)
    key = jax.random.key(0)
    return dict(jax.eval_shape(make, key, inputs) if abstract else make(key, inputs))
