"""Plain functions, with jmp casts at the top of a step or with none."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
from jax import lax

B16 = jnp.bfloat16


def two_dtypes(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.named_scope("head"):
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())))  # planted: two dtypes


def cumulated(x: jax.Array) -> jax.Array:
    with jax.named_scope("head"):
        return jnp.cumsum(x, axis=0)  # planted: cumsum


def bias_gradient(w: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
    """The bias is added to 4096 rows, so its gradient is a sum of 4096 bfloat16 numbers."""
    with jax.named_scope("layer"):
        y = x @ w + b[None].astype(B16)  # planted: bias gradient
    return jnp.mean(y.astype(jnp.float32))


def shared_weight(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """jmp's pattern: everything is cast at the top, and one weight serves a thousand steps."""
    policy = jmp.get_policy("p=f32,c=bf16,o=f32")
    params, x = policy.cast_to_compute((params, x))  # planted: jmp cast

    def body(h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ params["w"]), None

    h, _ = lax.scan(body, x, None, length=1000)
    return policy.cast_to_output(jnp.mean(h.astype(jnp.float32)))


def added_mask(scores: jax.Array, mask: jax.Array) -> jax.Array:
    with jax.named_scope("attention"):
        return scores + (1 - mask) * -1e9  # planted: added mask


def replicas(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def mean(x: jax.Array) -> jax.Array:
        with jax.named_scope("gradients"):
            return lax.pmean(x, "data")  # planted: collective

    return jax.shard_map(mean, mesh=mesh, in_specs=spec("data"), out_specs=spec())(x)


def wide(x: jax.Array) -> jax.Array:
    with jax.named_scope("schedule"):
        ramp = jnp.linspace(0.0, 1.0, x.shape[-1], dtype="float64")  # planted: float64
        return x * ramp[None].astype(x.dtype)


class State(NamedTuple):
    w: jax.Array
    average: jax.Array


def changing_state(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state.w)
    average = state.average * 0.9 + grad  # planted: state dtype
    return State(state.w - 0.1 * average, average), loss


def half_master(w: jax.Array, x: jax.Array) -> jax.Array:
    grad = jax.grad(lambda w: jnp.mean((x @ w).astype(jnp.float32) ** 2))(w)
    return w - 1e-3 * grad  # planted: half master


def cast_batch(w: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """The whole batch is cast, its token ids too."""
    batch = jax.tree.map(lambda x: x.astype(B16), batch)  # planted: token ids
    return w[batch["tokens"].astype(jnp.int32)].sum()


def positions(w: jax.Array) -> jax.Array:
    with jax.named_scope("embed"):
        return jnp.sin(jnp.arange(2048).astype(B16))[:, None] * w  # planted: positions


def cast_key(key: jax.Array, x: jax.Array) -> Any:
    key = key.astype(jnp.float32).astype(jnp.uint32)  # planted: key
    return x + jax.random.normal(key, x.shape, x.dtype)
