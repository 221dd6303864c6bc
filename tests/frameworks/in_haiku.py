"""The models of `frameworks` in Haiku."""

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from frameworks import Model
from promotion import standard_promotion

import mpjax
from mpjax import autocast, full_precision

KEY = jax.random.key(0)
ONES = hk.initializers.Constant(1.0)


class HaikuModel(Model):
    top = "model"
    block = "block_{}"
    stacked = "model/__layer_stack_no_per_layer/block"

    def __init__(self, cls: type, options: dict[str, Any], inputs: tuple[Any, ...]) -> None:
        self.make, self.inputs = (lambda: cls(**options, name="model")), inputs
        self.transformed = self._transform("__call__")
        with standard_promotion():  # Haiku's own layers mix dtypes
            self.params, self.state = jax.jit(self.transformed.init)(KEY, *inputs)

    def _transform(self, method: str) -> hk.TransformedWithState:
        return hk.transform_with_state(lambda *inputs: getattr(self.make(), method)(*inputs))

    def call(self, policies: Any, method: str = "__call__") -> Callable[..., Any]:
        apply = self._transform(method).apply
        return lambda params, state, *inputs: apply(params, state, jax.random.key(1), *inputs)

    def params_under(self, policies: Any) -> Any:
        init = autocast(self.transformed.init, policies, cast_output=False)
        return jax.jit(init)(KEY, *self.inputs)[0]

    def explain(self, policies: Any) -> mpjax.Explanation:
        return mpjax.explain(self.transformed, policies, *self.inputs)


def build(cls: type, inputs: tuple[Any, ...], options: dict[str, Any]) -> Model:
    return HaikuModel(cls, options, inputs)


def dense(features: int, name: str) -> hk.Module:
    return hk.Linear(features, name=name)


def layer_norm(name: str) -> hk.Module:
    return hk.LayerNorm(-1, True, True, name=name)


Dense = hk.Linear


