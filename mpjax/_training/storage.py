"""What orbax does for checkpoints: it writes and reads them, and chooses which are retained.

Its preservation policies choose; its CheckpointManager is not used. That deletes a checkpoint in place, so that a
process that is killed meanwhile leaves a part of it under its name; it does not set damaged checkpoints aside, nor read
the metrics of checkpoints that it did not write; and a save that fails would end training.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import numpy as np

from mpjax._training.types import Leaf

if TYPE_CHECKING:
    import orbax.checkpoint as ocp
    from etils import epath

ARRAYS, MANIFEST = "state", "mpjax"  # directories in a checkpoint


class Candidate(NamedTuple):
    """A checkpoint as orbax's preservation policies look at it; without metrics it is never among the best."""

    step: int
    metrics: Mapping[str, float] | None


def import_orbax() -> tuple[Any, Any]:
    """The modules `orbax.checkpoint` and `etils.epath`.

    Raises:
      ImportError: naming the way to install them.
    """
    try:
        import orbax.checkpoint as ocp
        from etils import epath
    except ImportError:
        raise ImportError(
            "mpjax.checkpoint needs orbax-checkpoint; run pip install 'mpjax[checkpoint]'."
        ) from None
    return ocp, epath


def handler(ocp: Any) -> "ocp.CompositeCheckpointHandler":
    """How orbax stores a checkpoint: its arrays, and its manifest as JSON."""
    types = ocp.type_handlers
    # By default orbax cuts replicated arrays so that each replica writes a part, with a program for every
    # shape and device; that takes longer than it saves.
    registry = types.create_type_handler_registry(
        (jax.Array, types.ArrayHandler(use_replica_parallel=False)),
        (np.ndarray, types.NumpyHandler()),
    )
    arrays = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    return ocp.CompositeCheckpointHandler(**{ARRAYS: arrays, MANIFEST: ocp.JsonCheckpointHandler()})


def to_save(ocp: Any, arrays: dict[str, Leaf], manifest: dict[str, Any]) -> "ocp.args.Composite":
    """What a checkpointer with this `handler` is to write."""
    return ocp.args.Composite(**{ARRAYS: ocp.args.PyTreeSave(arrays), MANIFEST: ocp.args.JsonSave(manifest)})


def read(ocp: Any, path: "epath.Path", templates: dict[str, Leaf]) -> dict[str, Leaf]:
    """The arrays of a checkpoint, in the dtypes and with the placement of `templates`."""
    placement = ocp.checkpoint_utils.construct_restore_args(templates)
    arrays = ocp.args.PyTreeRestore(item=templates, restore_args=placement, partial_restore=True)
    with ocp.Checkpointer(handler(ocp)) as reader:
        return reader.restore(path, args=ocp.args.Composite(**{ARRAYS: arrays}))[ARRAYS]


def retained(
    ocp: Any,
    candidates: Sequence[Candidate],
    rank: Callable[[Mapping[str, float]], float],
    *,
    last: int,
    best: int,
    mode: Literal["min", "max"],
) -> set[int]:
    """The steps of the checkpoints that stay.

    Args:
      ocp: the module `orbax.checkpoint`.
      candidates: all checkpoints, in ascending order of their steps.
      rank: the number by which they are ranked, of those that have metrics.
      last: how many of the last ones stay.
      best: how many of the best stay, of equals the later.
      mode: whether the smallest or the largest is the best.
    """
    policies = ocp.checkpoint_managers
    of_the_best = policies.BestN(
        get_metric_fn=rank, reverse=mode == "min", n=best, keep_checkpoints_without_metrics=False
    )
    policy = policies.AnyPreservationPolicy([policies.LatestN(n=last), of_the_best])
    flags = policy.should_preserve(candidates, context=policies.PreservationContext())
    return {candidate.step for candidate, flag in zip(candidates, flags, strict=True) if flag}


def any_process(flag: bool) -> bool:
    """Whether the flag is set in any process; all of them wait here for each other."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())
