"""The screen of `hpctrain watch`, and the progress bar of a pass."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from hpctrain.cli.data import progress
from hpctrain.cli.main import cli
from hpctrain.cli.watch_screen import news, screen
from hpctrain.launch.process_end import End
from hpctrain.runs.directory import RunDirectory, runs
from hpctrain.runs.state import RunState
from hpctrain_testing.run import StartedJob, wait_until
from tests.support.recorded import SECOND, record
from tests.support.tiny_runs import tiny

_CONFIG = tiny(
    "threads: 1, batch: 8, epochs: EPOCHS, metrics: {interval_seconds: 0.1}, data: {train: synthetic, test: synthetic, "
    "synthetic: {height: 9, width: 9, samples: 64, test_samples: 16, classes: 3}}"
)

_ANY_TIME = re.compile(r"[\d.:]+( s)? ago")


@pytest.fixture
def training(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A training of one rank below the test's directory, which has begun."""
    (tmp_path / "tiny.yaml").write_text(_CONFIG.replace("EPOCHS", str(request.param)))
    job = StartedJob([sys.executable, "-m", "hpctrain", "train", "tiny.yaml"], tmp_path)

    def begun() -> bool:
        run = next(iter(runs(tmp_path / "runs", None)), None)
        return job.process.poll() is not None or bool(
            run and any((run.path / "flight").glob("*.flight")) and run.metrics_path.exists()
        )

    wait_until(begun, 180)
    yield job.process
    job.kill()
    job.end(60)


def _run(folder: Path) -> RunDirectory:
    return next(iter(runs(folder / "runs", None)))


def _watch(folder: Path, *words: str) -> str:
    result = CliRunner().invoke(cli, ["watch", "--runs", str(folder / "runs"), "--interval", "0.1", *words])
    assert result.exit_code == 0, result.output
    return result.output


def _files(run: RunDirectory) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.parametrize("training", [3], indirect=True)
def test_watch_follows_until_the_run_has_finished_and_writes_nothing(training, tmp_path: Path) -> None:
    output = _watch(tmp_path)
    assert "training begins" in output
    assert "epoch 3  step 24  test loss" in output
    assert "  finished\n" in output
    assert training.wait(120) == 0
    before = _files(_run(tmp_path))
    once = _watch(tmp_path, "--once")
    assert _ANY_TIME.sub("", once).strip() in _ANY_TIME.sub("", output)
    assert max(map(len, once.splitlines())) <= 80
    assert _files(_run(tmp_path)) == before


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("training", [100_000], indirect=True)
@pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGTERM, "stopped by SIGTERM after step "), (signal.SIGKILL, "was ended by SIGKILL")]
)
def test_watch_ends_when_the_run_is_stopped_or_killed(training, tmp_path: Path, number: int, end: str) -> None:
    assert "running (" in _watch(tmp_path, "--once")
    _signal_rank(training.pid, number)
    assert end in " ".join(_watch(tmp_path).split())
    training.wait(120)


