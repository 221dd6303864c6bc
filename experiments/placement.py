"""Places states and batches on a mesh of devices. The rules look at shapes alone, so that models name no axis.

Axes of a mesh are `data` (cuts the batch), `fsdp` (cuts the batch, and parameters with all that mirrors them) and
`model` (cuts parameters only, and with them the matmuls).
"""

import math
from typing import Any

import chex
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.errors import UsageError
from experiments.tasks import Task

BATCH_AXES = ("data", "fsdp")
PARAMETER_AXES = ("fsdp", "model")
AXES = ("data", "fsdp", "model")


class Placement:
    """Puts states and batches on a mesh, or leaves them alone without one.

    Attributes:
      mesh: of all devices of all processes, or None for one device.
    """

    def __init__(self, mesh: jax.sharding.Mesh | None = None) -> None:
        """Takes a mesh of `make_mesh`."""
        self.mesh = mesh

    def __str__(self) -> str:
        return "" if self.mesh is None else ",".join(f"{axis}={n}" for axis, n in self.mesh.shape.items())

    def state(self, state: chex.ArrayTree) -> chex.ArrayTree:
        """A state on the mesh: of arrays with two axes and more, the largest axes are cut."""
        if self.mesh is None:
            return state
        return jax.tree.map(lambda x: self._put(x, self._parameter_spec(x.shape)), state)

    def shardings(self, state: chex.ArrayTree) -> chex.ArrayTree:
        """The shardings of a state on the mesh, for `jax.jit` to retain; None without a mesh."""
        return None if self.mesh is None else jax.tree.map(lambda x: x.sharding, state)

    def key(self, key: jax.Array) -> jax.Array:
        """A key on every device."""
        if self.mesh is None:
            return key
        return jax.random.wrap_key_data(self._put(jax.random.key_data(key), P()))

    def batch(self, task: Task, seed: int, step: int) -> chex.ArrayTree:
        """The batch of a step, of which each process has read its own rows only."""
        if self.mesh is None:
            return task.batch(seed, step)
        size = task.batch_size
        sharding = NamedSharding(self.mesh, self._batch_spec)
        indices: Any = sharding.addressable_devices_indices_map((size,)).values()
        parts = {(rows.start or 0, rows.stop or size) for (rows,) in indices}
        rows = np.concatenate([np.arange(*part) for part in sorted(parts)])
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, x, (size, *x.shape[1:])),
            task.batch(seed, step, rows),
        )

    def examples(self, x: np.ndarray) -> chex.Array:
        """Examples that every process has, cut like a batch where their number allows it."""
        if self.mesh is None:
            return x
        cut = len(x) % math.prod(self.mesh.shape[a] for a in self._batch_axes) == 0
        return self._put(x, self._batch_spec if cut else P())

    def gathered(self, tree: chex.ArrayTree) -> chex.ArrayTree:
        """Arrays on the mesh as arrays of this process alone."""
        if self.mesh is None:
            return tree
        everywhere = NamedSharding(self.mesh, P())
        whole = jax.jit(lambda tree: tree, out_shardings=everywhere)(tree)
        return jax.tree.map(lambda x: jax.numpy.asarray(x.addressable_data(0)), whole)

    @property
    def _batch_axes(self) -> tuple[str, ...]:
        assert self.mesh is not None
        return tuple(axis for axis in BATCH_AXES if axis in self.mesh.shape)

    @property
    def _batch_spec(self) -> P:
        return P(self._batch_axes or None)

    def _parameter_spec(self, shape: tuple[int, ...]) -> P:
        """Cuts the largest axis that can be cut over fsdp, and the largest that is left over model."""
        assert self.mesh is not None
        spec: list[str | None] = [None] * len(shape)
        if len(shape) < 2:  # norms and biases are small
            return P()
        for axis in (a for a in PARAMETER_AXES if a in self.mesh.shape):
            free = [
                i for i, used in enumerate(spec) if used is None and shape[i] % self.mesh.shape[axis] == 0
            ]
            if free:
                spec[max(free, key=lambda i: (shape[i], i))] = axis
        return P(*spec)

    def _put(self, x: chex.Array, spec: P) -> jax.Array:
        """An array that every process has whole, on the mesh; each device takes its part."""
        assert self.mesh is not None
        whole = np.asarray(x)
        return jax.make_array_from_callback(
            whole.shape, NamedSharding(self.mesh, spec), lambda index: whole[index]
        )


def make_mesh(text: str, batch_size: int, accumulate_steps: int) -> jax.sharding.Mesh | None:
    """The mesh that `--mesh` asks for.

    Args:
      text: such as `data=4,model=2`; empty for one device, or with several processes for `data` over all devices.
      batch_size: rows of a batch.
      accumulate_steps: microbatches it is cut into.

    Raises:
      UsageError: if it does not parse, or does not fit the devices or the batch.
    """
    if not text:
        if jax.process_count() == 1:
            return None
        text = f"data={jax.device_count()}"
    shape = _parse(text)
    count, devices = math.prod(shape.values()), jax.devices()
    if count > len(devices) or (jax.process_count() > 1 and count != len(devices)):
        hint = "" if jax.process_count() > 1 else f", or try it on a CPU with --virtual-devices {count}"
        raise UsageError(
            f"--mesh {text} asks for {count} devices, there are {len(devices)}; make its sizes multiply to "
            f"{len(devices)}{hint}"
        )
    cuts = math.prod(shape.get(axis, 1) for axis in BATCH_AXES)
    if batch_size % (cuts * accumulate_steps):
        micro = f" in --accumulate-steps {accumulate_steps}" if accumulate_steps > 1 else ""
        raise UsageError(
            f"--mesh {text} cuts the batch{micro} into {cuts * accumulate_steps} parts, which --batch-size "
            f"{batch_size} is no multiple of; give such a one, or make data (and fsdp) smaller"
        )
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        axis_types=(AxisType.Auto,) * len(shape),
        devices=devices[:count],
    )


def _parse(text: str) -> dict[str, int]:
    shape: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (s.strip() for s in part.partition("="))
        if axis not in AXES or axis in shape or not size.isdecimal() or int(size) < 1:
            raise UsageError(
                f"--mesh {text}: '{part.strip()}' is not understood; expected axes {', '.join(AXES)} with their "
                "sizes, each once, such as data=4,model=2"
            )
        shape[axis] = int(size)
    return shape
