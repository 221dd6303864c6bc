"""The training loop, the same for every model and for both commands."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol

import chex
import jax
import numpy as np
import optax

import mpjax
from experiments.placement import Placement
from experiments.tasks import Task

Record = dict[str, Any]
Step = Callable[
    [mpjax.TrainState, chex.ArrayTree, chex.PRNGKey], tuple[mpjax.TrainState, dict[str, jax.Array]]
]
ONE_DEVICE = Placement()


class Observer(Protocol):
    """Watches the loop; its methods are called outside the time that counts for the rate."""

    def logged(self, records: list[Record], rate: float, seconds_left: float) -> None:
        """A few more steps are done; `rate` is in units/s."""

    def state_at(self, state: mpjax.TrainState, batch: chex.ArrayTree) -> None:
        """The state after a validation, with the batch that comes next."""


@dataclasses.dataclass(frozen=True)
class Intervals:
    """Steps from one event to the next."""

    log: int
    evaluate: int
    checkpoint: int | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a training ended.

    Attributes:
      state: after the last step.
      finished: False if it was stopped.
      rate: units/s over this session's steps, without compilation, validation and checkpoints.
      seconds: that the steps took.
      validation: `val_loss` and `val_accuracy` after the last step; empty if it was stopped.
    """

    state: mpjax.TrainState
    finished: bool
    rate: float
    seconds: float
    validation: dict[str, float]


def create_state(
    task: Task, tx: optax.GradientTransformation, loss_scale: mpjax.LossScale, seed: int
) -> mpjax.TrainState:
    """The state before the first step."""
    params, model_state = task.init(seed)
    return mpjax.TrainState.create(
        apply_fn=None,
        params=params,
        tx=tx,
        policy=task.policies,
        loss_scale=loss_scale,
        model_state=model_state,
    )


def make_step(
    task: Task, accumulate_steps: int, shardings: chex.ArrayTree | None = None
) -> jax.stages.Wrapped:
    """Returns `(state, batch, key) -> (state, metrics)`, jitted, which donates its state.

    Args:
      task: model and data.
      accumulate_steps: microbatches per step.
      shardings: of the state, which the step retains; None without a mesh.
    """
    step = mpjax.make_train_step(task.loss, accumulate_steps=accumulate_steps, has_model_state=True)

    def train_step(
        state: mpjax.TrainState, batch: chex.ArrayTree, key: chex.PRNGKey
    ) -> tuple[mpjax.TrainState, dict[str, jax.Array]]:
        return step(state, batch, jax.random.fold_in(key, state.step))

    out: dict[str, Any] = {} if shardings is None else {"out_shardings": (shardings, None)}
    return jax.jit(train_step, donate_argnums=0, **out)


def compile_step(
    task: Task,
    state: mpjax.TrainState,
    key: chex.PRNGKey,
    accumulate_steps: int,
    placement: Placement = ONE_DEVICE,
) -> Step:
    """Compiles the step of `make_step`.

    Args:
      task: model and data.
      state: decides on shapes and dtypes.
      key: every step folds its own number into it.
      accumulate_steps: microbatches per step.
      placement: where state, key and batches are placed.
    """
    step = make_step(task, accumulate_steps, placement.shardings(state))
    return step.lower(state, placement.batch(task, 0, 0), key).compile()


def train(
    task: Task,
    step: Step,
    state: mpjax.TrainState,
    key: chex.PRNGKey,
    *,
    seed: int,
    steps: int,
    intervals: Intervals,
    observer: Observer,
    placement: Placement = ONE_DEVICE,
    save: Callable[[mpjax.TrainState, dict[str, float]], None] | None = None,
    check: Callable[[mpjax.TrainState, list[Record]], None] = lambda state, records: None,
    stop: Callable[[int], bool] = lambda step: False,
) -> Outcome:
    """Trains from the state's step up to `steps`.

    Args:
      task: model and data.
      step: of `compile_step`.
      state: where to start; donated.
      key: for `step`.
      seed: decides on the batches.
      steps: number of the last step.
      intervals: how often to log, validate and save.
      observer: is told what happens.
      placement: where state, key and batches are placed.
      save: stores a state, with the validation of its step; called at checkpoints, at the end and when stopped.
      check: raises if what was logged shows that training has diverged.
      stop: asked after every step, by its number, whether to end early.
    """
    done = first = int(state.step)
    skipped = int(state.skipped)
    seconds, pending, validation, stopped = 0.0, [], {}, False
    started = time.perf_counter()
    while done < steps and not stopped:
        state, metrics = step(state, placement.batch(task, seed, done), key)
        pending.append(metrics)
        done += 1
        last = done == steps
        evaluate = last or done % intervals.evaluate == 0
        checkpoint = intervals.checkpoint is not None and done % intervals.checkpoint == 0
        due = last or evaluate or checkpoint or done % intervals.log == 0
        if due:
            # Here alone the host waits for the device: before `stop`, in which processes may
            # agree, as a reduction that overtook those of the steps would wait for ever.
            jax.block_until_ready(pending)
        stopped = stop(done)
        if not (due or stopped):
            continue
        records = _to_records(jax.device_get(pending), done - len(pending), skipped)
        seconds += time.perf_counter() - started
        skipped, pending = records[-1]["skipped"], []
        rate = (done - first) * task.units_per_step / seconds
        if evaluate:
            validation = task.evaluate(state.params, state.model_state, placement.examples)
            records[-1] |= validation
        observer.logged(records, rate, (steps - done) * seconds / (done - first))
        check(state, records)
        if evaluate:
            observer.state_at(state, task.batch(seed, done))
        if save is not None and (last or stopped or checkpoint):
            save(state, validation if evaluate else {})
        started = time.perf_counter()
    if done == steps and not validation:  # it was killed between its last checkpoint and its summary
        validation = task.evaluate(state.params, state.model_state, placement.examples)
    rate = (done - first) * task.units_per_step / seconds if seconds else 0.0
    return Outcome(state, done == steps, rate, seconds, validation if done == steps else {})


def _to_records(metrics: list[dict[str, np.ndarray]], before: int, skipped: int) -> list[Record]:
    """One record per step, of plain numbers.

    Args:
      metrics: of consecutive steps, on the host.
      before: number of the step before the first of them.
      skipped: steps skipped up to there.
    """
    records = []
    for i, m in enumerate(metrics):
        skipped += not bool(m["finite"])
        counts = {"step": before + i + 1, "skipped": skipped, "finite": bool(m["finite"])}
        records.append({k: float(v) for k, v in m.items()} | counts)
    return records
