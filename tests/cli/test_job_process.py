"""A process of a job: what it knows at any point, what it keeps of an error, and what it undoes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.cli.job_process import JobProcess
from hpctrain.comm.progress import ProgressEngine
from hpctrain.flight.ring import End, file_name, read
from hpctrain.launch.launcher import Launcher


def test_before_the_world_its_launcher_knows_the_rank() -> None:
    assert JobProcess(Launcher("none")).rank() == 0
    process = JobProcess(Launcher("some", rank=3))
    assert process.rank() == 3
    process.abort(1)  # there is nobody to end


def test_a_process_alone_ends_well(tmp_path: Path) -> None:
    process = JobProcess(Launcher("none"))
    world = process.start_world(30.0)
    assert (process.rank(), world.size) == (0, 1)
    process.watch(world, 30.0)
    progress = ProgressEngine(rank=0, deadline_seconds=30.0, abort=world.abort, flight=process.flight)
    process.started(progress)
    process.flight.keep_in(tmp_path)
    assert progress.explain()[0].startswith("autopsy: ")
    process.finish()
    process.finish()
    assert read(tmp_path / file_name(0)).end is End.FINISHED
    with pytest.raises(SystemExit) as left:
        process.leave(85)
    assert left.value.code == 85


def test_the_first_error_stays_in_the_record(tmp_path: Path) -> None:
    process = JobProcess(Launcher("none"))
    process.watch(process.start_world(30.0), 30.0)
    process.flight.keep_in(tmp_path)
    process.failed("mine alone")
    process.finish()
    record = read(tmp_path / file_name(0))
    assert (record.end, record.sentence) == (End.FAILED, "mine alone")