def _signal_rank(process: int, number: int) -> None:
    """Signal the rank: the only child of its keeper, or the process itself where it has none."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    os.kill(int(children[0]) if children and number == signal.SIGKILL else process, number)


START = {"kind": "start", "time": 1000.0, "epochs": 90, "samples": 1_000_000, "done_samples": 0, "last_sample": 90_000_000}


def _records(epochs: int) -> tuple[dict[str, Any], ...]:
    """Three intervals of each epoch, its end, and its evaluation."""
    records: list[dict[str, Any]] = [START]
    for epoch in range(1, epochs + 1):
        for k in range(1, 4):
            step, means = 100 * epoch + 30 * k, {"loss": 7.0 / (epoch + 0.1 * k), "top1": 1 - 1 / epoch, "top5": 1 - 0.5 / epoch}
            place = {"time": 1000.0 + step, "epoch": epoch, "step": step, "images": k * 300_000}
            records.append({"kind": "interval", **place, **means, "lr": 0.123456, "images_per_second": 12345.6})
        records.append(
            {
                "kind": "evaluation",
                "time": 1000.0 + step,
                "epoch": epoch,
                "step": step,
                **means,
                "ema_loss": None,
                "ema_top1": 0.5,
            }
        )
    return tuple(records)


STATE = RunState(
    path=Path("runs/imagenet-resnet50-20260101-120000"),
    now=101.0,
    records=(*_records(9), {"kind": "skip", "time": 2000.0, "step": 7, "layer": "stage1.block0.conv1", "held": "a gradient"}),
    ranks=tuple(record(rank, seen_ns=(100 - 40 * (rank == 2)) * SECOND) for rank in range(4)),
    checkpoint=Path("runs/checkpoints/checkpoint-00000900.shards"),
    checkpoint_age_seconds=61.0,
    end=None,
)


def _lines(state: RunState, width: int = 80, **more: Any) -> list[str]:
    output = io.StringIO()
    console = Console(file=output, width=width, highlight=False, markup=False, emoji=False, **more)
    console.print(screen(state, console))
    return output.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 50, 72, 80, 132])
@pytest.mark.parametrize("end", [None, "stopped by SIGTERM after step 5", "rank 3 failed first: " + "a long sentence " * 12])
def test_a_screen_fits_any_width(width: int, end: str | None) -> None:
    lines = _lines(replace(STATE, end=end), width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= (24 if width >= 80 and end is None else 60)


def test_a_running_run_says_where_it_is() -> None:
    text = "\n".join(_lines(STATE))
    for words in (
        "imagenet-resnet50-20260101-120000",
        "running (a training step)",
        "epoch 9/90",
        "step 812",
        "12,346 images/s",
        "checkpoint of step 900, 0:01:01 ago",
        "left",
        "test, averaged",
        "best test",
        "88.89%",
        "step 7 skipped: a gradient of stage1.block0.conv1",
        "4 ranks on 1 node, last sign of life at most 41.0 s ago (rank 2)",
        "rank 2 on node: 41.0 s ago in a training step",
    ):
        assert words in text, words
    assert "rank 1 on" not in text


def test_a_rank_that_failed_is_named_with_its_sentence() -> None:
    failed = record(3, end=End.FAILED, sentence="The disk is full.")
    text = " ".join(" ".join(_lines(replace(STATE, ranks=(*STATE.ranks[:2], failed), end="rank 3 failed first"))).split())
    assert "The disk is full." in text
    assert "rank 3 failed first" in text
    assert "; 1 more left no record here" in text
    assert " left  " not in text


def test_the_screen_is_ascii_if_the_output_is() -> None:
    class Ascii(io.StringIO):
        encoding = "ascii"

    console = Console(file=Ascii(), width=80)
    console.print(screen(STATE, console))
    assert console.file.getvalue().isascii()  # type: ignore[attr-defined]


@pytest.mark.parametrize("broken", [{"loss": None}, {"top1": None, "lr": None}, {"images_per_second": None}, {"time": None}])
def test_numbers_that_are_not_finite_are_dashes(broken: dict[str, Any]) -> None:
    last = json.loads(json.dumps({**STATE.records[-2], **broken, "kind": "interval", "step": 1000}))
    assert max(map(len, _lines(replace(STATE, records=(*STATE.records[:-2], last))))) <= 80


def test_news_are_a_line_for_each_record_of_training_and_each_event() -> None:
    lines = list(news([*_records(1), {"kind": "progress", "time": 1.0}, {"kind": "stop", "by": "SIGINT", "step": 190}]))
    assert lines[0] == "training begins"
    assert lines[1] == "epoch 1  step 130  train loss 6.3636  top1 0.00%"
    assert lines[4] == "epoch 1  step 190  test loss 5.3846  top1 0.00%"
    assert lines[5:] == ["stopped by SIGINT after step 190"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_has_no_bar(capsys):
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
    assert "3/4" in terminal.getvalue()
    assert "\x1b[2K" in terminal.getvalue()[terminal.getvalue().rindex("3/4") :], "the line is erased"
