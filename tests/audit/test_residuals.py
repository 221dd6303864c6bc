"""What the audit says is saved from the forward pass for the backward pass."""

from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import mpjax

BF16 = "p=f32,c=bf16,o=bf16"
P = jax.sharding.PartitionSpec


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


W, X = array(8, 8), array(16, 8)
SAVED = 2 * 16 * 8 * 4
"""Bytes of a cosine, and of a sine that is squared, of 16 × 8 float32 numbers."""


def loss(w, x):
    return jnp.mean(jnp.sin(x @ w) ** 2)


def sharded(fn, **specs):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), **specs)


def gradient_of_replicas(w, x):
    return lax.pmean(jax.grad(loss)(w, x), "data")


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (jax.grad(loss), X),
        (sharded(gradient_of_replicas), X),
        (jax.pmap(gradient_of_replicas, axis_name="data", in_axes=(None, 0)), array(4, 4, 8)),
    ],
    ids=["one device", "shard_map", "pmap"],
)
def test_what_is_saved_is_counted_on_all_devices(fn, x):
    assert mpjax.audit(fn, W, x).saved_bytes == {"float32": SAVED}


def test_what_is_saved_within_a_sharded_function_and_leaves_it_is_counted_once():
    whole = jax.grad(lambda w, x: sharded(lambda w, x: lax.pmean(loss(w, x), "data"))(w, x))
    # And a few scalars.
    assert mpjax.audit(whole, W, X).saved_bytes["float32"] == pytest.approx(SAVED, abs=32)


def test_slices_of_inputs_are_not_made_by_the_forward_pass():
    def total(w, xs):
        def body(h, x):
            return h + jnp.sum((x @ w) * x), None

        return lax.scan(body, 0.0, xs)[0] + jnp.sum((xs[0] @ w) * xs[0])

    assert not mpjax.audit(jax.grad(total), W, array(5, 16, 8)).saved


def test_a_value_that_is_used_twice_is_saved_once():
    def f(x):
        y = jnp.sin(x)
        return jnp.sum(y * y * jax.lax.optimization_barrier(y))

    # The sine, its square and the cosine.
    assert mpjax.audit(jax.grad(f), array(10)).saved_bytes == {"float32": 3 * 40}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        h = nn.Dense(32, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(16, name="down")(nn.gelu(h)), None


class Model(nn.Module):
    scanned: bool

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="embed")(x)
        if self.scanned:
            split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(Block, length=6, **split)(name="blocks")(x, None)
        else:
            for i in range(6):
                x, _ = Block(name=f"blocks_{i}")(x)
        return nn.Dense(4, name="head")(x)


def saved_by_layer(scanned: bool, policy: str) -> Counter:
    model, x = Model(scanned), array(8, 16)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(params, x):
        return jnp.mean(model.apply(params, x).astype(jnp.float32))

    total: Counter = Counter()
    for s in mpjax.audit(jax.grad(mpjax.autocast(loss, policy)), params, x).saved:
        first, _, rest = s.module.partition("/")
        total[first.partition("_")[0], rest, s.dtype] += s.bytes
    return total


@pytest.mark.parametrize("policy", ["float32", BF16])
def test_a_scanned_model_saves_in_the_modules_in_which_the_unrolled_one_does(policy):
    scanned, unrolled = saved_by_layer(True, policy), saved_by_layer(False, policy)
    assert scanned["blocks", "norm", "float32"] > 1000
    assert scanned.keys() == unrolled.keys()
    for module in scanned:  # up to a scalar for each layer
        assert scanned[module] == pytest.approx(unrolled[module], abs=6 * 4)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(jnp.sin(x)))


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.vmap(Layer, in_axes=0)(rngs.split(5))
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        scan = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head(scan(self.layers, x))


def test_a_scanned_nnx_model_saves_in_its_layers():
    model = mpjax.nnx.apply_policy(Stack(nnx.Rngs(0)), "float32")
    found = mpjax.audit(nnx.grad(lambda model, x: jnp.mean(model(x))), model, array(4, 8))
    assert {s.module for s in found.saved} == {"layers"}
