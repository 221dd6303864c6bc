"""One small model on eight virtual devices, trained in every way that JAX has to go parallel."""

import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax

DEVICES = 8
F16 = "p=f32,c=f16,o=f32"

_rng = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return (0.5 * _rng.normal(size=shape)).astype(np.float32)


# numpy, so that no test can donate what another one uses.
PARAMS = {"in": _normal(8, 16), "bias": _normal(16), "out": _normal(16, 8), "shift": _normal(8)}

REPLICATED = {"in": P(), "bias": P(), "out": P(), "shift": P()}
TENSOR = {"in": P(None, "model"), "bias": P("model"), "out": P("model"), "shift": P()}
FULLY = {"in": P("data"), "bias": P(), "out": P("data"), "shift": P()}
MIXED = {"in": P("data", "model"), "bias": P("model"), "out": P("model", "data"), "shift": P()}


def mesh_of(data: int, model: int = 1, kind: Any = AxisType.Auto) -> Mesh:
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(kind, kind))


def batch(row: int | None = None, column: int | None = None) -> dict[str, np.ndarray]:
    """Sixteen examples; the gradient is infinite at example `row`, or at feature `column`."""
    rng = np.random.default_rng(1)
    data = {
        "x": rng.normal(size=(16, 8)).astype(np.float32),
        "y": rng.normal(size=(16, 8)).astype(np.float32),
        "fault": np.zeros((16, 16), np.float32),
    }
    if row is not None:
        data["fault"][row] = np.inf
    if column is not None:
        data["fault"][:, column] = np.inf
    return data


@jax.custom_vjp
def faulty(x: jax.Array, fault: jax.Array) -> jax.Array:
    """The identity, to whose gradient `fault` is added: the loss does not show it."""
    return x


faulty.defvjp(
    lambda x, fault: (x, fault), lambda fault, g: (g + fault.astype(g.dtype), jnp.zeros_like(fault))
)


def loss(
    params: Any, batch: Any, rng: Any, *, model_axis: str | None = None, out_spec: Any = None
) -> jax.Array:
    """The mean squared error of two layers, split between them over `model_axis` if there is one."""
    del rng
    hidden = batch["x"] @ params["in"] + params["bias"][None]
    hidden = jnp.tanh(faulty(hidden, batch["fault"]))
    out = jnp.matmul(hidden, params["out"], out_sharding=out_spec)
    if model_axis is not None:
        out = lax.psum(out, model_axis)
    return jnp.mean((out.astype(jnp.float32) + params["shift"][None] - batch["y"]) ** 2)


def create(
    mesh: Mesh | None = None, specs: Any = None, policy: Any = F16, tx: Any = None, **kwargs: Any
) -> Any:
    params = jax.tree.map(jnp.asarray, PARAMS)
    if mesh is not None:
        params = put(PARAMS, mesh, specs)
    kwargs.setdefault("loss_scale", mpjax.DynamicLossScale(2.0**10))
    return mpjax.TrainState.create(
        apply_fn=None, params=params, tx=tx or optax.adam(1e-2), policy=policy, **kwargs
    )


def put(tree: Any, mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def shardings(state: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, state)


class Way:
    """A way to go parallel: a state, and a step that takes a numpy batch."""

    def __init__(
        self, name: str, loss_fn: Any = loss, policy: Any = F16, tx: Any = None, **options: Any
    ) -> None:
        self.name = name
        how, _, layout = name.partition(", ")
        self.traces = 0
        data, model, specs = {
            "": (DEVICES, 1, REPLICATED),
            "4×2": (4, 2, TENSOR),
            "fully sharded": (DEVICES, 1, FULLY),
            "mixed": (4, 2, MIXED),
        }[layout]
        create_options = {k: options.pop(k) for k in ("loss_scale", "model_state") if k in options}
        if how == "one device":
            self.state = create(policy=policy, tx=tx, **create_options)
            self.put = lambda batch: batch
            self.step = jax.jit(self._counted(mpjax.make_train_step(loss_fn, **options)))
            return
        kind = AxisType.Explicit if how.startswith("explicit") else AxisType.Auto
        mesh = mesh_of(data, model, kind)
        self.state = create(mesh, specs, policy, tx, **create_options)
        batch_specs = {
            "x": P("data"),
            "y": P("data"),
            "fault": P("data", "model") if model > 1 else P("data"),
        }
        self.put = lambda batch: put(batch, mesh, batch_specs)
        if how in ("jit", "explicit"):
            out = (
                {"out_spec": NamedSharding(mesh, P("data"))} if how == "explicit" and loss_fn is loss else {}
            )
            step = self._counted(mpjax.make_train_step(functools.partial(loss_fn, **out), **options))
            self.step = jax.jit(step, donate_argnums=0, out_shardings=(shardings(self.state), None))
        elif how == "pmap":
            step = self._counted(mpjax.make_train_step(loss_fn, axis_name="data", **options))
            self.state = flax.jax_utils.replicate(create(policy=policy, tx=tx, **create_options))
            self.put = lambda batch: {k: x.reshape(DEVICES, -1, *x.shape[1:]) for k, x in batch.items()}
            self.step = jax.pmap(step, axis_name="data", donate_argnums=0)
        else:
            partial = how.startswith(
                "partial"
            )  # the data's axis is manual, the model's is left to the compiler
            split = functools.partial(loss_fn, model_axis="model") if model > 1 and not partial else loss_fn
            step = self._counted(mpjax.make_train_step(split, axis_name="data", **options))
            state_specs = jax.tree.map(lambda s: P() if partial else s.spec, shardings(self.state))
            manual = {"axis_names": {"data"}} if partial else {}

            def run(state: Any, batch: Any) -> Any:
                return jax.shard_map(
                    step,
                    mesh=mesh,
                    in_specs=(state_specs, dict.fromkeys(batch_specs, P("data")) if partial else batch_specs),
                    out_specs=(state_specs, P()),
                    check_vma="without checks" not in how,
                    **manual,
                )(state, batch)

            self.step = jax.jit(run, donate_argnums=0, out_shardings=(shardings(self.state), None))

    def _counted(self, step: Any) -> Any:
        def counted(state: Any, batch: Any) -> Any:
            self.traces += 1
            return step(state, batch)

        return counted

    def __call__(self, batch: Any) -> Any:
        self.state, metrics = self.step(self.state, self.put(batch))
        return jax.tree.map(lambda x: np.asarray(x).ravel()[0], metrics)


def on_every_device(tree: Any) -> list[list[bytes]]:
    """The very bits of each leaf on each device that holds a part of it."""
    return [[np.asarray(s.data).tobytes() for s in leaf.addressable_shards] for leaf in jax.tree.leaves(tree)]
