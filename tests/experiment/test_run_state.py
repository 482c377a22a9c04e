"""The state of a run as its directory tells it: running, ended, stopped, dead, torn."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from hpctrain.experiment import run_state
from hpctrain.experiment.run_state import RunReader, RunState
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.ring import End
from hpctrain.storage.run_directory import RunDirectory
from tests.support.flight_records import SECOND, record

START = {"kind": "start", "time": 1000.0, "epochs": 2, "samples": 100, "done_samples": 0, "last_sample": 200}
INTERVAL = {"kind": "interval", "time": 1010.0, "epoch": 1, "step": 5, "images": 50, "loss": 2.0, "top1": 0.5, "lr": 0.1}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run", config="a: 1\n", versions={}, git={})


def _write(directory: RunDirectory, *records: dict[str, Any], torn: str = "") -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    directory.metrics_path.write_text(text + torn)


def _state(directory: RunDirectory, now: float = 1020.0) -> RunState:
    return RunReader(directory).read(now)


def test_time_left_follows_from_the_pace_since_the_latest_start(directory: RunDirectory) -> None:
    earlier = {**START, "time": 1.0, "last_sample": 100}
    _write(directory, earlier, START, INTERVAL)
    state = _state(directory)
    assert (state.step, state.done_samples, state.seconds_left, state.end) == (5, 50, 30.0, None)


@pytest.mark.parametrize("torn", ["", '{"kind": "inter', "no json\n", "[1]\n{"])
def test_lines_that_are_torn_or_none_are_left_out(directory: RunDirectory, torn: str) -> None:
    _write(directory, START, INTERVAL, torn=torn)
    assert [line["kind"] for line in _state(directory).records] == ["start", "interval"]


def test_an_empty_run_has_a_state(directory: RunDirectory) -> None:
    state = _state(directory)
    assert (state.records, state.ranks, state.events) == ((), (), [])
    assert (state.checkpoint, state.end, state.step, state.seconds_left) == (None, None, 0, None)


def test_a_reader_follows_a_file_that_grows_and_one_that_is_cut(directory: RunDirectory) -> None:
    reader = RunReader(directory)
    for records in ((START,), (START, INTERVAL), (START, INTERVAL, {**INTERVAL, "step": 6}), (START,)):
        _write(directory, *records)
        assert len(reader.read(0.0).records) == len(records)


def test_without_flight_records_the_metrics_tell_the_end(directory: RunDirectory) -> None:
    last = {**INTERVAL, "kind": "epoch", "epoch": 2, "images": 100}
    stop = {"kind": "stop", "time": 1011.0, "epoch": 1, "step": 5, "by": "SIGTERM"}
    _write(directory, START, INTERVAL, stop)
    assert _state(directory).end == "stopped by SIGTERM after step 5"
    _write(directory, START, INTERVAL, stop, START)
    assert _state(directory).end is None
    _write(directory, START, INTERVAL, last)
    assert _state(directory).end == "finished"


def _end(*ranks: Any, records: tuple[dict[str, Any], ...] = (START,), now: float = 101.0) -> str | None:
    return run_state._end(records, ranks, now)


def test_ranks_tell_whether_the_run_goes_on() -> None:
    here, gone = socket.gethostname(), 2**22 + 1  # above the largest number of a process
    finished = [record(rank, end=End.FINISHED) for rank in range(2)]
    assert _end(*finished) == "finished"
    stop = {"kind": "stop", "step": 5, "by": "max_time"}
    assert _end(*finished, records=(START, stop)) == "stopped by max_time after step 5"
    assert _end(finished[0], record(1)) is None
    assert _end(record(0), record(1), now=1000.0) is not None  # silent for longer than the deadline
    assert _end(record(0), record(1), now=130.0) is None
    assert _end(record(0, host=here, process=gone), now=111.0) is not None
    assert _end(record(0, host=here, process=gone), now=105.0) is None
    assert _end(record(0, host=here, process=1), now=1000.0) is None  # stopped, perhaps, but there
    failed = _end(record(0, end=End.FAILED, sentence="It broke.", seen_ns=50 * SECOND), record(1, end=End.SIGNAL, signal=9))
    assert failed is not None
    assert "It broke" in failed


def test_clocks_that_differ_end_no_run_that_is_followed(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader counts how long a rank on another machine is silent on its own clock, if the wall clocks may simply differ."""
    beat, seconds = [100 * SECOND], [0.0]
    monkeypatch.setattr(run_state, "_flight", lambda of: (record(0, ranks=1, seen_ns=beat[0]),))
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    skewed, reader = 5 * 3600.0, RunReader(directory, follows=True)
    assert RunReader(directory).read(skewed).end is not None, "one look has the clocks alone"
    for _ in range(9):
        assert reader.read(beat[0] / SECOND + skewed).end is None
        beat[0] += 30 * SECOND
        seconds[0] += 30.0
    for silent, ended in ((0.0, False), (69.0, False), (71.0, True)):
        assert (reader.read(beat[0] / SECOND + skewed + silent).end is not None) == ended
        seconds[0] = 270.0 + (69.0 if silent == 0.0 else 71.0)
    assert RunReader(directory, follows=True).read(3e6).end is not None
    gone = record(0, host=socket.gethostname(), process=2**22 + 1, ranks=1)
    assert _end(gone, now=-3600.0) is not None, "the clock was set back after its end"


def test_records_of_ranks_are_read_where_the_run_says_they_lie(directory: RunDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    directory.point_to_flight(elsewhere)
    recorder = FlightRecorder()
    recorder.join(0, 1, time.time_ns(), 60.0)
    recorder.keep_in(elsewhere)
    recorder.step(1, 17)
    state = _state(directory, time.time())
    assert [one.rank for one in state.ranks] == [0]
    assert state.step == 17
    assert state.heard_seconds(state.ranks[0]) < 60
    (elsewhere / "rank-00000.flight").write_bytes(b"short")
    assert _state(directory).ranks == ()


def test_the_newest_checkpoint_is_that_of_the_latest_step(directory: RunDirectory) -> None:
    for name in ("checkpoint-00000009.h5", "checkpoint-00000010.shards", "checkpoint-00000011.h5.partial", "best.json"):
        (directory.checkpoints / name).write_text("")
    state = _state(directory, time.time())
    assert state.checkpoint == directory.checkpoints / "checkpoint-00000010.shards"
    assert state.checkpoint_age_seconds < 60
