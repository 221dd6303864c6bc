"""Checkpoints on orbax: asynchronous, atomic, checked when they are read, with the policy next to the state.

A checkpoint is a directory named after its step. It appears whole or not at all; damage that comes later is noticed
by the sums of its bytes, and the one before it is taken. Needs `pip install 'mpjax[checkpoint]'`.
"""

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from mpjax._precision.policy_map import PolicyMap, as_policy_map
from mpjax._training import manifest as manifests
from mpjax._training import storage
from mpjax._training.loss_scale import check_loss_scale
from mpjax._training.manifest import CheckpointError as CheckpointError
from mpjax._training.manifest import DamageError as DamageError
from mpjax._training.train_state import check_params
from mpjax._training.types import Leaf, PyTree

if TYPE_CHECKING:
    import orbax.checkpoint as ocp
    from etils import epath

S = TypeVar("S")  # a TrainState, or another tree

_UNFINISHED = (".orbax-checkpoint-tmp", ".deleted")
_DAMAGED = ".damaged"


class CheckpointWarning(UserWarning):
    """A checkpoint could not be saved or read, and training goes on without it."""


class Info(NamedTuple):
    """What a checkpoint says of itself; `policy` is what it was trained under, or None."""

    policy: PolicyMap | None
    metrics: dict[str, float]
    notes: dict[str, Any]


