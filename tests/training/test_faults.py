"""A fault in any leaf, of any replica, in any microbatch, skips the step and changes nothing else.

docs/faults.md gives the figures of these tests.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax

REPLICAS = MICROBATCHES = 4
EXAMPLES = REPLICAS * MICROBATCHES  # example e lies on replica e // 4 and goes into microbatch e % 4
PARAMS = {"a": {"kernel": jnp.ones((3, 3)), "bias": jnp.zeros(3)}, "b": {"kernel": jnp.ones((3, 2))}}
LEAVES = len(jax.tree.leaves(PARAMS))


@jax.custom_vjp
def tainted(w: jax.Array, fault: jax.Array) -> jax.Array:
    """`w`, whose gradient has a fault added to one entry."""
    return w


tainted.defvjp(
    lambda w, fault: (w, fault),
    lambda fault, g: (g.at[(0,) * g.ndim].add(fault.astype(g.dtype)), jnp.zeros_like(fault)),
)


def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
    def one_loss(params: Any, x: jax.Array, faults: jax.Array) -> jax.Array:
        leaves, structure = jax.tree.flatten(params)
        p = jax.tree.unflatten(structure, [tainted(w, f) for w, f in zip(leaves, faults, strict=True)])
        return jnp.sum((jnp.tanh(x @ p["a"]["kernel"] + p["a"]["bias"]) @ p["b"]["kernel"]) ** 2)

    # Each example with weights of its own, as a fault is one example's.
    own = jax.tree.map(lambda w: jnp.broadcast_to(w, (len(batch["x"]), *w.shape)), params)
    losses = jax.vmap(one_loss)(own, batch["x"], batch["faults"])
    return jnp.mean(losses.astype(jnp.float32)), ({"seen": model_state["seen"] + 1}, {})


@pytest.fixture(scope="module")
def run() -> Any:
    """Takes one step from the same state, on four devices; returns the state before and after."""
    mesh = Mesh(np.array(jax.devices()[:REPLICAS]), ("data",))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    step = jax.jit(
        mpjax.make_train_step(loss_fn, accumulate_steps=MICROBATCHES, has_model_state=True),
        in_shardings=(everywhere, rows),
        out_shardings=(everywhere, None),
    )
    state = mpjax.TrainState.create(
        apply_fn=None,
        params=PARAMS,
        tx=optax.adamw(0.1),
        policy="mixed_float16",
        loss_scale=mpjax.DynamicLossScale(2.0**10),
        model_state={"seen": jnp.zeros([], jnp.int32)},
    )
    x = jnp.linspace(-1, 2, EXAMPLES * 3).reshape(EXAMPLES, 3)

    def run(faults: np.ndarray) -> tuple[mpjax.TrainState, mpjax.TrainState, dict[str, Any]]:
        return state, *step(state, {"x": x, "faults": jnp.asarray(faults, jnp.float32)})

    return run


def test_without_a_fault_everything_moves(run: Any) -> None:
    before, after, metrics = run(np.zeros((EXAMPLES, LEAVES)))
    assert metrics["finite"]
    assert all(
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, (before.params, after.params)), strict=True)
    )
    assert after.model_state["seen"] == MICROBATCHES


def test_every_single_fault_is_a_skipped_step(run: Any) -> None:
    cases = list(itertools.product((np.nan, np.inf, -np.inf), range(EXAMPLES), range(LEAVES)))
    assert len(cases) == 3 * REPLICAS * MICROBATCHES * LEAVES == 144
    for fault, example, leaf in cases:
        faults = np.zeros((EXAMPLES, LEAVES))
        faults[example, leaf] = fault
        before, after, metrics = run(faults)
        assert not metrics["finite"], (fault, example, leaf)
        assert jnp.isfinite(metrics["loss"])
        for field in ("params", "opt_state", "model_state"):
            unchanged = jax.tree.map(np.array_equal, getattr(before, field), getattr(after, field))
            assert all(jax.tree.leaves(unchanged)), (fault, example, leaf, field)
        for copy in after.loss_scale.loss_scale.addressable_shards:  # equal on every device
            assert float(copy.data) == 2.0**9
        assert (int(after.step), int(after.skipped)) == (1, 1)
