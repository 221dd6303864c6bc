"""Requests to stop, of one process among several."""

import os
import signal

import jax
import pytest

from experiments import processes
from experiments.interrupt import Stop


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)


@pytest.mark.usefixtures("two_processes")
def test_processes_agree_at_every_nth_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(processes, "any_process", lambda flag: asked.append(flag) or True)
    with Stop(lambda text: None, every=3) as stop:
        assert [stop.after(step) for step in (1, 2, 3)] == [False, False, True]
    assert asked == [False]


@pytest.mark.usefixtures("two_processes")
def test_a_signal_that_comes_while_they_agree_counts_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(flag: bool) -> bool:
        if not flag:
            os.kill(os.getpid(), signal.SIGTERM)
        return flag

    monkeypatch.setattr(processes, "any_process", interrupted)
    said: list[str] = []
    with Stop(said.append) as stop:
        assert [stop.after(step) for step in (1, 2)] == [False, True]
        assert stop.status == 0
    assert said == ["Asked to stop (SIGTERM): saving after this step."]


def test_ctrl_c_ends_with_the_status_that_a_shell_expects_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stop(lambda text: None) as stop:
        assert not stop.after(1)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.after(2)
    assert stop.status == 130
    assert signal.getsignal(signal.SIGTERM) == before
