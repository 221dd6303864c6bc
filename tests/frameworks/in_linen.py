"""The models of `frameworks` in flax.linen."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from frameworks import Model

import mpjax
from mpjax import autocast, full_precision

RNGS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
ONES = nn.initializers.ones


class LinenModel(Model):
    block = "block_{}"
    stacked = "block"

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.module, self.inputs = module, inputs
        variables = dict(jax.jit(module.init)(RNGS, *inputs))
        self.params, self.state = variables.pop("params", {}), variables

    def call(self, policies: Any, method: str = "__call__") -> Callable[..., Any]:
        def run(params: Any, state: Any, *inputs: Any) -> Any:
            return self.module.apply(
                {"params": params, **state}, *inputs, mutable=list(state), rngs=RNGS, method=method
            )

        return run

    def params_under(self, policies: Any) -> Any:
        return jax.jit(autocast(self.module.init, policies, cast_output=False))(RNGS, *self.inputs).get(
            "params", {}
        )

    def explain(self, policies: Any) -> mpjax.Explanation:
        return mpjax.explain(self.module, policies, *self.inputs)


def build(cls: type, inputs: tuple[Any, ...], options: dict[str, Any]) -> Model:
    return LinenModel(cls(**options), inputs)


def dense(features: int, name: str) -> nn.Module:
    return nn.Dense(features, name=name)


Dense = nn.Dense


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (dense(8, name)(x) for name in ("q", "k", "v"))
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
        return dense(8, "out")(jnp.einsum("bqk,bkd->bqd", weights, v))


class WideAttention(Attention):
    pass


class Block(nn.Module):
    attention: type = Attention

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        x = x + self.attention(name="attn")(nn.LayerNorm(name="norm")(x))
        return x + dense(8, "mlp")(x), None


class Blocks(nn.Module):
    how: str = "loop"
    attention: type = Attention

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = dense(8, "embed")(x)
        block = nn.remat(Block) if "remat" in self.how else Block
        if "scan" in self.how:
            scanned = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            x, _ = scanned(self.attention, name="block")(x, None)
        else:
            for i in range(2):
                x, _ = block(self.attention, name=f"block_{i}")(x)
        return dense(3, "head")(x)


class Spy(nn.Module):
    note: Callable[..., None]

    @nn.compact
    def __call__(self, x: jax.Array, *others: jax.Array) -> jax.Array:
        self.note(x, *others)
        return x


class Spied(nn.Module):
    note: Callable[..., None]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = Spy(self.note, name="given")(x)
        x = Spy(self.note, name="after_first")(dense(8, "first")(x))
        x = Spy(self.note, name="after_norm")(nn.LayerNorm(name="norm")(x))
        return dense(3, "last")(x)


class Structures(nn.Module):
    note: Callable[..., None]

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        out = Inner(name="inner")(x)
        self.note(out)
        return out


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        return {"second": (x, None), "first": 2 * x}, jnp.sum(x), jnp.array([50257]), jax.random.key(7), x > 0


class Shared(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shared = dense(8, "shared")
        return Twice(shared, name="twice")(x) + shared(x)


class Twice(nn.Module):
    layer: nn.Module

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(jax.nn.relu(self.layer(x)))


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(4, 2, embedding_init=ONES, name="embed")
        return embed.attend(embed(tokens))


class Reuse(nn.Module):
    @nn.compact
    def __call__(self, xs: jax.Array) -> jax.Array:
        body = nn.scan(
            lambda layer, total, x: (total + jnp.sum(layer(x).astype(jnp.float32)), None),
            variable_broadcast="params",
            split_rngs={"params": False},
        )
        layer = nn.Dense(1, use_bias=False, kernel_init=ONES, name="dense")
        return body(layer, jnp.float32(0), xs)[0]


class Recurrent(nn.Module):
    cell: str

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        cell = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell}[self.cell](6, name="cell")
        return nn.RNN(cell, return_carry=True, name="rnn")(x)


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.BatchNorm(use_running_average=False, momentum=0.9, name="norm")(x)


class Stateful(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = dense(8, "dense")(x)
        mean = self.variable("stats", "mean", jnp.zeros, (8,))
        count = self.variable("stats", "count", jnp.zeros, (), jnp.int32)
        if not self.is_initializing():
            mean.value = jnp.mean(y, (0, 1))
            count.value += 1
        return y


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dropout(0.5, deterministic=False, name="dropout")(dense(64, "dense")(x))


class Methods(nn.Module):
    def setup(self) -> None:
        self.dense = nn.Dense(8)

    def encode(self, x: jax.Array) -> jax.Array:
        return self.helper(x)

    def helper(self, x: jax.Array) -> jax.Array:
        return self.dense(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * self.helper(x)


class Decorated(nn.Module):
    def setup(self) -> None:
        self.dense = nn.Dense(8)

    @nn.jit
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.hidden(x)

    @nn.remat
    def hidden(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


class Derived(Decorated):
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + self.dense(x)


class FullPrecisionInside(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        exact = full_precision(lambda h: jax.nn.softmax(dense(8, "exact")(h)))
        return dense(3, "last")(exact(dense(8, "half")(x)))


class Sinusoids(nn.Module):
    inside: bool

    @nn.compact
    def __call__(self, positions: jax.Array) -> jax.Array:
        return Sinusoid(self.inside, name="sinusoid")(positions)


class Sinusoid(nn.Module):
    inside: bool

    @nn.compact
    def __call__(self, positions: jax.Array) -> jax.Array:
        positions = jnp.arange(2048.0) if self.inside else positions
        return jnp.sin(positions[:, None] @ (10000.0 ** (-jnp.arange(16) / 16))[None, :])


class Jitted(nn.Module):
    """Its layers are called in a jit of their own."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.jit(Pair)(name="pair")(x)


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return dense(3, "last")(jnp.tanh(dense(8, "first")(x)))


class Classifier(nn.Module):
    """Has state, a norm, and something to learn."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False, name="norm")(dense(16, "body")(x))
        return dense(3, "head")(jnp.tanh(x))
