"""The reporter: a bar on a terminal, lines elsewhere, metrics always, TensorBoard files when asked."""

import io
import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console

from hpctrain.storage.run_directory import RunDirectory
from hpctrain.train.console_reporter import ConsoleReporter, ProgressStyle
from hpctrain.train.metrics import Reporter, RunningSums
from hpctrain.train.progress_text import loss_text


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
    reporter = ConsoleReporter(
        directory,
        interval_seconds=interval_seconds,
        console=console,
        others=others,
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
    assert lines[0].startswith("epoch 1/2  step 1  loss 1.2500  top1 50.00%  1,234 images/s  0:00:")  # no room for the rate
    assert max(map(len, lines)) <= 80
    assert all(line.endswith(" left") for line in lines)
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


class Written(Reporter):
    """Writes down what it receives."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def start(self, epochs, samples_per_epoch, done_samples, last_sample) -> None:
        self.calls.append(("start", epochs))

    def step(self, epoch, step, sums, lr, images_per_second) -> None:
        self.calls.append(("step", step, sums.count, lr))

    def flush(self) -> None:
        self.calls.append(("flush",))

    def record(self, kind, values) -> None:
        self.calls.append(("record", kind, values["step"]))

    def say(self, text) -> None:
        self.calls.append(("say", text))

    def close(self) -> None:
        self.calls.append(("close",))


def test_other_reporters_receive_the_same_and_are_closed_once(directory: RunDirectory) -> None:
    others = [Written(), Written()]
    _run(directory, Console(file=io.StringIO()), interval_seconds=1e9, others=others, style="none")
    assert (
        others[0].calls
        == others[1].calls
        == [
            ("start", 2),
            ("record", "interval", 1),
            ("step", 1, 4, 0.1),
            ("step", 2, 8, 0.1),
            ("step", 3, 12, 0.1),
            ("record", "interval", 3),
            ("flush",),
            ("record", "epoch", 3),
            ("close",),
        ]
    )
    recorded = [(line["kind"], line["step"]) for line in directory.metrics() if line["kind"] != "start"]
    assert recorded == [call[1:] for call in others[0].calls if call[0] == "record"]
    silent, said = Reporter(), Written()
    reporter = ConsoleReporter(directory, console=Console(file=io.StringIO()), others=[silent, said])
    reporter.say("a line")
    assert said.calls == [("say", "a line")]