class Attention(hk.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (dense(8, name)(x) for name in ("q", "k", "v"))
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
        return dense(8, "out")(jnp.einsum("bqk,bkd->bqd", weights, v))


class WideAttention(Attention):
    pass


class Block(hk.Module):
    def __init__(self, attention: type, name: str) -> None:
        super().__init__(name)
        self.attention = attention

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(name="attn")(layer_norm("norm")(x))
        return x + dense(8, "mlp")(x)


class Blocks(hk.Module):
    def __init__(self, how: str = "loop", attention: type = Attention, name: str | None = None) -> None:
        super().__init__(name)
        self.how, self.attention = how, attention

    def __call__(self, x: jax.Array) -> jax.Array:
        def run(x: jax.Array, name: str = "block") -> jax.Array:
            block = Block(self.attention, name)
            return (hk.remat(block) if "remat" in self.how else block)(x)

        x = dense(8, "embed")(x)
        if "scan" in self.how:
            x = hk.layer_stack(2)(run)(x)
        else:
            for i in range(2):
                x = run(x, f"block_{i}")
        return dense(3, "head")(x)


class Spy(hk.Module):
    def __init__(self, note: Callable[..., None], name: str) -> None:
        super().__init__(name)
        self.note = note

    def __call__(self, x: jax.Array, *others: jax.Array) -> jax.Array:
        self.note(x, *others)
        return x


class Spied(Spy):
    def __call__(self, x: jax.Array) -> jax.Array:
        x = Spy(self.note, "given")(x)
        x = Spy(self.note, "after_first")(dense(8, "first")(x))
        x = Spy(self.note, "after_norm")(layer_norm("norm")(x))
        return dense(3, "last")(x)


class Structures(Spy):
    def __call__(self, x: jax.Array) -> Any:
        out = Inner("inner")(x)
        self.note(out)
        return out


class Inner(hk.Module):
    def __call__(self, x: jax.Array) -> Any:
        return {"second": (x, None), "first": 2 * x}, jnp.sum(x), jnp.array([50257]), jax.random.key(7), x > 0


class Shared(hk.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        shared = dense(8, "shared")
        return Twice(shared, "twice")(x) + shared(x)


class Twice(hk.Module):
    def __init__(self, layer: hk.Module, name: str) -> None:
        super().__init__(name)
        self.layer = layer

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(jax.nn.relu(self.layer(x)))


class Embed(hk.Module):
    @property
    def table(self) -> jax.Array:
        return hk.get_parameter("table", (4, 2), init=ONES)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table[tokens]

    def attend(self, x: jax.Array) -> jax.Array:
        return x @ self.table.T


class Tied(hk.Module):
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = Embed("embed")
        return embed.attend(embed(tokens))


class Reuse(hk.Module):
    def __call__(self, xs: jax.Array) -> jax.Array:
        layer = hk.Linear(1, with_bias=False, w_init=ONES, name="dense")
        return hk.scan(
            lambda total, x: (total + jnp.sum(layer(x).astype(jnp.float32)), None), jnp.float32(0), xs
        )[0]


class Recurrent(hk.Module):
    def __init__(self, cell: str, name: str) -> None:
        super().__init__(name)
        self.cell = cell

    def __call__(self, x: jax.Array) -> Any:
        core = getattr(hk, self.cell)(6, name="cell")
        outputs, carry = hk.dynamic_unroll(core, jnp.swapaxes(x, 0, 1), core.initial_state(x.shape[0]))
        return carry, outputs


class Normalised(hk.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return hk.BatchNorm(True, True, 0.9, name="norm")(x, is_training=True)


class Stateful(hk.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        y = dense(8, "dense")(x)
        count = hk.get_state("count", (), jnp.int32, jnp.zeros)
        hk.get_state("mean", (8,), jnp.float32, jnp.zeros)
        hk.set_state("mean", jnp.mean(y, (0, 1)))
        hk.set_state("count", count + 1)
        return y


class Dropped(hk.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return hk.dropout(hk.next_rng_key(), 0.5, dense(64, "dense")(x))


class Methods(hk.Module):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.dense = dense(8, "dense")

    def encode(self, x: jax.Array) -> jax.Array:
        return self.helper(x)

    def helper(self, x: jax.Array) -> jax.Array:
        return self.dense(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * self.helper(x)


class Decorated(hk.Module):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.dense = dense(8, "dense")

    @hk.name_like("__call__")
    def hidden(self, x: jax.Array) -> jax.Array:
        return hk.remat(self.dense)(x)

    @hk.transparent
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.hidden(x)


class Derived(Decorated):
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + self.dense(x)


class FullPrecisionInside(hk.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        exact = full_precision(lambda h: jax.nn.softmax(dense(8, "exact")(h)))
        return dense(3, "last")(exact(dense(8, "half")(x)))


class Sinusoids(hk.Module):
    def __init__(self, inside: bool, name: str) -> None:
        super().__init__(name)
        self.inside = inside

    def __call__(self, positions: jax.Array) -> jax.Array:
        return Sinusoid(self.inside, "sinusoid")(positions)


class Sinusoid(hk.Module):
    def __init__(self, inside: bool, name: str) -> None:
        super().__init__(name)
        self.inside = inside

    def __call__(self, positions: jax.Array) -> jax.Array:
        positions = jnp.arange(2048.0) if self.inside else positions
        return jnp.sin(positions[:, None] @ (10000.0 ** (-jnp.arange(16) / 16))[None, :])


_PAIR = hk.without_apply_rng(hk.transform(lambda x: Pair("pair")(x)))
_APPLY_PAIR = jax.jit(_PAIR.apply)


class Jitted(hk.Module):
    """Its layers are called in a jit of their own."""

    def __call__(self, x: jax.Array) -> jax.Array:
        init = hk.lift(_PAIR.init, name="pair")
        return _APPLY_PAIR(init(hk.maybe_next_rng_key(), x), x)


class Pair(hk.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return dense(3, "last")(jnp.tanh(dense(8, "first")(x)))


class Classifier(hk.Module):
    """Has state, a norm, and something to learn."""

    def __call__(self, x: jax.Array) -> jax.Array:
        x = hk.BatchNorm(True, True, 0.9, name="norm")(dense(16, "body")(x), is_training=True)
        return dense(3, "head")(jnp.tanh(x))
