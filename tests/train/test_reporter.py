"""The reporter: a bar on a terminal, lines elsewhere, metrics always, TensorBoard files when asked."""

import io
import re
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console

from hpctrain.storage.run_directory import RunDirectory
from hpctrain.train.metrics import RunningSums
from hpctrain.train.progress_text import loss_text
from hpctrain.train.reporter import ConsoleReporter, ProgressStyle


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run", config="a: 1\n", versions={}, git={})


def _run(
    directory: RunDirectory,
    console: Console,
    interval_seconds: float,
    tensorboard: Path | None = None,
    done_steps: int = 0,
    style: ProgressStyle | None = None,
) -> None:
    """Three steps of the first of two epochs of 20 samples; a clock that goes on by a second at each look."""
    seconds = count()
    reporter = ConsoleReporter(
        directory,
        interval_seconds=interval_seconds,
        console=console,
        tensorboard=tensorboard,
        done_steps=done_steps,
        style=style,
        clock=lambda: float(next(seconds)),
    )
    reporter.start(2, 20, 0, 40)
    for step in range(1, 4):
        reporter.step(1, step, RunningSums(loss=5.0 * step, top1=2 * step, top5=3 * step, count=4 * step), 0.1, 1234.0)
    reporter.flush()
    reporter.record("epoch", {"epoch": 1, "step": 3, "loss": 0.5})
    reporter.close()
    reporter.close()


def test_without_a_terminal_there_is_one_line_an_interval(directory: RunDirectory) -> None:
    output = io.StringIO()
    _run(directory, Console(file=output, force_terminal=False, width=200), interval_seconds=1e-9)
    lines = output.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("epoch 1/2  step 1  loss 1.2500  top1 50.00%  lr 0.1  1,234 images/s  0:00:")
    assert all(line.endswith(" left") for line in lines)
    assert [(line["kind"], line["epoch"]) for line in directory.metrics()] == [("interval", 1)] * 3 + [("epoch", 1)]


@pytest.mark.parametrize("style", ["bar", "lines", "none"])
def test_the_first_step_and_the_last_are_recorded_however_short_a_run(directory: RunDirectory, style: ProgressStyle) -> None:
    output = io.StringIO()
    _run(directory, Console(file=output, force_terminal=style == "bar"), interval_seconds=1e9, style=style)
    assert output.getvalue().count("  step ") == (2 if style == "lines" else 0)
    intervals = [line for line in directory.metrics() if line["kind"] == "interval"]
    assert [(line["step"], line["images"], line["loss"]) for line in intervals] == [(1, 4, 1.25), (3, 12, 1.25)]
    assert (output.getvalue() == "") == (style == "none")


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize(("epochs", "loss", "rate"), [(6, 2.3, 1234.0), (300, 1.8e26, 12345678.9)])
def test_a_terminals_bar_fits_its_width(directory: RunDirectory, width: int, epochs: int, loss: float, rate: float) -> None:
    """Nothing is cut: what has no room is left out, the loss last."""
    output = io.StringIO()
    reporter = ConsoleReporter(directory, console=Console(file=output, force_terminal=True, width=width), clock=count().__next__)
    reporter.start(epochs, 100, 0, epochs * 100)
    reporter.step(epochs, 5, RunningSums(loss * 50, 25, 30, 50), 0.0123456, rate)
    reporter.close()
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue()).replace("\r", "\n").split("\n")
    last = [frame for frame in frames if frame.strip()][-1]
    assert len(last) <= width
    assert "…" not in last
    assert last.startswith(f"epoch {epochs}/{epochs} ━")
    assert f"loss {loss_text(loss)}" in last
    assert "left" in last
    assert ("top1" in last) == (width >= 80)


def test_the_bar_ends_where_the_steps_of_the_run_do(directory: RunDirectory) -> None:
    output = io.StringIO()
    reporter = ConsoleReporter(directory, console=Console(file=output, force_terminal=True, width=80))
    reporter.start(6, 100, 0, 40)
    reporter.step(1, 4, RunningSums(2.0, 5, 7, 40), 0.1, 10.0)
    reporter.close()
    assert "100%" in output.getvalue()


def test_nothing_in_brackets_is_taken_for_markup(directory: RunDirectory) -> None:
    output = io.StringIO()
    reporter = ConsoleReporter(directory, console=Console(file=output, width=200, soft_wrap=True))
    reporter.say("run directory runs/[bold]x")
    assert output.getvalue() == "run directory runs/[bold]x\n"


def test_tensorboard_files_hold_the_scalars(directory: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    _run(directory, Console(file=io.StringIO()), interval_seconds=1e9, tensorboard=tmp_path / "board")
    events = list((tmp_path / "board").glob("events.*"))
    assert len(events) == 1
    assert b"epoch/loss" in events[0].read_bytes()


@pytest.mark.parametrize(("done_steps", "starts"), [(0, []), (7, [8])])
def test_a_resumed_runs_tensorboard_files_take_over_behind_its_checkpoint(
    directory: RunDirectory, tmp_path: Path, done_steps: int, starts: list[int]
) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    _run(directory, Console(file=io.StringIO()), 1e9, tmp_path / "board", done_steps)
    (path,) = (tmp_path / "board").glob("events.*")
    content, events, place = path.read_bytes(), [], 0
    while place < len(content):  # length (8 bytes), its checksum (4), the event, its checksum (4)
        size = int.from_bytes(content[place : place + 8], "little")
        events.append(Event.FromString(content[place + 12 : place + 12 + size]))
        place += size + 16
    assert [event.step for event in events if event.session_log.status == SessionLog.START] == starts
