"""The models learn and name no dtype; the data is the same for the same seed and step."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from experiments import config, data, loop, measure
from experiments.models import GPT, GPTSize
from experiments.tasks import make_optimizer, make_task

TINY = GPTSize(layers=1, width=16, heads=2, context=16)


class Silent:
    """An observer that records the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_at(self, state: object, batch: object) -> None: ...

    def logged(self, records: list[loop.Record], rate: float, seconds_left: float) -> None:
        self.losses += [r["loss"] for r in records]


def test_models_name_no_dtype() -> None:
    for path in Path("experiments/models").glob("*.py"):
        code = path.read_text()
        assert not re.search(r"dtype|float\d|bfloat|astype|jnp\.(int|bool|half)", code), path


def test_the_loss_of_a_tiny_gpt_falls_by_a_nat_in_60_steps() -> None:
    options = config.GPTRun(model=TINY, steps=60, batch_size=8, lr=0.02, warmup_steps=5, eval_every=60)
    policies = mpjax.as_policy_map("mixed_float16")
    task = make_task(options, policies)
    scale = mpjax.loss_scale_for(policies)
    state = loop.create_state(task, make_optimizer(options), scale, 0)
    observer = Silent()
    outcome = loop.train(
        task,
        loop.compile_step(task, state, jax.random.key(0), accumulate_steps=1),
        state,
        jax.random.key(0),
        seed=0,
        steps=60,
        intervals=loop.Intervals(log=60, evaluate=60),
        observer=observer,
    )
    assert observer.losses[0] == pytest.approx(np.log(256), abs=0.1)
    assert outcome.validation["val_loss"] < np.log(256) - 1
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(outcome.state.params))


def test_a_gpt_sees_no_later_byte() -> None:
    model = GPT(TINY, rngs=nnx.Rngs(0))
    tokens = jnp.arange(16)[None]
    changed = tokens.at[0, 9].set(200)
    same = jnp.all(model(tokens) == model(changed), axis=(0, 2))
    assert same.tolist() == [True] * 9 + [False] * 7


def test_dropout_needs_a_key_to_drop() -> None:
    size = GPTSize(layers=1, width=16, heads=2, context=16, dropout=0.5)
    model, tokens = GPT(size, rngs=nnx.Rngs(0)), jnp.arange(16)[None]
    assert (model(tokens) == model(tokens)).all()
    assert (model(tokens) != model(tokens, jax.random.key(1))).any()


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    text = data.load_text(None, 0.1, 16)
    digits = data.load_digits()
    for batch in (
        lambda seed, step: text.batch(seed, step, 4, 16),
        lambda seed, step: digits.batch(seed, step, 4, shift=1)[0],
    ):
        np.testing.assert_array_equal(batch(3, 5), batch(3, 5))
        assert (batch(3, 5) != batch(3, 6)).any()
        assert (batch(3, 5) != batch(4, 5)).any()


def test_validation_text_is_never_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)))
    text = data.load_text(path, 0.2, 10)
    seen = {int(b) for step in range(50) for b in text.batch(0, step, 8, 10).ravel()}
    assert seen == set(range(80))
    assert text.validation_windows(10, 4).min() == 80


def test_a_fifth_of_the_digits_is_held_out_class_by_class() -> None:
    digits = data.load_digits()
    assert (len(digits.images), len(digits.test_images)) == (1437, 360)
    assert np.bincount(digits.test_labels).min() >= 35
    held_out = {image.tobytes() for image in digits.test_images}
    assert sum(image.tobytes() in held_out for image in digits.images) <= 1


def test_a_shift_of_zero_leaves_the_images_unchanged() -> None:
    digits = data.load_digits()
    images, labels = digits.batch(0, 0, 8, shift=0)
    known = {image.tobytes(): label for image, label in zip(digits.images, digits.labels, strict=True)}
    assert [known[image.tobytes()] for image in images] == labels.tolist()


def test_activation_bytes_count_what_is_saved_for_the_backward_pass() -> None:
    class Sine:
        policies = mpjax.as_policy_map("float32")

        def loss(self, params: jax.Array, model_state: None, batch: jax.Array, rng: object) -> tuple:
            return jnp.sum(jnp.sin(batch * 2.0 * params)), (None, {})

    state = mpjax.TrainState.create(
        apply_fn=None, params={"w": jnp.ones(10)}, tx=make_optimizer(config.GPTRun())
    )
    task = Sine()
    task.loss = lambda p, m, b, r: (jnp.sum(jnp.sin(b * 2.0 * p["w"])), (m, {}))  # type: ignore[method-assign]
    # cos(2 b w) and 2 b, ten float32 each; b and w were there before.
    assert measure.activation_bytes(task, state, jnp.ones(10), jax.random.key(0)) == 80  # type: ignore[arg-type]


def test_bfloat16_saves_more_than_a_quarter_of_the_activations() -> None:
    options = config.GPTRun(model=TINY, batch_size=4)
    saved = {}
    for policy in ("float32", "mixed_bfloat16"):
        task = make_task(options, mpjax.as_policy_map(policy))
        state = loop.create_state(task, make_optimizer(options), mpjax.NoOpLossScale(), 0)
        saved[policy] = measure.activation_bytes(task, state, task.batch(0, 0), jax.random.key(0))
    assert saved["mixed_bfloat16"] < 0.75 * saved["float32"]
