"""Checkpoints by orbax: all that decides how training goes on, and the policy it was trained under."""

import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import mpjax
from experiments.errors import UsageError
from experiments.precision import loss_scale_to_json, policy_to_json

KEPT = 3
_FIELDS = ("step", "skipped", "params", "opt_state", "model_state", "loss_scale")


class Checkpoints:
    """The checkpoints of one run. A checkpoint appears whole or not at all; the last three are kept."""

    def __init__(self, directory: Path) -> None:
        """Opens a directory, which is made when the first checkpoint is saved."""
        logging.getLogger("absl").setLevel(logging.ERROR)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, create=True, enable_async_checkpointing=False
        )
        self.directory = directory
        self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    @property
    def latest(self) -> int | None:
        """Step of the last checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, state: mpjax.TrainState, key: jax.Array) -> None:
        """Saves a state, with the key that randomness comes from and the position in the data."""
        step = int(state.step)
        if step == self.latest:
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_to_dict(state, key)),
                precision=ocp.args.JsonSave(_precision(state)),
            ),
        )
        self._manager.wait_until_finished()

    def restore(self, state: mpjax.TrainState, key: jax.Array) -> tuple[mpjax.TrainState, jax.Array]:
        """The state and key of the last checkpoint.

        Args:
          state: of the same structure; decides on shapes, dtypes and placement.
          key: likewise.

        Raises:
          UsageError: if the checkpoint was trained under another policy or kind of loss scale.
        """
        step = self.latest
        args = ocp.args.Composite(precision=ocp.args.JsonRestore())
        saved = self._manager.restore(step, args=args).precision
        for what, now in _precision(state).items():
            if saved[what] != now:
                raise UsageError(
                    f"the checkpoint of step {step} in '{self.directory}' was trained with {what} "
                    f"{saved[what]!r}, this run asks for {now!r}; ask for what it was trained with, "
                    "or choose another --out"
                )
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, _to_dict(state, key))
        args = ocp.args.Composite(state=ocp.args.StandardRestore(template))
        restored = self._manager.restore(step, args=args).state
        key = jax.random.wrap_key_data(restored["key"])
        return state.replace(**{name: restored[name] for name in _FIELDS}), key

    def close(self) -> None:
        """Frees what orbax holds."""
        self._manager.close()


def _to_dict(state: mpjax.TrainState, key: jax.Array) -> dict[str, Any]:
    fields = {name: getattr(state, name) for name in _FIELDS}
    # Batches depend on seed and step alone, so that the step is the position in the data as well.
    return fields | {"key": jax.random.key_data(key), "data_position": state.step}


def _precision(state: mpjax.TrainState) -> dict[str, Any]:
    return {
        "policy": policy_to_json(mpjax.as_policy_map(state.policy)),
        "loss scale": loss_scale_to_json(state.loss_scale),
    }
