"""Records of a start begin with the program. A run directory takes them over; those of failed starts can be found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.errors import DataError
from hpctrain.flight import start_records
from hpctrain.flight.report import find_records
from hpctrain.flight.ring import End, file_name, read
from hpctrain.flight.start_records import KEPT, RECORDS, latest, place_of_start, recorded, taken
from hpctrain.launch.launcher import Launcher

_RANK_1 = Launcher("MPICH hydra mpiexec", expected_size=3, rank=1)


def test_a_start_that_fails_leaves_its_end(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    path = place_of_start(environ, _RANK_1)
    for error in (ImportError("no such module"), SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(type(error)), recorded(path, _RANK_1):
            raise error
        record = read(path)
        assert (record.rank, record.ranks, record.end) == (1, 3, End.FAILED)
        assert (str(error) or type(error).__name__) in record.sentence
        assert latest(environ) == path.parent
        path.unlink()


@pytest.mark.parametrize("leaves", [False, True])
def test_one_that_finishes_leaves_nothing(tmp_path: Path, leaves: bool) -> None:
    path = place_of_start({"TMPDIR": str(tmp_path)}, _RANK_1)
    try:
        with recorded(path, _RANK_1):
            assert path.is_file()
            if leaves:
                raise SystemExit(0)
    except SystemExit:
        pass
    assert not path.parent.exists()


def test_a_run_directory_takes_the_record_over(tmp_path: Path) -> None:
    path = place_of_start({RECORDS: str(tmp_path / "shared")}, _RANK_1)
    assert path == tmp_path / "shared" / file_name(1)
    with recorded(path, _RANK_1):
        recorder = taken()
        assert taken() is not recorder
        recorder.phase("data loading")
        assert start_records.hint() == [f"`hpctrain autopsy {path.parent}` has the records of this start"]
        recorder.keep_in(tmp_path / "flight")
        assert not path.parent.exists()
        assert start_records.hint() == []
        recorder.phase("a training step")
        assert read(tmp_path / "flight" / file_name(1)).phase == "a training step"
        recorder.keep_nowhere()
        recorder.phase("elsewhere")
    assert read(tmp_path / "flight" / file_name(1)).phase == "a training step"


def test_ranks_that_have_met_and_one_that_has_not_are_of_one_start(tmp_path: Path) -> None:
    for rank in range(2):
        launcher = Launcher("x", expected_size=2, rank=rank)
        recorder = start_records.begin(tmp_path / "start" / file_name(rank), launcher)
        if rank:
            recorder.join(rank, 2, 77, 30.0)
    assert [record.rank for record in find_records(tmp_path / "start").records] == [0, 1]


def test_the_latest_starts_stay_and_those_that_live(tmp_path: Path) -> None:
    own = tmp_path / f"hpctrain-{os.getuid()}"
    status = start_records.status_of(os.getpid())
    assert status is not None
    alive = own / f"start-{os.getpid()}-{status.begun}"
    for directory in (alive, *(own / f"start-{2**22 + number}-1" for number in range(1, KEPT + 4))):
        start_records.begin(directory / file_name(0), Launcher("none"))
    left = set(own.iterdir())
    assert alive in left
    assert len(left) == KEPT + 1


def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    """The record is kept in memory instead."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"hpctrain-{os.getuid()}").symlink_to(tmp_path / "theirs")
    environ = {"TMPDIR": str(tmp_path)}
    with recorded(place_of_start(environ, _RANK_1), _RANK_1):
        assert not list((tmp_path / "theirs").iterdir())
        assert latest(environ) is None
    with pytest.raises(DataError, match="There is no directory"):
        find_records(place_of_start(environ, _RANK_1).parent)
