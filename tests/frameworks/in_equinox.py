"""The models of `frameworks` in Equinox, whose layers take one example: `each` maps them over all of a batch."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from frameworks import Model

import mpjax
from mpjax import full_precision

KEY = jax.random.key(0)


class EquinoxModel(Model):
    def __init__(self, cls: type, options: dict[str, Any], inputs: tuple[Any, ...]) -> None:
        self.inputs = inputs
        self.module, self.state = eqx.nn.make_with_state(cls)(**options, key=KEY)
        self.params = jax.tree.leaves(eqx.filter(self.module, eqx.is_inexact_array))

    def call(self, policies: Any, method: str = "__call__") -> Callable[..., Any]:
        arrays, static = eqx.partition(mpjax.apply_policy(self.module, policies), eqx.is_inexact_array)
        structure = jax.tree.structure(arrays)

        def run(params: Any, state: Any, *inputs: Any) -> Any:
            module = eqx.combine(jax.tree.unflatten(structure, jax.tree.leaves(params)), static)
            if jax.tree.leaves(state):
                return getattr(module, method)(*inputs, state)
            return getattr(module, method)(*inputs), state

        return run

    def params_under(self, policies: Any) -> Any:
        return eqx.filter(mpjax.apply_policy(self.module, policies), eqx.is_inexact_array)

    def explain(self, policies: Any) -> mpjax.Explanation:
        return mpjax.explain(self.module, policies)


def build(cls: type, inputs: tuple[Any, ...], options: dict[str, Any]) -> Model:
    return EquinoxModel(cls, options, inputs)


def each(layer: Callable[..., Any], x: jax.Array) -> jax.Array:
    """A layer of vectors, mapped over all axes of `x` but the last."""
    for _ in range(x.ndim - 1):
        layer = jax.vmap(layer)
    return layer(x)


def dense(features: int, key: jax.Array) -> eqx.Module:
    return eqx.nn.Linear(8, features, key=key)


Dense = eqx.nn.Linear


class Attention(eqx.Module):
    q: eqx.Module
    k: eqx.Module
    v: eqx.Module
    out: eqx.Module

    def __init__(self, key: jax.Array) -> None:
        self.q, self.k, self.v, self.out = (dense(8, k) for k in jax.random.split(key, 4))

    def __call__(self, x: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", each(self.q, x), each(self.k, x)))
        return each(self.out, jnp.einsum("bqk,bkd->bqd", weights, each(self.v, x)))


class WideAttention(Attention):
    pass


class Block(eqx.Module):
    norm: eqx.Module
    attn: eqx.Module
    mlp: eqx.Module

    def __init__(self, attention: type, key: jax.Array) -> None:
        self.norm = eqx.nn.LayerNorm(8)
        self.attn, self.mlp = attention(key), dense(8, key)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(each(self.norm, x))
        return x + each(self.mlp, x)


class Blocks(eqx.Module):
    embed: eqx.Module
    blocks: Any
    head: eqx.Module
    how: str = eqx.field(static=True)

    def __init__(self, key: jax.Array, how: str = "loop", attention: type = Attention) -> None:
        self.how = how
        keys = jax.random.split(key, 4)
        self.embed, self.head = dense(8, keys[0]), dense(3, keys[1])
        make = lambda key: Block(attention, key)
        self.blocks = eqx.filter_vmap(make)(keys[2:]) if "scan" in how else [make(keys[2]), make(keys[3])]

    def __call__(self, x: jax.Array) -> jax.Array:
        def run(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        run = eqx.filter_checkpoint(run) if "remat" in self.how else run
        x = each(self.embed, x)
        if "scan" in self.how:
            arrays, static = eqx.partition(self.blocks, eqx.is_array)
            x, _ = jax.lax.scan(lambda x, arrays: (run(eqx.combine(arrays, static), x), None), x, arrays)
        else:
            for block in self.blocks:
                x = run(block, x)
        return each(self.head, x)


class Spy(eqx.Module):
    note: Callable[..., None] = eqx.field(static=True)

    def __init__(self, note: Callable[..., None], key: jax.Array) -> None:
        self.note = note

    def __call__(self, x: jax.Array, *others: jax.Array) -> jax.Array:
        self.note(x, *others)
        return x


class Spied(eqx.Module):
    given: Spy
    after_first: Spy
    after_norm: Spy
    first: eqx.Module
    last: eqx.Module
    norm: eqx.Module

    def __init__(self, note: Callable[..., None], key: jax.Array) -> None:
        self.given, self.after_first, self.after_norm = (Spy(note, key) for _ in range(3))
        self.first, self.last = dense(8, key), dense(3, key)
        self.norm = eqx.nn.LayerNorm(8)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.after_first(each(self.first, self.given(x)))
        return each(self.last, self.after_norm(each(self.norm, x)))


class Structures(eqx.Module):
    note: Callable[..., None] = eqx.field(static=True)
    inner: eqx.Module

    def __init__(self, note: Callable[..., None], key: jax.Array) -> None:
        self.note, self.inner = note, Inner()

    def __call__(self, x: jax.Array) -> Any:
        out = self.inner(x)
        self.note(out)
        return out


class Inner(eqx.Module):
    def __call__(self, x: jax.Array) -> Any:
        return {"second": (x, None), "first": 2 * x}, jnp.sum(x), jnp.array([50257]), jax.random.key(7), x > 0


class Shared(eqx.Module):
    shared: eqx.Module
    twice: eqx.Module

    def __init__(self, key: jax.Array) -> None:
        self.shared, self.twice = dense(8, key), Twice()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.twice(self.shared, x) + each(self.shared, x)


class Twice(eqx.Module):
    def __call__(self, layer: eqx.Module, x: jax.Array) -> jax.Array:
        return each(layer, jax.nn.relu(each(layer, x)))


class Embed(eqx.Module):
    table: jax.Array

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table[tokens]

    def attend(self, x: jax.Array) -> jax.Array:
        return x @ self.table.T


class Tied(eqx.Module):
    embed: Embed

    def __init__(self, key: jax.Array) -> None:
        self.embed = Embed(jnp.ones((4, 2)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(self.embed(tokens))


class Reuse(eqx.Module):
    dense: eqx.Module

    def __init__(self, key: jax.Array) -> None:
        layer = eqx.nn.Linear(2, 1, use_bias=False, key=key)
        self.dense = eqx.tree_at(lambda layer: layer.weight, layer, jnp.ones((1, 2)))

    def __call__(self, xs: jax.Array) -> jax.Array:
        def body(total: jax.Array, x: jax.Array) -> Any:
            return total + jnp.sum(each(self.dense, x).astype(jnp.float32)), None

        return jax.lax.scan(body, jnp.float32(0), xs)[0]


class Recurrent(eqx.Module):
    cell: eqx.Module

    def __init__(self, cell: str, key: jax.Array) -> None:
        self.cell = {"LSTM": eqx.nn.LSTMCell, "GRU": eqx.nn.GRUCell}[cell](8, 6, key=key)

    def __call__(self, x: jax.Array) -> Any:
        zeros = jnp.zeros((x.shape[0], 6))
        carry = (zeros, zeros) if isinstance(self.cell, eqx.nn.LSTMCell) else zeros

        def body(carry: Any, x: jax.Array) -> Any:
            carry = jax.vmap(self.cell)(x, carry)
            return carry, jax.tree.leaves(carry)[0]

        return jax.lax.scan(body, carry, jnp.swapaxes(x, 0, 1))


class Normalised(eqx.Module):
    norm: eqx.Module

    def __init__(self, key: jax.Array) -> None:
        self.norm = eqx.nn.BatchNorm(1, "batch", momentum=0.9, mode="batch")

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
        return jax.vmap(self.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


class Stateful(eqx.Module):
    dense: eqx.Module
    mean: eqx.nn.StateIndex
    count: eqx.nn.StateIndex

    def __init__(self, key: jax.Array) -> None:
        self.dense = dense(8, key)
        self.mean, self.count = eqx.nn.StateIndex(jnp.zeros(8)), eqx.nn.StateIndex(jnp.array(0))

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
        y = each(self.dense, x)
        state = state.set(self.mean, jnp.mean(y, (0, 1)))
        return y, state.set(self.count, state.get(self.count) + 1)


class Dropped(eqx.Module):
    dense: eqx.Module
    dropout: eqx.Module

    def __init__(self, key: jax.Array) -> None:
        self.dense, self.dropout = dense(64, key), eqx.nn.Dropout(0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(each(self.dense, x), key=jax.random.key(1))


class Methods(eqx.Module):
    dense: eqx.Module

    def __init__(self, key: jax.Array) -> None:
        self.dense = dense(8, key)

    def encode(self, x: jax.Array) -> jax.Array:
        return self.helper(x)

    def helper(self, x: jax.Array) -> jax.Array:
        return each(self.dense, x)

    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * self.helper(x)


class Decorated(eqx.Module):
    dense: eqx.Module

    def __init__(self, key: jax.Array) -> None:
        self.dense = dense(8, key)

    @eqx.filter_jit
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.hidden(x)

    @eqx.filter_checkpoint
    def hidden(self, x: jax.Array) -> jax.Array:
        return each(self.dense, x)


class Derived(Decorated):
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + each(self.dense, x)


class FullPrecisionInside(eqx.Module):
    half: eqx.Module
    exact: eqx.Module
    last: eqx.Module

    def __init__(self, key: jax.Array) -> None:
        self.half, self.exact, self.last = dense(8, key), dense(8, key), dense(3, key)

    def __call__(self, x: jax.Array) -> jax.Array:
        exact = full_precision(lambda h: jax.nn.softmax(each(self.exact, h)))
        return each(self.last, exact(each(self.half, x)))


class Sinusoids(eqx.Module):
    sinusoid: eqx.Module

    def __init__(self, inside: bool, key: jax.Array) -> None:
        self.sinusoid = Sinusoid(inside)

    def __call__(self, positions: jax.Array) -> jax.Array:
        return self.sinusoid(positions)


class Sinusoid(eqx.Module):
    inside: bool = eqx.field(static=True)

    def __call__(self, positions: jax.Array) -> jax.Array:
        positions = jnp.arange(2048.0) if self.inside else positions
        return jnp.sin(positions[:, None] @ (10000.0 ** (-jnp.arange(16) / 16))[None, :])


class Jitted(eqx.Module):
    """Its layers are called in a jit of their own."""

    pair: eqx.Module

    def __init__(self, key: jax.Array) -> None:
        self.pair = Pair(key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return _jitted(self.pair, x)


@eqx.filter_jit
def _jitted(module: eqx.Module, x: jax.Array) -> jax.Array:
    return module(x)


class Pair(eqx.Module):
    first: eqx.Module
    last: eqx.Module

    def __init__(self, key: jax.Array) -> None:
        self.first, self.last = dense(8, key), dense(3, key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return each(self.last, jnp.tanh(each(self.first, x)))


class Classifier(eqx.Module):
    """Has state, a norm, and something to learn."""

    body: eqx.Module
    norm: eqx.Module
    head: eqx.Module

    def __init__(self, key: jax.Array) -> None:
        self.body = eqx.nn.Linear(8, 16, key=key)
        self.norm = eqx.nn.BatchNorm(16, "batch", momentum=0.9, mode="batch")
        self.head = eqx.nn.Linear(16, 3, key=key)

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> Any:
        norm = jax.vmap(self.norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        x, state = norm(each(self.body, x), state)
        return each(self.head, jnp.tanh(x)), state
