"""The bar of a training and of passes over samples: one line, drawn again, that fits the terminal."""

from __future__ import annotations

import io
import re
import sys
from itertools import count

import pytest
from rich.console import Console

from hpctrain.storage.run_directory import RunDirectory
from hpctrain.train.console_reporter import ConsoleReporter, ProgressStyle
from hpctrain.train.metrics import RunningSums
from hpctrain.train.progress_bar import ProgressBar, pass_on_stderr


def _frames(output: io.StringIO) -> list[str]:
    """What the line showed, one after the other."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue()).replace("\r", "\n")
    return [frame for frame in text.split("\n") if frame.strip()]


def _terminal(width: int) -> tuple[io.StringIO, Console]:
    output = io.StringIO()
    return output, Console(file=output, force_terminal=True, width=width)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_pass_takes_the_line_and_gives_it_back(width: int) -> None:
    output, console = _terminal(width)
    bar = ProgressBar(console, count().__next__)
    bar.begin("training", 100)
    bar.show("epoch 1/2", 50, [(0, "loss 1.0")])
    with bar.pass_over("evaluation", 200) as advance:
        advance(50)
        bar._progress.refresh()
        during = _frames(output)[-1]
    bar.close()
    assert during.startswith("evaluation")
    assert "25%" in during
    assert "left" in during
    assert ("images/s" in during) == (width >= 80)
    assert "epoch" not in during
    assert _frames(output)[-1].startswith("epoch 1/2")
    assert "loss 1.0" in _frames(output)[-1]
    assert max(map(len, _frames(output))) <= width


def test_a_pass_that_fails_gives_the_line_back() -> None:
    output, console = _terminal(80)
    bar = ProgressBar(console)
    bar.begin("training", 100)
    with pytest.raises(ZeroDivisionError), bar.pass_over("evaluation", 200):
        raise ZeroDivisionError
    bar.close()
    assert _frames(output)[-1].startswith("training")


@pytest.mark.parametrize("style", ["bar", "lines", "none"])
def test_an_evaluation_is_in_the_bar_and_in_no_line(tmp_path, style: ProgressStyle) -> None:
    directory = RunDirectory.create(tmp_path, "run", config="a: 1\n", versions={}, git={})
    output, console = _terminal(80)
    reporter = ConsoleReporter(directory, console=console, style=style)
    reporter.start(2, 20, 0, 40)
    reporter.step(1, 1, RunningSums(loss=5.0, top1=2, top5=3, count=4), 0.1, 1234.0)
    before = output.getvalue()
    with reporter.evaluation(200) as advance:
        for done in range(0, 200, 10):
            advance(done)
        if reporter._bar is not None:
            reporter._bar._progress.refresh()
    during = output.getvalue()[len(before) :]
    reporter.close()
    assert ("evaluation" in during) == (style == "bar")
    assert style == "bar" or during == ""


@pytest.mark.parametrize(("style", "visible"), [("none", True), ("bar", False), (None, True)])
def test_stderr_that_is_no_terminal_stays_empty(capsys, style, visible: bool) -> None:
    with pass_on_stderr(style, 10, visible=visible, description="prediction") as advance:
        advance(5)
        print("a line")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("a line\n", "")


def test_a_bar_on_stderr_leaves_stdout_as_it_is(capsys) -> None:
    stdout = sys.stdout
    with pass_on_stderr("bar", 10, visible=True, description="prediction") as advance:
        advance(5)
        print("a line")
        assert sys.stdout is stdout
    captured = capsys.readouterr()
    assert captured.out == "a line\n"
    assert "prediction" in captured.err
