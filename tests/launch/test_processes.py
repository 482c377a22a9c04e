"""The state of other processes, and whether a process that a rank depends on is gone, stopped, or suspended by a person."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from hpctrain.launch import processes
from hpctrain.launch.processes import ProcessStatus, WatchedProcess, launchers, status_of


def test_the_status_of_this_process_and_of_none() -> None:
    status = status_of(os.getpid())
    assert status is not None
    assert (status.parent, status.group, status.stopped, status.dead) == (os.getppid(), os.getpgrp(), False, False)
    assert status_of(2**22 + 1) is None
    assert launchers(None) == ()


@pytest.mark.job
def test_a_process_is_watched_in_looks() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True) as child:
        watched = WatchedProcess(child.pid)
        child.send_signal(signal.SIGSTOP)
        _until(child.pid, "T")
        for _ in range(3):
            watched.look(1.0)
        assert (watched.gone, watched.stopped_seconds) == (False, 3.0)
        child.send_signal(signal.SIGCONT)
        _until(child.pid, "RS")
        watched.look(1.0)
        assert watched.stopped_seconds == 0.0
        child.kill()
        _until(child.pid, "Z")
        watched.look(1.0)
        assert watched.gone


def _until(process: int, states: str) -> None:
    end = time.monotonic() + 20
    while (status := status_of(process)) is not None and status.state not in states:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("terminal", "foreground", "leader", "suspended"),
    [(5, 77, "T", True), (0, -1, "T", False), (5, 10, "T", False), (5, 77, "S", False)],
)
def test_one_that_a_person_has_suspended_is_told_from_one_that_is_stopped(
    monkeypatch: pytest.MonkeyPatch, terminal: int, foreground: int, leader: str, suspended: bool
) -> None:
    monkeypatch.setattr(processes, "status_of", lambda process: ProcessStatus(leader, 1, 10, terminal, foreground, 0))
    assert processes._is_suspended_at_terminal(ProcessStatus("T", 10, 10, terminal, foreground, 0)) == suspended


def test_one_that_the_system_hides_is_never_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "status_of", lambda process: None)
    watched = WatchedProcess(1)
    watched.look(1.0)
    assert not watched.gone
