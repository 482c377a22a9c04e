"""Marks identify processes."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

import pytest

from hpctrain.launch import process_mark
from hpctrain.launch.process_mark import ProcessMark


def test_a_mark_is_read_back_as_it_is_written() -> None:
    own = process_mark.own()
    assert ProcessMark.parse(str(own)) == own
    assert ProcessMark.parse("old") is None
    assert ProcessMark.parse("12-34@") is None
    assert own.lives
    assert replace(own, begun="1").lives is False  # the number has come again
    assert replace(own, place="other").lives is None


@pytest.mark.job
def test_a_process_that_has_ended_is_dead_before_its_parent_asks() -> None:
    child = subprocess.Popen(["true"])
    begun = process_mark.begun(child.pid) or "0"
    mark = ProcessMark(child.pid, begun, process_mark.place())
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert mark.lives is False
    child.wait()
    assert mark.lives is False
