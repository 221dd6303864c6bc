"""Where a run resumes: at its last checkpoint, or at the last good one under a safer policy."""

import errno
from typing import Any

import chex
import jax

import mpjax
from experiments.errors import UsageError
from experiments.precision import policy_to_json
from mpjax.checkpoint import CheckpointError, Checkpoints
from mpjax.divergence import nonfinite_paths

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Of an OSError that freeing some space would have prevented."""
Fallback = dict[str, Any]
"""The policy that a run fell back to, from which step, and why."""


class Recovery:
    """The checkpoints of a run: the last three, and the best by validation loss."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        """Uses checkpoints that the caller closes."""
        self._checkpoints = checkpoints

    def save(
        self,
        state: mpjax.TrainState,
        key: jax.Array,
        validation: dict[str, float],
        fallback: Fallback | None,
    ) -> None:
        """Begins to save everything that training needs to resume."""
        self._checkpoints.save(
            state,
            # Batches depend on seed and step alone, so that the step is the position in the data as well.
            extra={"rng": key, "data_position": int(state.step)},
            metrics=validation,
            notes={"fallback": fallback} if fallback else None,
        )

    def settle(self) -> str | None:
        """Waits for the save under way; returns the error of the last one, which was reported already."""
        try:
            self._checkpoints.wait()
        except CheckpointError as e:
            return str(e)
        return None

    def fallback(self) -> Fallback | None:
        """The fallback that the last readable checkpoint was trained under, if any."""
        for step in reversed(self._checkpoints.steps):
            try:
                return self._checkpoints.info(step).notes.get("fallback")
            except CheckpointError:
                continue
        return None

    def resume(self, state: mpjax.TrainState, key: jax.Array) -> tuple[mpjax.TrainState, jax.Array]:
        """The state and key of the last checkpoint that can be read, or those given if there is none.

        Args:
          state: of the same structure; decides on shapes, dtypes and placement.
          key: likewise.

        Raises:
          UsageError: if the checkpoint does not fit.
        """
        if self._checkpoints.latest is None:
            return state, key
        try:
            state, extra = self._checkpoints.restore(state, extra=_extra(key))
        except CheckpointError as e:
            self._check_policy(state)
            raise UsageError(f"{e} (Or choose another --out, or --resume never.)") from None
        return state, extra["rng"]

    def last_good(self, state: mpjax.TrainState, key: jax.Array) -> tuple[mpjax.TrainState, jax.Array]:
        """The last state that is finite, cast to the policy of `state`; those given if there is none.

        Later checkpoints are dropped.
        """
        for step in reversed(self._checkpoints.steps):
            try:
                good, extra = self._checkpoints.restore(state, extra=_extra(key), step=step, cast=True)
            except CheckpointError:
                continue
            if not nonfinite_paths((good.params, good.opt_state, good.model_state)):
                self._checkpoints.drop_after(step)
                return good, extra["rng"]
        self._checkpoints.drop_after(-1)
        return state, key

    def _check_policy(self, state: mpjax.TrainState) -> None:
        """Says in the words of the command line that a policy is another one."""
        latest = self._checkpoints.latest
        then = None if latest is None else self._checkpoints.info(latest).policy
        now = mpjax.as_policy_map(state.policy)
        if then is not None and then != now:
            raise UsageError(
                f"the checkpoint of step {latest} in '{self._checkpoints.directory}' was trained with policy "
                f"{policy_to_json(then)!r}, this run asks for {policy_to_json(now)!r}; ask for what it was "
                "trained with, or choose another --out"
            ) from None


def _extra(key: chex.PRNGKey) -> dict[str, chex.ArrayTree]:
    return {"rng": key, "data_position": 0}
