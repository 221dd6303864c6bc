"""A task pairs a model with its data. The loop, and `compare`, know nothing else of either."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpjax
from experiments import config, data
from experiments.models import GPT, ResNet
from experiments.sampling import continue_text, count_letters, to_text

VALIDATION_WINDOWS = 256
EXAMPLES_PER_EVALUATION = 64
SAMPLE_LENGTH = 600
Place = Callable[[np.ndarray], Any]


class Task(Protocol):
    """What is trained, and on what.

    Attributes:
      unit: what the rate counts, such as tokens.
      units_per_step: how many a step takes.
      batch_size: rows of a batch.
      policies: what the model runs under.
      fingerprint: tells one data set from another.
    """

    unit: str
    units_per_step: int
    batch_size: int
    policies: mpjax.PolicyMap
    fingerprint: str

    def init(self, seed: int) -> tuple[Any, Any]:
        """Initial parameters and model state."""

    def loss(self, params: Any, model_state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        """`(loss, (model_state, metrics))`, as `mpjax.make_train_step` wants it."""

    def batch(self, seed: int, step: int, rows: data.Rows = slice(None)) -> Any:
        """The batch of a step, or some of its rows."""

    def evaluate(self, params: Any, model_state: Any, place: Place = np.asarray) -> dict[str, float]:
        """`val_loss` and `val_accuracy`; `place` puts examples where the devices want them."""

    def sample(self, params: Any, seed: int) -> tuple[str, str] | None:
        """A beginning and how the model goes on with it, if it writes."""


@mpjax.full_precision
def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean loss in nats and share of right guesses, both float32, in any policy."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), jnp.mean(logits.argmax(-1) == labels)


class GPTTask:
    """Next-byte prediction with the `flax.nnx` transformer."""

    unit = "tokens"

    def __init__(self, options: config.GPTTraining, policies: mpjax.PolicyMap) -> None:
        """Reads the text.

        Raises:
          UsageError: if the text cannot be used.
          ValueError: if a pattern of the policy map governs no module.
        """
        self.options, self.policies = options, policies
        size = options.model
        self.text = data.load_text(options.data.path, options.data.validation, size.context)
        self.fingerprint = self.text.fingerprint
        self.batch_size = options.batch_size
        self.units_per_step = options.batch_size * size.context
        self.graphdef, _, self.rest = self._make(0)
        self._evaluate = jax.jit(mpjax.autocast(self._validation_metrics, policies))

    def init(self, seed: int) -> tuple[nnx.State, None]:
        return self._make(seed)[1], None

    def loss(self, params: Any, model_state: None, batch: Any, rng: Any) -> tuple[Any, Any]:
        tokens = batch
        key = rng if self.options.model.dropout else None
        loss, accuracy = cross_entropy(self._model(params)(tokens[:, :-1], key), tokens[:, 1:])
        return loss, (model_state, {"accuracy": accuracy})

    def batch(self, seed: int, step: int, rows: data.Rows = slice(None)) -> np.ndarray:
        options = self.options
        return self.text.batch(seed, step, options.batch_size, options.model.context, rows)

    def evaluate(self, params: Any, model_state: None = None, place: Place = np.asarray) -> dict[str, float]:
        windows = self.text.validation_windows(self.options.model.context, VALIDATION_WINDOWS)
        return _average(functools.partial(self._evaluate, params), place, windows)

    def sample(self, params: Any, seed: int) -> tuple[str, str]:
        windows = self.text.validation_windows(self.options.model.context, VALIDATION_WINDOWS)
        prompt = max(windows[:, 1:], key=count_letters)

        def forward(params: Any, tokens: jax.Array) -> jax.Array:
            return self._model(params)(tokens)

        forward = mpjax.autocast(forward, self.policies)
        written = continue_text(forward, params, prompt, jax.random.key(seed), SAMPLE_LENGTH)
        return to_text(prompt), to_text(written)

    def _make(self, seed: int) -> tuple[Any, Any, Any]:
        """What stays the same in every seed, the parameters, and the rest."""
        model = GPT(self.options.model, rngs=nnx.Rngs(seed))
        parts: Any = nnx.split(mpjax.nnx.apply_policy(model, self.policies), nnx.Param, ...)
        return parts

    def _model(self, params: Any) -> GPT:
        return nnx.merge(self.graphdef, params, self.rest)

    def _validation_metrics(self, params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        return cross_entropy(self._model(params)(tokens[:, :-1]), tokens[:, 1:])


class ResNetTask:
    """Digit recognition with the `flax.linen` residual network."""

    unit = "images"

    def __init__(self, options: config.ResNetTraining, policies: mpjax.PolicyMap) -> None:
        """Loads the digits."""
        self.options, self.policies = options, policies
        self.digits = data.load_digits()
        self.fingerprint = self.digits.fingerprint
        self.batch_size = self.units_per_step = options.batch_size
        self.model = ResNet(options.model, classes=10)
        self._init = jax.jit(mpjax.autocast(self.model.init, policies, cast_output=False))
        self._evaluate = jax.jit(mpjax.autocast(self._validation_metrics, policies))

    def init(self, seed: int) -> tuple[Any, Any]:
        variables = self._init(jax.random.key(seed), self.digits.images[:1])
        return variables["params"], variables["batch_stats"]

    def loss(self, params: Any, model_state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        del rng  # nothing in the model is random
        images, labels = batch
        variables = {"params": params, "batch_stats": model_state}
        logits, updated = self.model.apply(variables, images, train=True, mutable=["batch_stats"])
        loss, accuracy = cross_entropy(logits, labels)
        return loss, (updated["batch_stats"], {"accuracy": accuracy})

    def batch(self, seed: int, step: int, rows: data.Rows = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        return self.digits.batch(seed, step, self.options.batch_size, self.options.data.shift, rows)

    def evaluate(self, params: Any, model_state: Any, place: Place = np.asarray) -> dict[str, float]:
        evaluate = functools.partial(self._evaluate, params, model_state)
        return _average(evaluate, place, self.digits.test_images, self.digits.test_labels)

    def sample(self, params: Any, seed: int) -> None:
        del params, seed

    def _validation_metrics(
        self, params: Any, model_state: Any, images: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        variables = {"params": params, "batch_stats": model_state}
        logits: Any = self.model.apply(variables, images)
        return cross_entropy(logits, labels)


def make_task(options: config.Training, policies: mpjax.PolicyMap) -> Task:
    """The task that options describe.

    Args:
      options: `GPTTraining` or `ResNetTraining`.
      policies: what the model runs under.
    """
    if isinstance(options, config.GPTTraining):
        return GPTTask(options, policies)
    assert isinstance(options, config.ResNetTraining)
    return ResNetTask(options, policies)


def make_optimizer(options: config.Training) -> optax.GradientTransformation:
    """AdamW with a warm-up, a cosine and clipping."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if options.warmup_steps else options.lr,
        peak_value=options.lr,
        warmup_steps=options.warmup_steps,
        decay_steps=max(options.steps, options.warmup_steps + 1),
        end_value=options.lr * options.final_lr,
    )
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.adamw(schedule, b2=0.98, weight_decay=options.weight_decay),
    )


def _average(evaluate: Any, place: Place, *arrays: np.ndarray) -> dict[str, float]:
    """Loss and accuracy over all examples, in batches of equal size but for the last."""
    total, count = np.zeros(2), len(arrays[0])
    for start in range(0, count, EXAMPLES_PER_EVALUATION):
        batch = [place(array[start : start + EXAMPLES_PER_EVALUATION]) for array in arrays]
        total += np.array(jax.device_get(evaluate(*batch)), np.float64) * len(batch[0])
    loss, accuracy = total / count
    return {"val_loss": float(loss), "val_accuracy": float(accuracy)}
