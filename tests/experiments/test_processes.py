"""One run in two real processes of two devices each, which find each other on 127.0.0.1."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import EIGHT_ROWS, REDUCTION_NOISE, Command, interrupt_after, losses

from experiments.processes import any_process, on_main
from mpjax.checkpoint import Checkpoints

QUICK = os.environ | {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"]),
}
# What Gloo prints whenever processes find each other, piece by piece and from several threads at once.
GLOO = re.compile(
    r"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :|\d+"
)
# Seconds that a test waits for processes to end, so that one that hangs fails the test.
LIMIT = 300


# The ports among which JAX chooses that of a SLURM job, by its number.
SLURM_PORTS = range(2**16 - 2**12, 2**16)


def free_port() -> int:
    for port in random.sample(SLURM_PORTS, 100):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


def slurm_environment(port: int, process: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(SLURM_PORTS.index(port)),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(process),
        "SLURM_LOCALID": str(process),
    }


class Both:
    """Two processes that run the same command."""

    def __init__(self, *argv: str, out: Path, slurm: bool = False) -> None:
        """Starts them; with `slurm` they learn of each other from the environment that `srun` sets."""
        command = [sys.executable, "-u", "-m", "experiments.train", *EIGHT_ROWS, *argv, "--out", str(out)]
        command += ["--virtual-devices", "2", "--processes", "auto" if slurm else "2"]
        port = free_port()
        self.said = ""
        self.processes = [
            subprocess.Popen(
                command
                if slurm
                else [*command, "--coordinator", f"127.0.0.1:{port}", "--process-id", str(i)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=QUICK | slurm_environment(port, i) if slurm else QUICK,
            )
            for i in range(2)
        ]

    def __enter__(self) -> "Both":
        return self

    def __exit__(self, *exc: object) -> None:
        for p in self.processes:
            p.kill()
            p.communicate()

    def wait_for(self, text: str) -> None:
        """Reads what process 0 prints up to a line that starts with a text."""
        out = self.processes[0].stdout
        assert out is not None
        for line in out:
            self.said += line
            if line.startswith(text):
                return
        pytest.fail(f"process 0 ended without {text!r}: {self.said}{self.processes[0].communicate()[1]}")

    def end(self) -> tuple[list[int], list[str], list[str]]:
        """Exit statuses, output and error output of both."""
        ended = [p.communicate(timeout=LIMIT) for p in self.processes]
        outs, errors = zip(*ended, strict=True)
        return [p.returncode for p in self.processes], [self.said + outs[0], outs[1]], list(errors)


def test_they_give_the_curve_of_one_device_stop_together_resume_and_report_when_one_is_killed(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test, as starting two processes takes long."""
    endless = ["--steps", "1000000", "--eval-every", "1000000", "--checkpoint-every", "1000000"]
    out = command.directory / "run"
    with Both(*endless, "--mesh", "data=2,model=2", out=out) as both:
        both.wait_for("compiled the step")
        both.processes[1].send_signal(signal.SIGTERM)
        statuses, (said, silent), errors = both.end()
    assert statuses == [0, 0], errors
    with Checkpoints(out / "checkpoints") as checkpoints:
        (saved,) = checkpoints.steps
    assert f"Saved step {saved} of 1000000 in {out}" in said
    assert not GLOO.sub("", silent).strip()

    interrupt_after(6, monkeypatch, signal.SIGTERM)
    alone = losses(command(*EIGHT_ROWS, *endless, out="alone").directory)
    found = losses(out)
    assert len(found) == saved
    n = min(len(alone), saved)
    np.testing.assert_allclose(found[:n], alone[:n], rtol=REDUCTION_NOISE)

    with Both(*endless, "--mesh", "data=2,model=2", out=out, slurm=True) as both:
        both.wait_for(f"going on after step {saved} of 1000000")
        both.wait_for("compiled the step")
        both.processes[1].kill()
        (status, _), _, (error, _) = both.end()
    assert status == 1
    assert "error: process 0 could not go on, most likely as another process of this run is gone" in error
    assert (
        "Start all of them again to go on from the last checkpoint:\n  python -m experiments.train" in error
    )
    with Checkpoints(out / "checkpoints") as checkpoints:
        assert checkpoints.steps == [saved]


def test_alone_a_process_agrees_with_itself() -> None:
    assert any_process(True)
    assert not any_process(False)
    done: list[int] = []
    on_main(lambda: done.append(1))
    assert done == [1]
