"""One piece of work at a time beside the program."""

from __future__ import annotations

import threading

import pytest

from hpctrain.storage.background_writer import BackgroundWriter


def test_work_goes_on_beside_the_program_and_gives_its_result() -> None:
    writer, go = BackgroundWriter(), threading.Event()
    assert writer.wait(0)
    writer.start(lambda: go.wait(30) and 7)
    assert writer.busy
    assert not writer.wait(0.01)
    with pytest.raises(AssertionError, match="one piece"):
        writer.start(lambda: None)
    with pytest.raises(AssertionError, match="not done"):
        writer.result()
    go.set()
    assert writer.wait(30)
    assert writer.result() == 7
    assert writer.seconds > 0


def test_an_error_is_the_callers_and_the_next_work_starts_without_it() -> None:
    writer = BackgroundWriter()
    writer.start(lambda: 1 // 0)
    assert writer.wait(30)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            writer.result()
    writer.start(lambda: None)
    assert writer.wait(30)
    assert writer.result() is None
