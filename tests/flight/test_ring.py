"""The file of a flight record: what is written is read, by whomever, whenever, whatever was torn."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hpctrain.errors import DataError
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.ring import _NAME_BYTES, _NO_ROOM, SLOTS, End, Field, RingWriter, Word, file_name, mark_end, read, record_at


def test_a_ring_moves_into_a_file_with_all_that_it_holds(tmp_path: Path) -> None:
    ring = RingWriter()
    ring.words[Word.RANK], ring.words[Word.STEP] = 3, 7
    ring.words[Word.PHASE] = ring.name("data loading")
    ring.move(tmp_path / "deep" / "x.flight")
    ring.words[Word.STEP] = 8
    ring.words[Word.WAIT] = ring.name("größer")
    found = read(tmp_path / "deep" / "x.flight")
    assert (found.rank, found.step, found.phase, found.wait, found.end) == (3, 8, "data loading", "größer", End.RUNNING)


def test_a_name_has_one_place_and_the_empty_one_is_nothing() -> None:
    ring = RingWriter()
    first = ring.name("a")
    assert ring.name("b") != first == ring.name("a")
    assert ring.name("") == 0


def test_a_full_table_of_names_says_so(tmp_path: Path) -> None:
    ring = RingWriter()
    for number in range(_NAME_BYTES // 16):
        ring.name(f"{number:8d}")
    ring.words[Word.PHASE] = ring.name("one more")
    for number in range(100):
        ring.name(f"and {number:1000d}")
    ring.move(tmp_path / "x.flight")
    assert read(tmp_path / "x.flight").phase == _NO_ROOM


def test_the_latest_operations_are_kept(tmp_path: Path) -> None:
    recorder = FlightRecorder()
    queue = recorder.queue_of("world", (0, 1))
    for number in range(SLOTS + 10):
        assert recorder.queued(queue, f"p{number % 5}", number) == number + 1
    recorder.keep_in(tmp_path)
    found = read(tmp_path / file_name(0)).operations
    assert [each.sequence for each in found] == list(range(10, SLOTS + 10))
    assert {each.queue for each in found} == {"world of 0-1"}


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    ring = RingWriter()
    ring.words[Word.POSTED] = 2
    ring.words[record_at(1) + Field.NUMBER] = 1
    ring.words[record_at(2) + Field.SEQUENCE] = 99  # its number was not written any more
    ring.move(tmp_path / "x.flight")
    assert [each.number for each in read(tmp_path / "x.flight").operations] == [1]


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(1 << 20)])
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.flight").write_bytes(content)
    with pytest.raises(DataError, match=r"x.flight is no flight record of this version"):
        read(tmp_path / "x.flight")


class _Refusing:
    def flush(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


def test_a_disk_that_refuses_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the heartbeat, which flushes, nor the report of an error, which ends a record."""
    recorder = FlightRecorder()
    path = recorder.keep_in(tmp_path)
    monkeypatch.setattr(recorder._ring, "_map", _Refusing())
    recorder.flush()
    monkeypatch.undo()
    recorder.ended(End.FAILED, "why")
    assert read(path).sentence == "why"


@pytest.mark.parametrize("text", ["x-", "(name left out: the table is full)"])
def test_ranks_that_cannot_be_read_are_none(tmp_path: Path, text: str) -> None:
    ring = RingWriter()
    ring.words[Word.BLAMED] = ring.name(text)
    ring.move(tmp_path / "x.flight")
    assert read(tmp_path / "x.flight").blamed == ()


@pytest.mark.job
def test_it_survives_a_kill(tmp_path: Path) -> None:
    program = f"""
    import os, signal
    from pathlib import Path
    from hpctrain.flight.recorder import FlightRecorder
    recorder = FlightRecorder()
    recorder.join(5, 8, 1, 30.0)
    recorder.keep_in(Path({str(tmp_path)!r}))
    number = recorder.queued(recorder.queue_of("data", range(8)), "conv.weight", 41)
    recorder.phase("a training step")
    recorder.started(number, "allreduce of 9 float32 elements")
    os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=dict(os.environ), timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    found = read(tmp_path / file_name(5))
    assert (found.ranks, found.phase, found.end) == (8, "a training step", End.RUNNING)
    (operation,) = found.operations
    assert (operation.queue, operation.purpose, operation.sequence) == ("data of 0-7", "conv.weight", 41)
    assert operation.operation == "allreduce of 9 float32 elements"
    assert operation.started_ns >= operation.posted_ns > operation.done_ns == 0


def test_a_record_that_another_process_has_mapped_is_replaced_and_never_cut(tmp_path: Path) -> None:
    """Of two processes in one run, neither reads or overwrites the record that the other has mapped, nor marks its end."""
    first, second = FlightRecorder(), FlightRecorder()
    first.phase("a training step")
    path = first.keep_in(tmp_path)
    before = path.stat().st_ino
    second.phase("evaluation")
    assert second.keep_in(tmp_path) == path
    assert path.stat().st_ino != before
    first.phase("a checkpoint")
    assert read(path).phase == "evaluation"
    mark_end(path, 9, process=os.getpid() + 1)
    assert read(path).end == End.RUNNING
    mark_end(path, 9, process=os.getpid())
    assert read(path).end == End.SIGNAL
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("end", "number"), [(End.SIGNAL, 9), (End.LEFT, 0), (End.LEFT, 5)])
def test_an_end_is_marked_from_outside_unless_the_process_has_said_its_own(tmp_path: Path, end: End, number: int) -> None:
    recorder = FlightRecorder()
    path = recorder.keep_in(tmp_path)
    mark_end(path, number, end)
    assert (read(path).end, read(path).signal) == (end, number)
    recorder = FlightRecorder()
    path = recorder.keep_in(tmp_path)
    recorder.ended(End.FAILED, "why")
    mark_end(path, number, end)
    assert (read(path).end, read(path).sentence) == (End.FAILED, "why")


@pytest.mark.parametrize(
    ("end", "number", "stays"),
    [(End.SIGNAL, 9, False), (End.LEFT, 15, False), (End.LEFT, 0, True), (End.LEFT, 85, True), (End.LAUNCHER, 19, False)],
)
def test_a_run_that_has_finished_may_still_end_badly(tmp_path: Path, end: End, number: int, stays: bool) -> None:
    recorder = FlightRecorder()
    path = recorder.keep_in(tmp_path)
    recorder.ended(End.FINISHED)
    assert mark_end(path, number, end) is not stays
    assert read(path).end is (End.FINISHED if stays else end)
