"""A line that a disk refuses is told of once, written later where that is possible, and said to be lost where it is not."""

import errno
import logging
import os

import pytest

from hpctrain.storage import bookkeeping
from hpctrain.storage.bookkeeping import Bookkeeping, PatientRecords
from hpctrain.storage.run_directory import RunDirectory


@pytest.fixture
def said(caplog, monkeypatch):
    """The sentences so far."""
    monkeypatch.setattr(logging.getLogger("hpctrain"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records]


class Disk:
    """Takes records while `error` is 0."""

    def __init__(self):
        self.error, self.records = 0, []

    def append(self, record):
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        self.records.append(record["n"])


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_records_wait_until_there_is_room(said, error):
    disk = Disk()
    records = PatientRecords(Bookkeeping(), "metrics", disk.append)
    records.add({"n": 0})
    disk.error = error
    for number in (1, 2, 3):
        records.add({"n": number})
    assert said() == [f"The metrics cannot be written ({os.strerror(error)}); the run goes on and will try again."]
    disk.error = 0
    records.add({"n": 4})
    assert disk.records == [0, 1, 2, 3, 4]
    assert said()[1:] == ["The metrics can be written again."]
    records.close()
    assert len(said()) == 2


def test_what_is_lost_is_said_at_the_end_once(said):
    disk = Disk()
    records = PatientRecords(Bookkeeping(), "metrics", disk.append)
    disk.error = errno.ENOSPC
    for number in range(3):
        records.add({"n": number})
    records.close()
    records.close()
    assert said()[1:] == ["3 lines of the metrics could not be written (No space left on device) and are lost."]


def test_another_reason_is_told_anew(said):
    disk, kept = Disk(), Bookkeeping()
    for disk.error in (errno.ENOSPC, errno.ENOSPC, errno.EROFS):
        assert not kept.attempt("metrics", lambda: disk.append({"n": 0}))
    assert [sentence.split("(")[1].split(")")[0] for sentence in said()] == ["No space left on device", "Read-only file system"]


def test_the_oldest_records_go_first_and_are_counted(said, monkeypatch):
    monkeypatch.setattr(bookkeeping, "MOST_WAITING", 2)
    disk = Disk()
    disk.error = errno.ENOSPC
    records = PatientRecords(Bookkeeping(), "metrics", disk.append)
    for number in range(5):
        records.add({"n": number})
    disk.error = 0
    records.close()
    assert disk.records == [3, 4]
    assert said()[-1].startswith("3 lines of the metrics")


def test_errors_that_are_no_disks_pass():
    with pytest.raises(BrokenPipeError):
        Bookkeeping().attempt("output", lambda: (_ for _ in ()).throw(BrokenPipeError(errno.EPIPE, "x")))
    with pytest.raises(ZeroDivisionError):
        Bookkeeping().attempt("output", lambda: 1 // 0)


def test_a_line_of_metrics_that_was_torn_is_written_whole_later(tmp_path, monkeypatch, said):
    run = RunDirectory.create(tmp_path, "run", config="a: 1\n", versions={}, git={})
    records = PatientRecords(run.bookkeeping, "metrics", run.append_metrics)
    records.add({"kind": "x", "n": 0})
    with open(run.metrics_path, "ab") as file:
        file.write(b'{"kind": "x", "n"')  # as far as there was room
    records.add({"kind": "x", "n": 1})
    assert [line["n"] for line in run.metrics()] == [0, 1]
    assert RunDirectory.open(run.path) == run
