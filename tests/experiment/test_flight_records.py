"""Flight records of a run: where they lie, what they say at its end, and a disk that has no room for them."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hpctrain.cli.autopsy import directory_of
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.experiment.flight_records import explain_deadlines, keep, watched
from hpctrain.experiment.session import Session
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.report import records_in
from hpctrain.flight.ring import End, file_name, read
from hpctrain.storage.run_directory import FLIGHT_POINTER, RunDirectory
from tests.support.heard import Heard


def _session(flight: FlightRecorder | None, where: str) -> Session:
    alone = SingleCommunicator()
    progress = ProgressEngine(rank=0, deadline_seconds=5, abort=alone.abort, flight=flight)
    values: dict[str, Any] = {
        "progress": progress,
        "config": SimpleNamespace(flight=where),
        "is_root": True,
        "world": SingleCommunicator(),
        "grid": SimpleNamespace(node=alone),
    }
    return cast("Session", SimpleNamespace(**values))


def _directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "x", config="name: x\n", versions={}, git={})


def test_a_run_that_ends_well_has_finished(tmp_path: Path) -> None:
    flight, directory = FlightRecorder(), _directory(tmp_path)
    with watched(flight, SingleCommunicator(), 30.0):
        session = _session(flight, "run")
        explain_deadlines(session.progress)
        keep(session, directory, Heard())
    found = read(directory.path / "flight" / file_name(0))
    assert (found.end, found.ranks, found.deadline_ns) == (End.FINISHED, 1, 30_000_000_000)
    assert found.job > 0
    assert session.progress.explain()[0].startswith("autopsy: The job finished")


def test_records_of_the_latest_start_count_where_the_clock_has_gone_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, year_ns = _directory(tmp_path), 365 * 86400 * 10**9
    now_ns = time.time_ns()
    for start, time_ns in enumerate((now_ns + year_ns, now_ns - year_ns, now_ns)):
        monkeypatch.setattr(time, "time_ns", lambda time_ns=time_ns: time_ns)
        for rank in (0, 1):  # of which the later one is of the first start alone
            if rank and start:
                continue
            flight = FlightRecorder()
            flight.join(rank, 2 if start == 0 else 1, time.time_ns(), 30.0)
            flight.step(1, start + 1)
            keep(_session(flight, "run"), directory, Heard())
    assert [(found.rank, found.step) for found in records_in(directory.path / "flight")] == [(0, 3)]


def test_times_of_all_records_are_those_of_rank_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Clocks of nodes differ, but the autopsy compares times of different ranks."""
    flight = FlightRecorder()
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    with watched(flight, SingleCommunicator(), 30.0):
        flight.keep_in(tmp_path)
        found = read(tmp_path / file_name(0))
    assert 1e9 <= found.wall_seconds(time.perf_counter_ns()) < 1e9 + 600


def test_one_that_raises_has_not(tmp_path: Path) -> None:
    flight, directory = FlightRecorder(), _directory(tmp_path)

    def fails() -> None:
        with watched(flight, SingleCommunicator(), 30.0):
            keep(_session(flight, "run"), directory, Heard())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert read(directory.path / "flight" / file_name(0)).end is End.RUNNING


def test_elsewhere_and_nowhere(tmp_path: Path) -> None:
    directory, reporter = _directory(tmp_path), Heard()
    keep(_session(FlightRecorder(), "none"), directory, reporter)
    keep(_session(None, "run"), directory, reporter)
    assert not (directory.path / "flight").exists()
    keep(_session(FlightRecorder(), str(tmp_path / "local")), directory, reporter)
    assert (directory.path / FLIGHT_POINTER).read_text().strip() == str(tmp_path / "local" / directory.path.name)
    assert directory_of(directory.path) == tmp_path / "local" / directory.path.name
    assert (tmp_path / "local" / directory.path.name / file_name(0)).exists()
    keep(_session(FlightRecorder(), "run"), directory, reporter)  # a resume with other options
    assert directory_of(directory.path) == directory.path / "flight"
    assert (directory.path / "flight" / file_name(0)).exists()
    assert reporter.lines == []


def test_a_disk_without_room_does_not_end_the_run(tmp_path: Path) -> None:
    directory, reporter, flight = _directory(tmp_path), Heard(), FlightRecorder()
    (tmp_path / "file").write_text("")
    keep(_session(flight, str(tmp_path / "file")), directory, reporter)
    assert flight.directory is None
    assert reporter.lines[0].startswith("no flight records: ")
    flight.phase("goes on")
