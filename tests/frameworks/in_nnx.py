"""The models of `frameworks` in flax.nnx."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from frameworks import Model

import mpjax
from mpjax import full_precision

ONES = nnx.initializers.ones


class NnxModel(Model):
    def __init__(self, module: nnx.Module, inputs: tuple[Any, ...]) -> None:
        self.module, self.inputs = module, inputs
        _, self.params, self.state = nnx.split(module, nnx.Param, ...)

    def call(self, policies: Any, method: str = "__call__") -> Callable[..., Any]:
        graphdef = nnx.graphdef(mpjax.apply_policy(self.module, policies))

        def run(params: Any, state: Any, *inputs: Any) -> Any:
            module = nnx.merge(graphdef, params, state, copy=True)
            out = getattr(module, method)(*inputs)
            return out, nnx.split(module, nnx.Param, ...)[2]

        return run

    def params_under(self, policies: Any) -> Any:
        return nnx.state(mpjax.apply_policy(self.module, policies), nnx.Param)

    def explain(self, policies: Any) -> mpjax.Explanation:
        return mpjax.explain(self.module, policies)


def build(cls: type, inputs: tuple[Any, ...], options: dict[str, Any]) -> Model:
    return NnxModel(cls(**options, rngs=nnx.Rngs(params=0, dropout=1)), inputs)


def dense(features: int, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(8, features, rngs=rngs)


Dense = nnx.Linear


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q, self.k, self.v, self.out = (dense(8, rngs) for _ in range(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", self.q(x), self.k(x)))
        return self.out(jnp.einsum("bqk,bkd->bqd", weights, self.v(x)))


class WideAttention(Attention):
    pass


class Block(nnx.Module):
    def __init__(self, attention: type, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attn = attention(rngs)
        self.mlp = dense(8, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Blocks(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, how: str = "loop", attention: type = Attention) -> None:
        self.how = how
        self.embed, self.head = dense(8, rngs), dense(3, rngs)
        if "scan" in how:
            self.blocks = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: Block(attention, rngs)))(rngs)
        else:
            self.blocks = nnx.List([Block(attention, rngs), Block(attention, rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        def run(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        run = nnx.remat(run) if "remat" in self.how else run
        x = self.embed(x)
        if "scan" in self.how:
            x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        else:
            for block in self.blocks:
                x = run(x, block)
        return self.head(x)


class Spy(nnx.Module):
    def __init__(self, note: Callable[..., None], rngs: nnx.Rngs) -> None:
        self.note = note

    def __call__(self, x: jax.Array, *others: jax.Array) -> jax.Array:
        self.note(x, *others)
        return x


class Spied(nnx.Module):
    def __init__(self, note: Callable[..., None], rngs: nnx.Rngs) -> None:
        self.given, self.after_first, self.after_norm = (Spy(note, rngs) for _ in range(3))
        self.first, self.last = dense(8, rngs), dense(3, rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.after_first(self.first(self.given(x)))
        return self.last(self.after_norm(self.norm(x)))


class Structures(nnx.Module):
    def __init__(self, note: Callable[..., None], rngs: nnx.Rngs) -> None:
        self.note, self.inner = note, Inner()

    def __call__(self, x: jax.Array) -> Any:
        out = self.inner(x)
        self.note(out)
        return out


class Inner(nnx.Module):
    def __call__(self, x: jax.Array) -> Any:
        return {"second": (x, None), "first": 2 * x}, jnp.sum(x), jnp.array([50257]), jax.random.key(7), x > 0


class Shared(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.shared = dense(8, rngs)
        self.twice = Twice(self.shared)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.twice(x) + self.shared(x)


class Twice(nnx.Module):
    def __init__(self, layer: nnx.Module) -> None:
        self.layer = layer

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(jax.nn.relu(self.layer(x)))


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(4, 2, embedding_init=ONES, rngs=rngs)
        self.head = self.embed

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head.attend(self.embed(tokens))


class Reuse(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(2, 1, use_bias=False, kernel_init=ONES, rngs=rngs)

    def __call__(self, xs: jax.Array) -> jax.Array:
        def body(total: jax.Array, x: jax.Array, layer: nnx.Module) -> jax.Array:
            return total + jnp.sum(layer(x).astype(jnp.float32))

        scan = nnx.scan(body, in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
        return scan(jnp.float32(0), xs, self.dense)


class Recurrent(nnx.Module):
    def __init__(self, cell: str, rngs: nnx.Rngs) -> None:
        cell = {"LSTM": nnx.LSTMCell, "GRU": nnx.GRUCell}[cell](8, 6, rngs=rngs)
        self.rnn = nnx.RNN(cell, return_carry=True)

    def __call__(self, x: jax.Array) -> Any:
        return self.rnn(x)


class Normalised(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(1, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x)


class Own(nnx.Variable):
    pass


class Stateful(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = dense(8, rngs)
        self.mean, self.count = Own(jnp.zeros(8)), Own(jnp.array(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.dense(x)
        self.mean.set_value(jnp.mean(y, (0, 1)))
        self.count[...] += 1
        return y


class Dropped(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense, self.dropout = dense(64, rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.dense(x))


class Methods(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = dense(8, rngs)

    def encode(self, x: jax.Array) -> jax.Array:
        return self.helper(x)

    def helper(self, x: jax.Array) -> jax.Array:
        return self.dense(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * self.helper(x)


class Decorated(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = dense(8, rngs)

    @nnx.jit
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.hidden(x)

    @nnx.remat
    def hidden(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


class Derived(Decorated):
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + self.dense(x)


class FullPrecisionInside(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.half, self.exact, self.last = dense(8, rngs), dense(8, rngs), dense(3, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        exact = full_precision(lambda h: jax.nn.softmax(self.exact(h)))
        return self.last(exact(self.half(x)))


class Sinusoids(nnx.Module):
    def __init__(self, inside: bool, rngs: nnx.Rngs) -> None:
        self.sinusoid = Sinusoid(inside)

    def __call__(self, positions: jax.Array) -> jax.Array:
        return self.sinusoid(positions)


class Sinusoid(nnx.Module):
    def __init__(self, inside: bool) -> None:
        self.inside = inside

    def __call__(self, positions: jax.Array) -> jax.Array:
        positions = jnp.arange(2048.0) if self.inside else positions
        return jnp.sin(positions[:, None] @ (10000.0 ** (-jnp.arange(16) / 16))[None, :])


class Jitted(nnx.Module):
    """Its layers are called in a jit of their own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.pair = Pair(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return _jitted(self.pair, x)


@nnx.jit
def _jitted(module: nnx.Module, x: jax.Array) -> jax.Array:
    return module(x)


class Pair(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = dense(8, rngs), dense(3, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(jnp.tanh(self.first(x)))


class Classifier(nnx.Module):
    """Has state, a norm, and something to learn."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.norm(self.body(x))))
