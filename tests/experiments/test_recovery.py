"""When precision fails, and when the disk is full."""

import json
import resource
from collections.abc import Iterator
from typing import Any

import pytest
from tiny import TINY_GPT, Command

from experiments import session

# Weights of 150 after step 2 give matmuls whose results overflow float16, but not float32.
FAILING = [*TINY_GPT, "--steps", "6", "--lr", "300", "--policy", "mixed_float16", "--checkpoint-every", "2"]


def test_a_run_that_diverges_ends_with_an_error_that_names_paths_scales_and_what_to_try(
    command: Command,
) -> None:
    run = command(*FAILING)
    assert run.status == 1
    assert run.error.startswith(
        "error: Training diverged at step 3: the loss is nan.\nNot finite: 'gradient/blocks/0"
    )
    assert "Loss scale: 32768 from step 1.\nThree things to try:\n1. " in run.error
    assert "--on-divergence fallback --fallback-policy float32" in run.error
    assert [p.name for p in (run.directory / "checkpoints").iterdir()] == ["2"]


def test_a_fallback_goes_on_from_the_last_good_checkpoint_under_another_policy_and_says_so(
    command: Command,
) -> None:
    argv = [*FAILING, "--on-divergence", "fallback"]
    run = command(*argv)
    assert run.status == 0, run.error
    assert "Going back to step 2, and on under the fallback policy p=full,c=full,o=full." in run.output
    assert "going on after step 2 of 6" in run.output
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r.get("fallback"), r["loss_scale"]) for r in lines] == [
        *((step, None, 32768.0) for step in (1, 2)),
        *((step, 1, 1.0) for step in (3, 4, 5, 6)),
    ]
    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["fallback"] == {
        "policy": "p=full,c=full,o=full",
        "diverged_at": 3,
        "reason": "the loss is nan",
        "from_step": 2,
    }
    assert "│ fallback" in run.output

    (run.directory / "summary.json").unlink()  # as if it had been killed before
    assert command(*argv).status == 0
    assert json.loads((run.directory / "summary.json").read_text())["fallback"] == summary["fallback"]


@pytest.fixture
def full_disk_in_step_4(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From step 4 to step 5, no file may grow beyond 20 kB, which fails like a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    logged = session._Watch.logged

    def logged_on_a_full_disk(self: Any, records: Any, *args: Any) -> None:
        logged(self, records, *args)
        soft = 20_000 if records[-1]["step"] == 4 else limits[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, limits[1]))

    monkeypatch.setattr(session._Watch, "logged", logged_on_a_full_disk)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# The other writes that tensorstore had begun end after orbax has closed the loop they report to.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("full_disk_in_step_4")
def test_a_checkpoint_that_cannot_be_saved_is_reported_and_training_goes_on(command: Command) -> None:
    run = command(*TINY_GPT, "--steps", "6", "--checkpoint-every", "2", "--log-every", "1")
    assert run.status == 0
    assert "warning: The checkpoint of step 4 could not be saved" in run.output
    assert "File too large" in run.output
    assert "The last one that is whole is of step 2." in run.output
    assert sorted(p.name for p in (run.directory / "checkpoints").iterdir() if p.name.isdigit()) == ["2", "6"]
