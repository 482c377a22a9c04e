"""The reporter: a bar on a terminal, lines elsewhere, metrics always, TensorBoard files when asked."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from hpctrain.train.metrics import RunningSums
from hpctrain.train.reporter import ConsoleReporter
from hpctrain.train.run_directory import RunDirectory

SUMS = RunningSums(loss=5.0, top1=5, top5=9, count=10)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run", config="a: 1\n", versions={}, git={})


def _run(
    directory: RunDirectory, console: Console, interval_seconds: float, tensorboard: Path | None = None, done_steps: int = 0
) -> None:
    reporter = ConsoleReporter(
        directory, interval_seconds=interval_seconds, console=console, tensorboard=tensorboard, done_steps=done_steps
    )
    reporter.start(2, 20, 0)
    for step in range(3):
        reporter.step(0, step, SUMS, 0.1, 1234.0)
    reporter.record("epoch", {"epoch": 0, "step": 3, "loss": 0.5})
    reporter.close()
    reporter.close()


def test_without_a_terminal_there_is_one_line_an_interval(directory: RunDirectory) -> None:
    output = io.StringIO()
    _run(directory, Console(file=output, force_terminal=False, width=200), interval_seconds=1e-9)
    assert output.getvalue().count("epoch 1/2  step") == 3
    assert "top1 50.00%" in output.getvalue()
    assert [line["kind"] for line in directory.metrics()] == ["interval", "interval", "interval", "epoch"]


def test_a_long_interval_says_nothing(directory: RunDirectory) -> None:
    output = io.StringIO()
    _run(directory, Console(file=output, force_terminal=False), interval_seconds=1e9)
    assert output.getvalue() == ""
    assert [line["kind"] for line in directory.metrics()] == ["epoch"]


def test_a_terminal_has_a_bar(directory: RunDirectory) -> None:
    output = io.StringIO()
    _run(directory, Console(file=output, force_terminal=True, width=160), interval_seconds=1e9)
    assert "10/40" in output.getvalue()
    assert "1,234 images/s" in output.getvalue()


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
