"""What to say when training cannot go on: has it diverged, where, and what to try.

All of it runs on the host. The monitor reads metrics that a loop has fetched anyway; the gradient of the failing
batch is taken once more, outside the step, and only after something has gone wrong.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._precision import casting
from mpjax._training.accumulation import each_microbatch
from mpjax._training.gradients import PipelineLoss, check_loss, gradient_fn
from mpjax._training.loss_scale import DynamicLossScale, LossScale, as_loss_scale
from mpjax._training.reduction import Reduction
from mpjax._training.train_state import TrainState
from mpjax._training.types import Batch, LossFn, ModelState, Params, PRNGKey, PyTree

MAX_SKIPPED = 20
_HISTORY = 8


class DivergenceError(FloatingPointError):
    """Training has diverged; the message says where, and what to try.

    Attributes:
      divergence: when and why.
    """

    def __init__(self, divergence: "Divergence", nonfinite: Sequence[str] = ()) -> None:
        """Composes the message.

        Args:
          divergence: of a `DivergenceMonitor`.
          nonfinite: of `nonfinite_paths` or `find_nonfinite`.
        """
        self.divergence = divergence
        super().__init__(_message(divergence, nonfinite))


@dataclasses.dataclass(frozen=True)
class Divergence:
    """When and why training was given up.

    Attributes:
      step: the step whose metrics decided.
      reason: such as `the loss is nan`.
      scales: step and loss scale at each change, the last few, oldest first.
    """

    step: int
    reason: str
    scales: tuple[tuple[int, float], ...] = ()


class DivergenceMonitor:
    """Reads the metrics of every step and tells when training should stop.

    That is: a loss that is not finite, too many skipped steps in a row, or a skipped step at the smallest
    loss scale, which cannot back off any further.

    >>> monitor = DivergenceMonitor(max_skipped=2)
    >>> bad = {"loss": 1.0, "loss_scale": 4.0, "finite": False}
    >>> monitor.observe(1, bad)
    >>> monitor.observe(2, bad).reason
    '2 steps in a row were skipped, as their gradients were not finite'
    """

    def __init__(self, *, max_skipped: int = MAX_SKIPPED, min_loss_scale: float | None = None) -> None:
        """Starts with no step seen.

        Args:
          max_skipped: skipped steps in a row that are one too many.
          min_loss_scale: the smallest loss scale, or None if it never changes.
        """
        if max_skipped < 1:
            raise ValueError(f"max_skipped must be at least 1, got {max_skipped}.")
        self._max_skipped, self._min = max_skipped, min_loss_scale
        self._skipped = 0
        self._scales: list[tuple[int, float]] = []

    @classmethod
    def for_loss_scale(cls, loss_scale: LossScale, *, max_skipped: int = MAX_SKIPPED) -> "DivergenceMonitor":
        """A monitor that knows the smallest value of a loss scale."""
        smallest = loss_scale.min_loss_scale if isinstance(loss_scale, DynamicLossScale) else None
        return cls(max_skipped=max_skipped, min_loss_scale=smallest)

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Divergence | None:
        """Takes in the metrics of one step; returns why to stop, or None.

        Args:
          step: its number.
          metrics: loss, loss_scale and finite, on the host, as `make_train_step` gives them.
        """
        scale, loss = float(metrics["loss_scale"]), float(metrics["loss"])
        if not self._scales or self._scales[-1][1] != scale:
            self._scales = [*self._scales[-_HISTORY + 1 :], (step, scale)]
        self._skipped = 0 if metrics["finite"] else self._skipped + 1
        if not math.isfinite(loss):
            reason = f"the loss is {loss}"
        elif self._skipped and self._min is not None and scale <= self._min:
            reason = f"the gradients are not finite even at the smallest loss scale, {self._min:g}"
        elif self._skipped >= self._max_skipped:
            reason = f"{self._skipped} steps in a row were skipped, as their gradients were not finite"
        else:
            return None
        return Divergence(step, reason, tuple(self._scales))


def nonfinite_paths(tree: PyTree, what: str = "") -> list[str]:
    """Path, and number of NaNs and infs, of each leaf that is not finite, in the order of the tree.

    Args:
      tree: a pytree of arrays, on any devices.
      what: comes before each path, such as `params`.

    >>> nonfinite_paths({"a": jnp.array([1.0, jnp.nan]), "b": jnp.ones(3)}, "params")
    ["'params/a' (1 NaN of 2)"]
    """
    flat = [
        (path, x)
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
        if casting.is_inexact_array(x) and np.size(x)
    ]
    counts = jax.device_get(_counts([x for _, x in flat]))
    lines = []
    for (path, x), (nans, infs) in zip(flat, counts, strict=True):
        if nans or infs:
            if path and getattr(path[-1], "name", None) == "value":
                path = path[:-1]  # an nnx.Variable
            name = "/".join(filter(None, [what, jax.tree_util.keystr(path, simple=True, separator="/")]))
            found = " and ".join(f"{n} {kind}" for n, kind in ((nans, "NaN"), (infs, "inf")) if n)
            lines.append(f"'{name}' ({found} of {np.size(x)})")
    return lines


def find_nonfinite(
    loss_fn: LossFn,
    state: TrainState,
    batch: Batch,
    rng: PRNGKey | None = None,
    *,
    loss_scale: float | None = None,
    accumulate_steps: int = 1,
    has_model_state: bool = False,
) -> list[str]:
    """What is not finite in a state, a batch, or the gradient of the one on the other.

    Parameters, model state and batch are looked at first, as they are causes; if they are all finite, the
    gradient is taken once more, microbatch by microbatch.

    Args:
      loss_fn: as `make_train_step` takes it.
      state: a `TrainState` after the step that failed; a skipped step has not changed it.
      batch: the batch of that step.
      rng: the key of that step.
      loss_scale: the factor of that step; by default the state's.
      accumulate_steps: as `make_train_step` takes it.
      has_model_state: likewise.

    Returns:
      Lines such as `'gradient/dense/kernel' (3 inf of 64)`.
    """
    causes = [
        *nonfinite_paths(state.params, "params"),
        *nonfinite_paths(state.model_state, "model_state"),
        *nonfinite_paths(batch, "batch"),
    ]
    if causes:
        return causes
    scale = as_loss_scale(state.loss_scale) if loss_scale is None else DynamicLossScale(float(loss_scale))
    run = gradient_fn(_loss_alone(loss_fn, has_model_state), state.policy, Reduction())
    gradient = jax.jit(lambda *args: run(*args).grads)
    for i, inputs in enumerate(each_microbatch(batch, rng, accumulate_steps)):
        where = "gradient" if accumulate_steps == 1 else f"gradient of microbatch {i}"
        if found := nonfinite_paths(gradient(scale, state.params, state.model_state, *inputs), where):
            return found
    return []


def _loss_alone(loss_fn: LossFn, has_model_state: bool) -> PipelineLoss:
    """`loss_fn` in the form of the gradient pipeline, without its other results, which do not matter here."""

    def pipeline_loss(params: Params, model_state: ModelState, batch: Batch, rng: PRNGKey | None) -> Any:
        out = loss_fn(params, *([model_state] if has_model_state else []), batch, rng)
        loss = check_loss(out[0] if isinstance(out, tuple) else out)
        return loss, (model_state, {}, None)

    functools.update_wrapper(pipeline_loss, loss_fn, updated=())
    return pipeline_loss


@jax.jit
def _counts(arrays: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    """How many entries of each are NaN, and inf; in one program, as each is a reduction over all devices."""
    return [(jnp.isnan(x).sum(), jnp.isinf(x).sum()) for x in arrays]


def _message(divergence: Divergence, nonfinite: Sequence[str]) -> str:
    lines = [f"Training diverged at step {divergence.step}: {divergence.reason}."]
    if nonfinite:
        lines.append(f"Not finite: {_first(nonfinite)}.")
    if divergence.scales:
        history = ", ".join(f"{scale:g} from step {step}" for step, scale in divergence.scales)
        lines.append(f"Loss scale: {history}.")
    lines.append("Three things to try:")
    lines += [f"{i}. {advice}" for i, advice in enumerate(_advice(nonfinite), 1)]
    return "\n".join(lines)


def _advice(nonfinite: Sequence[str]) -> Iterable[str]:
    """Three things to try, the likeliest first."""
    if any(line.startswith("'batch") for line in nonfinite):
        yield "Clean the data: the batch itself is not finite."
    elif any(line.startswith("'params") for line in nonfinite):
        yield "Go back to the last checkpoint whose parameters are finite."
    else:
        yield (
            "Give the modules named above, or all, a wider range: compute in bfloat16 instead of float16, or in "
            "float32, as in PolicyMap({'.*attn': 'float32'}, default=…)."
        )
    yield "Train more gently: a lower learning rate, a longer warm-up, or a smaller norm to clip gradients to."
    yield (
        "Look for a division by zero, log(0) or sqrt(0) in the loss: run the step with jax_debug_nans, and "
        "decorate what needs float32 with mpjax.full_precision."
    )


def _first(lines: Sequence[str], n: int = 3) -> str:
    return ", ".join(lines[:n]) + (f" and {len(lines) - n} more" if len(lines) > n else "")
