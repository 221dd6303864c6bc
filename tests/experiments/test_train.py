"""A run from the command line to its last file."""

import json
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny import TINY_GPT, TINY_RESNET, Command, interrupt_after

from experiments import loop, session
from mpjax.checkpoint import Checkpoints


@pytest.fixture
def final_state(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The states in which trainings end, oldest first."""
    states: list[Any] = []
    train = loop.train

    def recording(*args: Any, **kwargs: Any) -> loop.Outcome:
        outcome = train(*args, **kwargs)
        states.append(jax.device_get(outcome.state))
        return outcome

    monkeypatch.setattr(loop, "train", recording)
    return states


@pytest.mark.parametrize(
    ("argv", "number", "status"),
    [
        ([*TINY_GPT, "--model.dropout", "0.1", "--policy", "mixed_float16"], signal.SIGINT, 130),
        (TINY_RESNET, signal.SIGTERM, 0),
    ],
)
def test_an_interrupted_and_resumed_run_ends_bit_identical_to_an_uninterrupted_one(
    argv: list[str], number: signal.Signals, status: int, command: Command, final_state: list[Any]
) -> None:
    argv = [*argv, "--steps", "9"]
    whole = command(*argv, out="whole")
    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupt_after(6, monkeypatch, number)
        stopped = command(*argv)
    resumed = command(*argv)

    assert (whole.status, stopped.status, resumed.status) == (0, status, 0)
    assert [int(s.step) for s in final_state] == [9, 7, 9]
    for field in ("params", "opt_state", "model_state", "loss_scale", "skipped"):
        a, b = getattr(final_state[0], field), getattr(final_state[2], field)
        assert jax.tree.structure(a) == jax.tree.structure(b)
        jax.tree.map(np.testing.assert_array_equal, a, b)
    assert "Saved step 7 of 9" in stopped.output
    assert f"python -m experiments.train {' '.join(argv)} --out {stopped.directory}" in stopped.output
    assert "going on after step 7 of 9" in resumed.output
    assert whole.steps() == resumed.steps() == list(range(1, 10))
    metrics = [(r.directory / "metrics.jsonl").read_text() for r in (whole, resumed)]
    assert metrics[0] == metrics[1]


def test_after_a_kill_metrics_hold_each_step_once(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [*TINY_GPT, "--steps", "8"]
    with pytest.MonkeyPatch.context() as killing:
        logged = session._Watch.logged

        def logged_then_killed(self: Any, records: Any, *args: Any) -> None:
            logged(self, records, *args)
            if records[-1]["step"] == 6:
                self._metrics._file.write('{"step": 7, "lo')
                self._metrics._file.flush()
                raise ZeroDivisionError("killed")

        killing.setattr(session._Watch, "logged", logged_then_killed)
        with pytest.raises(ZeroDivisionError):
            command(*argv)
    left = (command.directory / "run" / "metrics.jsonl").read_text()
    assert left.endswith('{"step": 7, "lo')
    assert left.count("\n") == 6

    resumed = command(*argv)
    assert "going on after step 4 of 8" in resumed.output
    assert resumed.steps() == list(range(1, 9))


def test_a_run_leaves_config_metrics_checkpoints_plots_and_a_summary(command: Command) -> None:
    run = command(*TINY_GPT, "--steps", "4", "--accumulate-steps", "2")
    assert run.status == 0
    assert {p.relative_to(run.directory).as_posix() for p in run.directory.rglob("*.*")} >= {
        "config.json",
        "metrics.jsonl",
        "summary.json",
        "sample.txt",
        "plots/loss.png",
        "plots/loss_scale.png",
    }
    assert run.config()["policy"] == "p=full,c=bf16,o=full"
    assert run.config()["loss_scale"] == "none"
    summary = json.loads((run.directory / "summary.json").read_text())
    # 256 * 16 embeddings, 16 * 16 positions, 3 norms, 4 * 16 * 16 in attention, an MLP of 64.
    assert summary["parameters"] == 4096 + 256 + 3 * 32 + 1024 + (16 * 64 + 64) + (64 * 16 + 16)
    assert summary["param_bytes"] == 4 * summary["parameters"]
    # AdamW stores two numbers per parameter, and two counters.
    assert summary["optimizer_bytes"] == 8 * summary["parameters"] + 8
    for text in ("validation loss", "tokens/s", "skipped steps", "0 of 4", "activations saved"):
        assert text in run.output


def test_the_same_command_again_says_that_the_run_is_finished(command: Command) -> None:
    argv = [*TINY_RESNET, "--steps", "2"]
    assert command(*argv).status == 0
    again = command(*argv)
    assert again.status == 0
    assert "is finished; train it anew with --resume never" in again.output
    assert "validation accuracy" in again.output


def test_a_run_that_was_killed_before_its_summary_still_gets_one(command: Command) -> None:
    argv = [*TINY_RESNET, "--steps", "2"]
    run = command(*argv)
    before = json.loads((run.directory / "summary.json").read_text())
    (run.directory / "summary.json").unlink()
    assert command(*argv).status == 0
    after = json.loads((run.directory / "summary.json").read_text())
    assert after["val_loss"] == before["val_loss"]


def test_another_option_for_the_same_directory_is_refused_by_name(command: Command) -> None:
    command(*TINY_RESNET, "--steps", "2")
    other = command(*TINY_RESNET, "--steps", "2", "--lr", "0.5")
    assert other.status == 2
    assert "holds a run with other options: lr was 0.004, is 0.5. Choose another --out" in other.error
    assert command(*TINY_RESNET, "--steps", "2", "--lr", "0.5", "--resume", "never").status == 0


def test_a_checkpoint_of_another_policy_is_refused(command: Command) -> None:
    run = command(*TINY_RESNET, "--steps", "2", "--policy", "float32")
    edited = json.dumps(run.config() | {"policy": "p=full,c=bf16,o=full"})
    (run.directory / "config.json").write_text(edited)
    other = command(*TINY_RESNET, "--steps", "2", "--policy", "mixed_bfloat16")
    assert other.status == 2
    assert "was trained with policy 'p=full,c=full,o=full', this run asks for 'p=full,c=bf16" in other.error


def test_the_last_three_checkpoints_stay_and_the_best(command: Command) -> None:
    run = command(*TINY_RESNET, "--steps", "6", "--checkpoint-every", "1", "--eval-every", "2", "--lr", "0.5")
    with Checkpoints(run.directory / "checkpoints", metric="val_loss") as checkpoints:
        assert checkpoints.best is not None
        assert checkpoints.steps == sorted({checkpoints.best, 4, 5, 6})
        assert set(checkpoints.info(6).metrics) == {"val_loss", "val_accuracy"}


def test_a_policy_map_comes_from_a_json_file_and_goes_into_the_config(
    command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "map.json"
    path.write_text('{".*attn": "p=f32,c=f32,o=bf16", "*": "mixed_float16"}')
    run = command(*TINY_GPT, "--steps", "2", "--policy", str(path))
    assert run.status == 0
    assert run.config()["policy"] == {".*attn": "p=full,c=full,o=bf16", "*": "p=full,c=f16,o=full"}
    assert run.config()["loss_scale"] == "dynamic"


@pytest.mark.parametrize(
    ("policy", "argv"),
    [("float16", TINY_GPT), pytest.param("bfloat16", TINY_RESNET, marks=pytest.mark.slow)],
)
def test_all_weights_in_16_bits_train_with_a_float32_loss(
    policy: str, argv: list[str], command: Command
) -> None:
    run = command(*argv, "--steps", "2", "--policy", policy)
    assert run.status == 0
    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["param_bytes"] == 2 * summary["parameters"]
