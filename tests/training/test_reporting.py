"""Reporters: lines, a bar on a terminal, metrics, TensorBoard files, and the words of progress."""

from __future__ import annotations

import io
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import ANY, call, create_autospec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hpctrain.comm.progress import ProgressEngine
from hpctrain.config.schema import MetricsConfig
from hpctrain.core import log as rank_log
from hpctrain.core.console import PlainConsole
from hpctrain.core.text import duration_text, fitting, loss_text
from hpctrain.runs.directory import RunDirectory
from hpctrain.training.metrics import Rate, Reporter, RunningSums, StepTotals
from hpctrain.training.progress_bar import ProgressBar, TimeLeft, pass_on_stderr
from hpctrain.training.reporters import make_reporter
from hpctrain.training.reporting import ConsoleReporter, LogReporter, ProgressStyle
from tests.support.recorded import Heard


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run", config="a: 1\n", versions={}, git={})


def _run(
    directory: RunDirectory,
    console: Console,
    interval_seconds: float,
    others: Sequence[Reporter] = (),
    style: ProgressStyle | None = None,
) -> None:
    """Three steps of the first of two epochs of 20 samples; a clock that goes on by a second at each look."""
    seconds = count()
    options = {"interval_seconds": interval_seconds, "console": console, "others": others, "style": style}
    reporter = ConsoleReporter(directory, clock=lambda: float(next(seconds)), **options)
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
    assert lines[0] == "epoch 1/2  step 1  loss 1.2500  top1 50.00%  lr 0.1  1,234 images/s", "the first step includes the start"
    assert max(map(len, lines)) <= 80
    assert all(line.endswith(" left") for line in lines[1:])
    start, *lines_of_steps = directory.metrics()
    facts = {"kind": "start", "epochs": 2, "samples": 20, "done_samples": 0, "last_sample": 40}
    assert {key: value for key, value in start.items() if key != "time"} == facts
    assert [(line["kind"], line["epoch"]) for line in lines_of_steps] == [("interval", 1)] * 3 + [("epoch", 1)]


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
    for images in (40, 50):
        reporter.step(epochs, 5, RunningSums(loss * images, images // 2, 30, images), 0.0123456, rate)
    reporter.close()
    last = _frames(output)[-1]
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


def test_other_reporters_receive_the_same_and_are_closed_once(directory: RunDirectory) -> None:
    others = [create_autospec(Reporter, instance=True) for _ in range(2)]
    _run(directory, Console(file=io.StringIO()), interval_seconds=1e9, others=others, style="none")
    steps = [call.step(1, step, RunningSums(5.0 * step, 2 * step, 3 * step, 4 * step), 0.1, 1234.0) for step in (1, 2, 3)]
    for other in others:
        assert other.mock_calls == [
            call.start(2, 20, 0, 40), call.record("interval", ANY), *steps,
            call.record("interval", ANY), call.flush(), call.record("epoch", ANY), call.close(),
        ]  # fmt: skip
    recorded = [(line["kind"], line["step"]) for line in directory.metrics() if line["kind"] != "start"]
    assert recorded == [(kind, values["step"]) for kind, values in (one.args for one in others[0].record.mock_calls)]
    silent, said = Reporter(), create_autospec(Reporter, instance=True)
    reporter = ConsoleReporter(directory, console=Console(file=io.StringIO()), others=[silent, said])
    reporter.say("a line")
    assert said.mock_calls == [call.say("a line")]


def _frames(output: io.StringIO) -> list[str]:
    """What the line showed, one after the other."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue()).replace("\r", "\n")
    return [frame for frame in text.split("\n") if frame.strip()]


def _terminal(width: int) -> tuple[io.StringIO, Console]:
    output = io.StringIO()
    return output, Console(file=output, force_terminal=True, width=width)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_pass_takes_the_line_and_returns_it(width: int) -> None:
    output, console = _terminal(width)
    bar = ProgressBar(console)
    bar.begin("training", 100)
    bar.show("epoch 1/2", 50, [(0, "loss 1.0")])
    with bar.pass_over("evaluation", 200) as advance:
        advance(25)
        advance(50)
        bar._progress.refresh()
        during = _frames(output)[-1]
    bar.close()
    assert during.startswith("evaluation")
    assert "25%" in during
    assert "epoch" not in during
    assert _frames(output)[-1].startswith("epoch 1/2")
    assert "loss 1.0" in _frames(output)[-1]
    assert max(map(len, _frames(output))) <= width


def test_a_pass_that_fails_returns_the_line() -> None:
    output, console = _terminal(80)
    bar = ProgressBar(console)
    bar.begin("training", 100)
    with pytest.raises(ZeroDivisionError), bar.pass_over("evaluation", 200):
        raise ZeroDivisionError
    bar.close()
    assert _frames(output)[-1].startswith("training")


@pytest.mark.parametrize("style", ["bar", "lines", "none"])
def test_an_evaluation_is_in_the_bar_and_in_no_line(directory: RunDirectory, style: ProgressStyle) -> None:
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


@given(st.floats(width=32))
def test_a_loss_is_never_long(loss: float) -> None:
    text = loss_text(loss)
    assert len(text) <= 11
    if math.isfinite(loss):
        assert float(text) == pytest.approx(loss, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00:00"), (7, "0:00:07"), (3599.6, "1:00:00"), (90061, "1 d 1:01:01"), (864000, "10 d 0:00:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_time_left_follows_from_what_this_run_has_done() -> None:
    times = iter([100.0, 110.0, 130.0])
    left = TimeLeft(50, 200, lambda: next(times))
    assert left.seconds(50) is None
    assert left.seconds(60) is None, "the first step includes the start, so that its pace is wrong"
    assert left.seconds(110) == pytest.approx(18)  # 50 in 10 seconds, 90 to go
    assert left.seconds(200) == 0.0


@given(st.lists(st.lists(st.text("ab,;:", min_size=1, max_size=25), min_size=1).map(" ".join), min_size=1), st.integers(20, 120))
def test_no_printed_line_is_wider_than_the_columns(lines: list[str], columns: int) -> None:
    """A reporter wraps the lines that it prints, and other reporters receive each line whole."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", str(columns))
        other, output = Heard(), io.StringIO()
        run = RunDirectory.create(Path(folder), "x", config="", versions={}, git={})
        reporter = ConsoleReporter(run, others=[other], console=PlainConsole(file=output, soft_wrap=True, width=1000))
        for line in lines:
            reporter.say(line)
        reporter.close()
    for line in output.getvalue().splitlines():
        assert len(line) <= columns or max(map(len, line.split())) + 2 > columns, "only a long word makes a line wider"
    assert output.getvalue().split() == " ".join(lines).split()
    assert other.lines == lines


FACT = st.tuples(st.integers(0, 9), st.text("abc ", min_size=1, max_size=9))
FACTS = st.lists(FACT, max_size=6, unique_by=lambda fact: fact[0])


@given(FACTS, st.integers(0, 40))
def test_facts_fit_in_their_order_and_the_most_important_stay(facts: list[tuple[int, str]], room: int) -> None:
    line = fitting(facts, room)
    assert len(line) <= room
    by_rank = sorted(facts)
    for kept in range(len(facts), -1, -1):
        whole = "  ".join(text for fact in facts if fact in by_rank[:kept] for text in [fact[1]])
        if len(whole) <= room:
            assert line == whole
            break


@pytest.fixture
def lines() -> Iterator[object]:
    log = rank_log.begin_rank_log()
    yield log._waiting
    rank_log.end_rank_log()


def test_steps_are_reported_at_intervals_with_the_time_that_this_rank_waited(lines: list[str]) -> None:
    now = [0.0]
    engine = ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None)
    reporter = LogReporter(engine, interval_seconds=10.0, clock=lambda: now[0])
    reporter.start(1, 100, 0, 100)
    sums = RunningSums(loss=4.0, count=2)
    for step in range(1, 30):
        now[0] += 1.0
        engine.waited_seconds += 0.25
        reporter.step(1, step, sums, 0.1, 50.0)
    steps = [line.partition("DEBUG   ")[2] for line in lines if " step" in line]
    assert steps == [
        "epoch 1, step 1: loss 2; in 1 step this rank waited 0.250 s for other ranks",
        "epoch 1, step 11: loss 2; in 10 steps this rank waited 2.500 s of 10.0 s for other ranks",
        "epoch 1, step 21: loss 2; in 10 steps this rank waited 2.500 s of 10.0 s for other ranks",
    ]