class Checkpoints:
    """The checkpoints in one directory, of which the last few and the best are retained.

    With several processes all of them make this object and call its methods at the same steps; each
    writes and reads its own shards, in a directory that all of them see.

    >>> import tempfile
    >>> state = mpjax.TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.sgd(0.1))
    >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
    ...     checkpoints.save(state, extra={"rng": jax.random.key(0), "position": 512})
    ...     checkpoints.wait()
    ...     state, extra = checkpoints.restore(state, extra={"rng": jax.random.key(1), "position": 0})
    >>> extra["position"]
    512
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_best: int = 0,
        metric: str = "loss",
        mode: Literal["min", "max"] = "min",
    ) -> None:
        """Opens a directory, which is made when the first checkpoint is saved.

        Args:
          directory: a path, or an address such as gs://bucket/run.
          keep: how many of the last checkpoints are retained.
          keep_best: how many more, the best by `metric`.
          metric: a name among the metrics given to `save`.
          mode: whether the smallest or the largest is the best.

        Raises:
          ImportError: if orbax is not installed.
          CheckpointError: if the directory is a file or cannot be read.
          ValueError: if `keep` or `keep_best` is out of range, or `mode` is neither.
        """
        if keep < 1 or keep_best < 0 or mode not in ("min", "max"):
            raise ValueError(
                f"Expected keep >= 1, keep_best >= 0 and mode 'min' or 'max', got keep={keep}, "
                f"keep_best={keep_best} and mode={mode!r}."
            )
        self._ocp, epath = storage.import_orbax()
        path = epath.Path(directory)
        self.directory = path if "://" in str(directory) else path.expanduser().resolve()
        self.keep, self.keep_best, self.metric, self.mode = keep, keep_best, metric, mode
        self._checkpointer: ocp.AsyncCheckpointer | None = None
        self._saving: int | None = None
        self._error: Exception | None = None
        self._failure: CheckpointError | None = None
        _ = self.steps  # which says if the directory is of no use

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints that are whole, in ascending order.

        Raises:
          CheckpointError: if the directory is a file or cannot be read.
        """
        try:
            names = [p.name for p in self.directory.iterdir()] if self.directory.exists() else []
        except NotADirectoryError:
            raise CheckpointError(
                f"'{self.directory}' is a file; give a directory for checkpoints."
            ) from None
        except OSError as e:
            raise CheckpointError(
                f"'{self.directory}' cannot be read ({e.strerror}); give a directory for checkpoints that this "
                "user may read and write."
            ) from None
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def latest(self) -> int | None:
        """The step of the last checkpoint, or None."""
        return max(self.steps, default=None)

    @property
    def best(self) -> int | None:
        """The step of the best checkpoint by `metric`, or None."""
        sign = 1 if self.mode == "max" else -1
        ranked = [(sign * self._rank(c.metrics), c.step) for c in self._candidates(self.steps) if c.metrics]
        return max(ranked)[1] if ranked else None

    def info(self, step: int) -> Info:
        """What the checkpoint of a step says of itself; no array is read.

        Raises:
          CheckpointError: if there is none, it is damaged or comes from a newer mpjax.
        """
        found = self._read_manifest(step)
        policy = None if found["policy"] is None else as_policy_map(found["policy"])
        return Info(policy, found["metrics"], found["notes"])

    def save(
        self,
        state: PyTree,
        *,
        extra: PyTree | None = None,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins to save a state, and returns when its arrays may be donated.

        A save that fails (the disk is full, say) is a `CheckpointWarning`, and the older checkpoints stay;
        `wait` says so as an error.

        Args:
          state: a `TrainState` or another pytree of arrays.
          extra: what else decides how training goes on, such as a key and the position in the data: a pytree
            of arrays, typed keys, and numbers or text.
          step: by default `state.step`. A step that is saved already is not saved again.
          metrics: numbers, one of which decides which checkpoint is the best.
          notes: what else to store, in a form that JSON can hold.
        """
        self._settle()
        step = int(state.step if step is None else step)
        if step in self.steps:
            return
        self._saving = step
        try:
            policy = getattr(state, "policy", None)
            manifest = manifests.describe(state, extra, policy, metrics, notes)
            arrays = {
                name: jax.random.key_data(x) if manifests.is_key(x) else x
                for name, x in manifests.named_leaves(state, extra).items()
                if not manifests.is_value(x)
            }
            self._checkpointer = self._checkpointer or self._open_for_writing()
            self._checkpointer.save(
                self.directory / str(step), args=storage.to_save(self._ocp, arrays, manifest)
            )
        except Exception as e:
            self._error = e

    def wait(self) -> None:
        """Returns when the last save is done.

        Raises:
          CheckpointError: if it failed.
        """
        self._settle()
        if self._failure is not None:
            raise self._failure

    def restore(
        self,
        state: S,
        *,
        extra: Any = None,
        step: int | None = None,
        cast: bool = False,  # type: ignore[assignment]
    ) -> tuple[S, Any]:
        """Returns a state and what was saved next to it.

            state, extra = checkpoints.restore(state, extra={"rng": key, "position": 0})

        Shapes, dtypes and placement are those of the arguments, which may be abstract
        (`jax.ShapeDtypeStruct`, with a sharding or without), on any mesh and any number of devices. Loss
        scales come back with the limits they were saved with.

        Args:
          state: of the structure that was saved.
          extra: likewise; its plain numbers come back plain. Without it, what was saved as `extra` is not read.
          step: which one; by default the last that can be read. A `CheckpointWarning` names each that cannot,
            which is set aside.
          cast: continue under the policy, the dtypes and the kind of loss scale of `state` where they differ from
            those of the checkpoint.

        Returns:
          `(state, extra)`.

        Raises:
          CheckpointError: if there is none, it does not fit `state`, or none can be read.
        """
        self._settle()
        steps = self.steps if step is None else [step]
        damaged: dict[int, str] = {}
        for candidate in reversed(steps):
            try:
                restored = self._restore(candidate, state, extra, cast)
            except DamageError as e:
                damaged[candidate] = str(e)
                continue
            # Only now: if none can be read, the reason may be another, and nothing is changed.
            self._set_aside(damaged, candidate)
            return restored
        if damaged:
            raise CheckpointError(" ".join(damaged.values()) + " There is no other to go back to.")
        raise CheckpointError(f"There is no checkpoint in '{self.directory}'.")

    def drop_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, as when training continues from this one."""
        self._settle()
        self._delete([s for s in self.steps if s > step])

    def close(self) -> None:
        """Waits for the last save and frees what orbax uses."""
        self._settle()
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _restore(self, step: int, state: S, extra: Any, cast: bool) -> tuple[S, Any]:
        found = self._read_manifest(step)
        where = self._where(step)
        policy = getattr(state, "policy", None)
        manifests.check(found, state, extra, policy, where, cast=cast)
        own = manifests.own_scales(found, state)
        named = manifests.named_leaves(state, extra)
        wanted = {
            name: x
            for name, x in named.items()
            if not manifests.is_value(x) and not manifests.belongs(name, own)
        }
        arrays = self._read_arrays(step, found, wanted)
        values = {name: v["value"] for name, v in found["leaves"].items() if "value" in v}
        leaves = [(arrays | values).get(name, x) for name, x in named.items()]
        state, extra = jax.tree.unflatten(jax.tree.structure((state, extra)), leaves)
        state = manifests.with_saved_settings(state, found)
        try:
            for scale in manifests.loss_scales(state).values():
                check_loss_scale(scale)
            if policy is not None and hasattr(state, "params"):
                check_params(state.params, policy)
        except ValueError as e:
            raise CheckpointError(f"{where} cannot be continued from: {e}") from None
        return state, extra

    def _read_arrays(self, step: int, found: manifests.Manifest, wanted: dict[str, Leaf]) -> dict[str, Leaf]:
        """Reads and checks the arrays, in the dtypes and with the placement of `wanted`."""
        templates = {
            name: manifests.template(x, found["leaves"][name]["dtype"]) for name, x in wanted.items()
        }
        problem = ""
        restored: dict[str, Leaf] = {}
        try:
            restored = storage.read(self._ocp, self.directory / str(step), templates)
        except Exception as e:
            problem = manifests.first_line(e)
        # Every process has to go back to the same checkpoint, whichever could not read its part.
        if not problem and (damaged := manifests.damaged_leaves(found, restored)):
            problem = f"the bytes of '{damaged[0]}' are not those that were saved"
        if storage.any_process(bool(problem)):
            raise DamageError(
                f"{self._where(step)} is damaged: {problem or 'another process cannot read its part'}."
            )
        return {name: manifests.as_wanted(restored[name], x) for name, x in wanted.items()}

    def _read_manifest(self, step: int) -> manifests.Manifest:
        path = self.directory / str(step)
        if not path.exists():
            raise CheckpointError(f"There is no checkpoint of step {step} in '{self.directory}'.")
        return manifests.read(path / storage.MANIFEST / "metadata", self._where(step))

    def _open_for_writing(self) -> "ocp.AsyncCheckpointer":
        """Removes what earlier runs left unfinished; only here, as others may read while a run writes."""
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            for path in self.directory.iterdir():
                if any(mark in path.name for mark in _UNFINISHED):
                    path.rmtree()
        storage.any_process(False)
        return self._ocp.AsyncCheckpointer(storage.handler(self._ocp))

    def _settle(self) -> None:
        """Waits for the save under way, warns if it failed, and deletes what is not retained."""
        if self._saving is None:
            return
        if self._error is None and self._checkpointer is not None:
            try:
                self._checkpointer.wait_until_finished()
            except Exception as e:
                self._error = e
        if storage.any_process(self._error is not None):
            self._fail(self._error or RuntimeError("another process could not write its part"))
            return
        self._saving, self._failure = None, None
        candidates = self._candidates(self.steps)
        retained = storage.retained(
            self._ocp, candidates, self._rank, last=self.keep, best=self.keep_best, mode=self.mode
        )
        self._delete([step for step in self.steps if step not in retained])

    def _fail(self, error: Exception) -> None:
        step, self._saving, self._error = self._saving, None, None
        last = self.latest
        self._failure = CheckpointError(
            f"The checkpoint of step {step} could not be saved in '{self.directory}': {manifests.first_line(error)}. "
            + (f"The last one that is whole is of step {last}." if last is not None else "There is no other.")
        )
        warnings.warn(str(self._failure), CheckpointWarning, stacklevel=3)

    def _candidates(self, steps: list[int]) -> list[storage.Candidate]:
        return [storage.Candidate(step, self._metrics(step)) for step in steps]

    def _metrics(self, step: int) -> dict[str, float] | None:
        """The metrics of a checkpoint, or None if it cannot be ranked."""
        try:
            metrics = self.info(step).metrics
        except CheckpointError:
            return None
        return metrics if np.isfinite(self._rank(metrics)) else None

    def _rank(self, metrics: Mapping[str, float] | None) -> float:
        return (metrics or {}).get(self.metric, np.nan)

    def _delete(self, steps: list[int]) -> None:
        if jax.process_index() == 0:
            for step in steps:
                # Renamed first, so that a process that is killed meanwhile leaves no part of it under its name.
                self._rename(step, f"{step}.deleted").rmtree()
        storage.any_process(False)

    def _set_aside(self, damaged: dict[int, str], good: int) -> None:
        for step, problem in damaged.items():
            warnings.warn(f"{problem} Going back to step {good}.", CheckpointWarning, stacklevel=3)
            if jax.process_index() == 0:
                self._rename(step, f"{step}{_DAMAGED}")
        storage.any_process(False)

    def _rename(self, step: int, name: str) -> "epath.Path":
        target = self.directory / name
        if target.exists():
            target.rmtree()
        return (self.directory / str(step)).rename(target)

    def _where(self, step: int) -> str:
        return f"The checkpoint of step {step} in '{self.directory}'"
