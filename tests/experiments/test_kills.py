"""Runs that are killed without a warning, at random moments and in the middle of a save.

`MPJAX_KILLS=25 python -m pytest tests/experiments/test_kills.py -s` kills more often than by default.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tiny import TINY_GPT

KILLS = int(os.environ.get("MPJAX_KILLS", "1"))
INTERVAL = 4
RUN = [*TINY_GPT, "--model.dropout", "0.1", "--policy", "mixed_float16", "--steps", "100000"]
RUN += ["--eval-every", "100000", "--log-every", "1", "--checkpoint-every", str(INTERVAL)]


class Life:
    """A process that trains until it is killed."""

    def __init__(self, out: Path, cache: Path) -> None:
        environment = os.environ | {
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        }
        command = [sys.executable, "-m", "experiments.train", *RUN, "--out", str(out)]
        self.out = out
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.said = ""
        while "compiled the step" not in self.said:
            line = self.process.stdout.readline()
            assert line, self.said
            self.said += line

    @property
    def resumed_at(self) -> int:
        found = re.search(r"going on after step (\d+)", self.said)
        return int(found[1]) if found else 0

    def logged(self) -> list[dict[str, Any]]:
        """The steps in metrics.jsonl; a line that the kill cut off does not count."""
        whole = (self.out / "metrics.jsonl").read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def wait_for(self, steps: int, *, saving: bool) -> None:
        """Returns when a number of steps more is done, and with `saving` in the middle of the next save."""
        checkpoints = self.out / "checkpoints"
        while len(self.logged()) < self.resumed_at + steps:
            assert self.process.poll() is None, self.said
            time.sleep(0.001)
        while saving and not list(checkpoints.glob("*.orbax-checkpoint-tmp*")):
            assert self.process.poll() is None, self.said
            time.sleep(0.0001)

    def end(self, number: signal.Signals) -> str:
        self.process.send_signal(number)
        rest, _ = self.process.communicate()
        return rest


def test_every_killed_run_goes_on_and_loses_one_interval_at_most(tmp_path: Path) -> None:
    rng, cache, lost = random.Random(0), tmp_path / "cache", []
    life = Life(tmp_path / "killed", cache)
    for kill in range(KILLS):
        life.wait_for(rng.randrange(3 * INTERVAL), saving=kill % 2 == 0)
        for _ in range(rng.randrange(3)):
            time.sleep(0.01)  # later in the save, or after it
        life.end(signal.SIGKILL)
        done = len(life.logged())
        life = Life(tmp_path / "killed", cache)
        assert "damaged" not in life.said
        assert life.resumed_at % INTERVAL == 0
        lost.append(done - life.resumed_at)
    assert max(lost) <= INTERVAL
    life.wait_for(1, saving=False)
    assert "Saved step" in life.end(signal.SIGTERM)
    assert life.process.returncode == 0
    killed = life.logged()
    print(f"{KILLS} kills in {len(killed)} steps; steps lost: {lost}")

    # To the last bit: a loss depends on every parameter of its step.
    whole = Life(tmp_path / "whole", cache)
    whole.wait_for(len(killed), saving=False)
    whole.end(signal.SIGTERM)
    assert killed == whole.logged()[: len(killed)]