def test_events_are_reported_and_intervals_are_not(lines: list[str]) -> None:
    reporter = LogReporter(ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None))
    reporter.say("a sentence")
    reporter.record("interval", {"loss": 1.0})
    reporter.record("evaluation", {"epoch": 1, "loss": 2.0})
    reporter.close()
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        "INFO    a sentence",
        'DEBUG   evaluation: {"epoch": 1, "loss": 2.0}',
        "INFO    the run has ended on this rank",
    ]


def test_means_weigh_samples_not_steps() -> None:
    sums = RunningSums()
    for totals in (StepTotals(6.0, 1, 3, 3, 0, 0, np.zeros(0)), None, StepTotals(1.0, 1, 1, 1, 0, 0, np.zeros(0))):
        sums.add(totals)
    assert sums.means() == {"loss": 7 / 4, "top1": 2 / 4, "top5": 4 / 4}


def test_the_rate_counts_from_the_restart() -> None:
    now = [10.0]
    rate = Rate(lambda: now[0])
    rate.add(5)
    now[0] = 12.0
    assert rate.per_second() == pytest.approx(2.5)
    rate.restart()
    assert rate.per_second() == 0.0
    rate.add(9)
    now[0] = 15.0
    assert rate.per_second() == pytest.approx(3.0)


Values = dict[tuple[str, str], list[tuple[int, float]]]


