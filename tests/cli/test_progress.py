"""How far a command is: lines in a log, a bar on a terminal."""

import contextlib
import io
import sys
import time

import pytest

from hpctrain.cli.progress import LINE_SECONDS, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_has_a_line_now_and_then(capsys):
    now = [0.0]
    with progress("converting photos", 5000, clock=lambda: now[0]) as advance:
        for _ in range(5):
            now[0] += LINE_SECONDS / 2
            advance(1000)
    assert capsys.readouterr().err.splitlines() == [
        "converting photos: 2,000 of 5,000 images, 40.0%",
        "converting photos: 4,000 of 5,000 images, 80.0%",
    ]


def test_what_is_done_at_once_says_nothing(capsys):
    with progress("converting photos", 5) as advance:
        advance(5)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("fails", [False, True])
def test_a_terminal_has_a_bar_of_which_nothing_stays(monkeypatch, fails):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with contextlib.suppress(ZeroDivisionError), progress("checking a.h5", 4) as advance:
        advance(3)
        time.sleep(0.3)  # until it was drawn
        1 / (0 if fails else 1)
    assert "checking a.h5" in terminal.getvalue()
    assert " 75%" in terminal.getvalue()
    assert "images/s" in terminal.getvalue()
    assert "\x1b[2K" in terminal.getvalue()[terminal.getvalue().rindex("images/s") :], "the line is erased"
