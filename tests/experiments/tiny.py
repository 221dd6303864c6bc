"""Commands that run in this process, on models small enough for a laptop."""

import dataclasses
import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import session, train

TINY_GPT = shlex.split(
    "gpt --model.layers 1 --model.width 16 --model.heads 2 --model.context 16 --batch-size 4 "
    "--warmup-steps 2 --eval-every 4 --checkpoint-every 4 --log-every 2 --lr 0.01"
)
TINY_RESNET = shlex.split(
    "resnet --model.stages 1 --model.width 4 --batch-size 8 --warmup-steps 2 --eval-every 4 "
    "--checkpoint-every 4 --log-every 2"
)
# For meshes. Their curves differ by sums in another order: relative, on the loss of any of six steps.
EIGHT_ROWS = [*TINY_GPT, "--batch-size", "8", "--policy", "float32"]
REDUCTION_NOISE = 2e-6


def losses(directory: Path) -> np.ndarray:
    """The training losses that a run has written, step by step."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return np.array([json.loads(line)["loss"] for line in lines])


@dataclasses.dataclass
class Result:
    """The exit status, the output and the directory of a command."""

    status: int
    output: str
    error: str
    directory: Path

    def config(self) -> dict[str, Any]:
        return json.loads((self.directory / "config.json").read_text())

    def steps(self) -> list[int]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]


class Command:
    """Calls `experiments.train` with an output directory of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str], directory: Path) -> None:
        self._capsys, self.directory = capsys, directory

    def __call__(self, *argv: str, out: str = "run") -> Result:
        directory = self.directory / out
        try:
            status = train.main([*argv, "--out", str(directory)])
        except SystemExit as e:  # tyro's own
            status = int(e.code or 0)
        captured = self._capsys.readouterr()
        return Result(status, captured.out, captured.err, directory)


def interrupt_after(
    step: int, monkeypatch: pytest.MonkeyPatch, number: signal.Signals = signal.SIGINT
) -> None:
    """Sends Ctrl-C, or another signal, in the logging point of a step."""
    logged = session._Watch.logged

    def logged_then_interrupted(self: Any, records: Any, *args: Any) -> None:
        logged(self, records, *args)
        if records[-1]["step"] == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(session._Watch, "logged", logged_then_interrupted)