def _report(directory: Path, done_steps: int = 0, *, ema: bool = False) -> None:
    """An interval, the end of the epoch, its evaluation and an event, from a step on."""
    reporter = make_reporter("tensorboard", {}, directory, done_steps)
    averaged = {"ema_loss": 0.25} if ema else {}
    reporter.record("interval", {"epoch": 1, "step": done_steps + 2, "loss": 0.75, "lr": 0.5, "note": "a text"})
    reporter.record("epoch", {"epoch": 1, "step": done_steps + 3, "loss": 0.5})
    reporter.record("evaluation", {"epoch": 1, "step": done_steps + 3, "loss": 0.375, "top1": 1.0, **averaged})
    reporter.record("skip", {"epoch": 2, "step": done_steps + 4})
    reporter.close()


def _events(directory: Path) -> dict[str, list[Any]]:
    """All events of each directory below `tensorboard`, in order."""
    from tensorboardX.proto.event_pb2 import Event

    events: dict[str, list[Any]] = {}
    for path in sorted(directory.glob("tensorboard/**/events*"), key=lambda path: path.stat().st_mtime_ns):
        content, place = path.read_bytes(), 0
        while place < len(content):  # length (8 bytes), its checksum (4), the event, its checksum (4)
            size = int.from_bytes(content[place : place + 8], "little")
            name = str(path.parent.relative_to(directory / "tensorboard"))
            events.setdefault(name, []).append(Event.FromString(content[place + 12 : place + 12 + size]))
            place += size + 16
    return events


def _values(directory: Path) -> Values:
    """(directory, tag) -> (step, value), in order."""
    values: Values = {}
    for name, events in _events(directory).items():
        for event in events:
            for value in event.summary.value:
                values.setdefault((name, value.tag), []).append((event.step, value.simple_value))
    return values


def _starts(directory: Path) -> dict[str, list[int]]:
    """The steps from which each directory takes over."""
    from tensorboardX.proto.event_pb2 import SessionLog

    return {
        name: [event.step for event in events if event.session_log.status == SessionLog.START]
        for name, events in _events(directory).items()
    }


def _rename(directory: Path, suffix: str) -> None:
    """Make room for further files: names have the second, which a run and its resume do not share but here."""
    for path in directory.glob("tensorboard/*/events*"):
        path.rename(path.with_name(f"{path.name}.{suffix}"))


def test_the_key_tensorboard_is_short_for_the_reporter() -> None:
    def names(**keys: object) -> list[str]:
        return [reporter.name for reporter in MetricsConfig.model_validate(keys).all_reporters]

    assert names() == []
    assert names(tensorboard=True, reporters=["own.py:A"]) == ["tensorboard", "own.py:A"]
    assert names(tensorboard=True, reporters=["own.py:A", "tensorboard"]) == ["own.py:A", "tensorboard"]


def test_training_and_test_have_equal_tags_in_sibling_directories(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    _report(tmp_path, ema=True)
    values = _values(tmp_path)
    assert values["train", "loss"] == [(2, 0.75), (3, 0.5)]
    assert values["test", "loss"] == [(3, 0.375)]
    assert values["test-averaged", "loss"] == [(3, 0.25)]
    assert values["test", "top1"] == [(3, 1.0)]
    assert values["train", "train/lr"] == [(2, 0.5)]
    assert values["train", "skip/epoch"] == [(4, 2.0)]
    assert {name for name, _ in values} == {"train", "test", "test-averaged"}
    assert _starts(tmp_path) == {"train": [], "test": [], "test-averaged": []}


def test_a_resumed_runs_files_take_over_after_its_checkpoint_in_each_directory(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    _report(tmp_path)
    _rename(tmp_path, "first")
    make_reporter("tensorboard", {}, tmp_path, 2).close()  # ends before it records anything
    assert _starts(tmp_path) == {"train": [3], "test": [3]}
    _rename(tmp_path, "second")
    _report(tmp_path, 7)
    assert _starts(tmp_path) == {"train": [3, 8], "test": [3, 8]}
    assert _values(tmp_path)["test", "loss"] == [(3, 0.375), (10, 0.375)]


def test_one_directory_that_refuses_does_not_keep_others_from_their_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "train").write_text("no directory")
    reporter = make_reporter("tensorboard", {}, tmp_path, 0)
    with pytest.raises(OSError, match="train"):
        reporter.record("interval", {"epoch": 1, "step": 2, "loss": 0.75})
    with pytest.raises(OSError, match="train"):
        reporter.record("evaluation", {"epoch": 1, "step": 3, "loss": 0.5})
    (tmp_path / "tensorboard" / "train").unlink()
    reporter.close()
    assert _values(tmp_path)["test", "loss"] == [(3, 0.5)]
    assert _values(tmp_path)["train", "loss"] == [(2, 0.75)]
