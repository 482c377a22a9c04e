"""Records of a directory, as lines, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.errors import DataError
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.report import as_json, explanation, records_in, table
from hpctrain.flight.ring import End


def _post(recorder: FlightRecorder, queue: int) -> int:
    return recorder.queued(queue, "a.weight", 0)


_POSTED_AT = f"{__file__}:{_post.__code__.co_firstlineno + 1}"


def _write(folder: Path, rank: int, job: int = 1, *, posts: bool = True) -> None:
    recorder = FlightRecorder()
    recorder.join(rank, 2, job, 30.0)
    recorder.step(1, 5)
    recorder.phase("a training step" if posts else "data loading")
    queue = recorder.queue_of("gradients", (0, 1))
    number = _post(recorder, queue)
    if posts:
        recorder.started(number, "allreduce of 8 float32 elements")
        recorder.wait("a.weight", number)
        recorder.ended(End.DEADLINE, "no completion")
    recorder.keep_in(folder)


def test_a_directory_tells_its_latest_start(tmp_path: Path) -> None:
    _write(tmp_path, 0)
    _write(tmp_path, 1, posts=False)
    _write(tmp_path, 2, job=0)  # of an earlier start, on more ranks
    records = records_in(tmp_path)
    assert [each.rank for each in records] == [0, 1]
    first, *_ = explanation(tmp_path)
    assert first.startswith("autopsy: Rank 1 never posted the allreduce of 8 float32 elements for a.weight")
    head, *rows = table(records)
    assert [dict(zip(head, row, strict=True))["end"] for row in rows] == ["deadline", "did not say"]
    values = json.loads(json.dumps(as_json(records)))
    assert values["blamed"] == [1]
    assert values["ranks"][0]["unfinished"][0] == {
        "queue": "gradients of 0-1",
        "number": 0,
        "purpose": "a.weight",
        "operation": "allreduce of 8 float32 elements",
        "line": _POSTED_AT,
    }


def test_a_directory_without_records(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no flight records"):
        records_in(tmp_path)
    with pytest.raises(DataError, match=r"There is no directory .*x"):
        records_in(tmp_path / "x")
    assert explanation(None) == []
    assert explanation(tmp_path)[0].startswith("autopsy: ")
