"""The screen of a watched run: it fits any width, and says what its directory says."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpctrain.cli.watch_screen import news, screen
from hpctrain.experiment.run_state import RunState
from hpctrain.flight.ring import End
from tests.support.flight_records import SECOND, record

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
        "loss over steps, o of test",
        "test, averaged",
        "best test",
        "88.89%",
        "step 7 skipped: a gradient of stage1.block0.conv1",
        "4 ranks on 1 node, last heard of at most 41.0 s ago (rank 2)",
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


def test_a_run_of_which_nothing_is_known_has_a_screen() -> None:
    lines = _lines(replace(STATE, records=(), ranks=(), checkpoint=None))
    assert "no flight records and no metrics yet" in lines[0]
    assert "before the first step" in lines[1]
    assert "no checkpoint yet" in lines[2]


def test_curves_are_of_ascii_where_the_output_is() -> None:
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
