"""Atomic and background writes, files laid out in advance, leftovers of interrupted writers, and records that wait for room."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import stat
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.intervals import Box, relative, size_of, whole
from hpctrain.launch import processes
from hpctrain.launch.processes import ProcessMark
from hpctrain.runs import records as bookkeeping
from hpctrain.runs.directory import RunDirectory
from hpctrain.runs.records import Bookkeeping, PatientRecords
from hpctrain.storage import atomic_write, hdf5_store
from hpctrain.storage import shards as write_shares
from hpctrain.storage.atomic_write import (
    PARTIAL,
    partial_path,
    publish,
    replacing,
    write_bytes,
    write_json,
    write_text,
    writer_of,
)
from hpctrain.storage.checkpoint import remove_left
from hpctrain.storage.hdf5_store import StoreFile
from hpctrain.storage.shards import WriteShares
from hpctrain.training.saving import BackgroundWriter
from tests.support.data_files import NODES, make_node


def test_every_byte_is_on_the_disk_before_the_new_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synchronise(descriptor: int) -> None:
        order.append("directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synchronise)
    monkeypatch.setattr(os, "replace", lambda old, new: (order.append("rename"), replace(old, new)))
    write_bytes(tmp_path / "a", b"x" * 100_000)
    assert order == ["file", "rename", "directory"]


def test_the_file_is_the_old_one_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert (path.read_text(), partial.name.startswith("a.txt."), partial.suffix) == ("old", True, PARTIAL)
    assert path.read_text() == "new"
    with pytest.raises(FileNotFoundError), replacing(path):
        (tmp_path / "absent" / "half").write_text("half")
    with pytest.raises(FileNotFoundError, match=r"absent/a\.txt'$"):
        write_text(tmp_path / "absent" / "a.txt", "new")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("new", [path])


@pytest.mark.parametrize("length", [3, 245])
def test_two_that_write_a_file_at_once_both_write_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    path = tmp_path / ("x" * (length - 3) + ".h5")
    dead = replace(processes.own_mark(), begun="1")
    with monkeypatch.context() as patch:
        patch.setattr(processes, "own_mark", lambda: dead)
        left = partial_path(path)
        left.write_bytes(b"as a kill leaves it")
    other = replace(processes.own_mark(), begun="2", place="other")
    with replacing(path) as first:
        first.write_bytes(b"first")
        with monkeypatch.context() as patch:
            patch.setattr(processes, "own_mark", lambda: other)
            with replacing(path) as second:
                second.write_bytes(b"second")
        assert path.read_bytes() == b"second"
        assert (writer_of(first), writer_of(second)) == (processes.own_mark(), other)
    assert path.read_bytes() == b"first"
    with replacing(path) as first, replacing(path) as second:  # as by two threads
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"first", [path])


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link, dangling = tmp_path / "target.json", tmp_path / "link.json", tmp_path / "dangling.json"
    target.write_text("old")
    (tmp_path / "other").mkdir()
    link.symlink_to("target.json")
    dangling.symlink_to(tmp_path / "other" / "new.json")
    for path in (link, dangling):
        write_json(path, {"a": [1]})
        assert path.is_symlink()
        assert json.loads(path.read_text()) == {"a": [1]}
    assert not target.is_symlink()
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["new.json"]


@pytest.mark.parametrize("kind", [*NODES, "directory", "loop"])
@pytest.mark.parametrize("linked", [False, True])
def test_nothing_but_a_regular_file_is_replaced(kind: str, linked: bool, tmp_path: Path) -> None:
    node = make_node(tmp_path / "node", kind)
    path = tmp_path / "link" if linked else node
    if linked:
        path.symlink_to(node)
    before = os.lstat(node)
    with pytest.raises(OSError, match=r"only regular files can be replaced|Is a directory"), replacing(path) as partial:
        partial.write_text("new")
    (tmp_path / "complete").write_text("new")
    with pytest.raises(OSError, match=r"only regular files can be replaced"):
        publish(tmp_path / "complete", path)
    if kind == "null":
        write_text(path, "new")
    else:  # no process reads the pipe; the full disk is full
        with pytest.raises(OSError) if kind != "zero" else contextlib.nullcontext():
            write_text(path, "new")
    after = os.lstat(node)
    assert (after.st_mode, after.st_ino, after.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)
    assert not list(tmp_path.glob("*partial*"))


def test_a_pipe_that_is_read_gets_all_bytes(tmp_path: Path) -> None:
    path, content = make_node(tmp_path / "pipe", "pipe"), os.urandom(300_000)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    writer = os.open(path, os.O_WRONLY)  # without one, the reader would be at the end before there is any content
    parts: list[bytes] = []
    thread = threading.Thread(target=lambda: parts.extend(iter(lambda: os.read(reader, 1 << 16), b"")))
    thread.start()
    write_bytes(path, content)
    os.close(writer)
    thread.join()
    os.close(reader)
    assert b"".join(parts) == content


def test_an_open_file_is_written_where_it_stands(tmp_path: Path) -> None:
    """A shell may append /dev/stdout to a file; what the file already holds stays."""
    path = tmp_path / "log"
    path.write_text("before\n")
    with open(path, "ab") as file:
        write_text(Path(f"/dev/fd/{file.fileno()}"), "new\n")
        (tmp_path / "link").symlink_to(f"/proc/self/fd/{file.fileno()}")
        write_text(tmp_path / "link", "linked\n")
        for refused in (f"/dev/fd/{file.fileno()}", f"/proc/{os.getppid()}/fd/1"):
            with pytest.raises(OSError, match="it is an open file"), replacing(Path(refused)):
                pass
    assert path.read_text() == "before\nnew\nlinked\n"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_a_new_file_has_the_permissions_of_the_old_one(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    path.chmod(mode)
    write_text(path, "new")
    assert (stat.S_IMODE(path.stat().st_mode), path.read_text()) == (mode, "new")


def test_an_unfinished_file_that_is_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_write, "partial_path", lambda path: path.with_name(f"{path.name}{PARTIAL}"))
    (tmp_path / "mine").write_text("mine")
    (tmp_path / f"a{PARTIAL}").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="it is a link, not a regular file"):
        write_text(tmp_path / "a", "new")
    assert (tmp_path / "mine").read_text() == "mine"


def test_work_goes_on_next_to_the_program_and_returns_its_result() -> None:
    writer, go = BackgroundWriter(), threading.Event()
    assert writer.wait(0)
    writer.start(lambda: go.wait(30) and 7)
    assert writer.busy
    assert not writer.wait(0.01)
    with pytest.raises(AssertionError, match="another task is in progress"):
        writer.start(lambda: None)
    with pytest.raises(AssertionError, match="the task is not finished"):
        writer.result()
    go.set()
    assert writer.wait(30)
    assert writer.result() == 7


def test_an_error_is_the_callers_and_the_next_work_starts_without_it() -> None:
    writer = BackgroundWriter()
    writer.start(lambda: 1 // 0)
    assert writer.wait(30)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            writer.result()
    writer.start(lambda: None)
    assert writer.wait(30)
    assert writer.result() is None


def test_the_disk_sees_arrays_at_once_and_structures_at_the_end(tmp_path: Path) -> None:
    array, state = np.arange(9, dtype="<f4"), hashlib.sha256()
    with StoreFile(tmp_path / "f") as file:
        file.write(b"head")
        file.seek(100)
        file.write(b"tail")
        file.seek(2)
        file.write(b"AD")
        file.place(16, array, state.update)
        assert ((tmp_path / "f").read_bytes(), file.seek(0, os.SEEK_END)) == (bytes(16) + array.tobytes(), 104)
        file.seek(0)
        buffer = bytearray(6)
        assert (file.readinto(buffer), bytes(buffer)) == (6, b"heAD\0\0")
        file.finish()
    assert (tmp_path / "f").read_bytes() == b"heAD" + bytes(12) + array.tobytes() + bytes(48) + b"tail"
    assert state.digest() == hashlib.sha256(array.tobytes()).digest()


def test_writes_that_the_system_cuts_short_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: write(descriptor, data[:3], at))
    monkeypatch.setattr(hdf5_store, "_BLOCK", 7)
    with StoreFile(tmp_path / "f") as file:
        file.place(5, np.arange(11, dtype=np.uint8), lambda block: None)
        file.write(b"12345")
        file.finish()
    assert (tmp_path / "f").read_bytes() == b"12345" + bytes(range(11))


def test_an_error_of_the_disk_is_raised_and_the_file_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    with StoreFile(tmp_path / "f") as file:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            file.place(0, np.ones(3), lambda block: None)
        file.write(b"structures")  # HDF5 goes on to close its file, and receives no error
    assert len(os.listdir("/proc/self/fd")) == before


MOVES = st.lists(
    st.tuples(st.sampled_from([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END]), st.integers(0, 40), st.binary(min_size=1, max_size=20)),
    max_size=8,
)


@given(moves=MOVES)
def test_places_and_contents_are_those_of_a_plain_file(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[int, int, bytes]]
) -> None:
    directory = tmp_path_factory.mktemp("target")
    (directory / "a").write_bytes(b"what was there")
    with StoreFile(directory / "a") as target, open(directory / "b", "wb+") as plain:
        for whence, offset, data in moves:
            assert (target.seek(offset, whence), target.write(data)) == (plain.seek(offset, whence), plain.write(data))
            assert target.tell() == plain.tell()
        target.finish()
    assert target.closed
    target.close()
    assert (directory / "a").read_bytes() == (directory / "b").read_bytes()


SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=8)


@given(SHAPES, st.integers(1, 5), st.integers(5, 400))
def test_every_element_has_one_writer(shapes: list[tuple[int, ...]], holders: int, least_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_shares, "_SMALLEST_SHARED_BYTES", least_bytes)
        of_each = [WriteShares(number, holders) for number in range(holders)]
        for shape in shapes:
            times = np.zeros(shape, int)
            for one in of_each:
                box = one.own(whole(shape), 4)
                if box is not None:
                    times[relative(box, whole(shape))] += 1
            assert np.all(times == 1)


def test_large_ones_are_split_and_small_ones_go_to_those_with_least() -> None:
    large, small = whole((7, 65536)), whole((100,))
    of_each = [WriteShares(number, 3) for number in range(3)]
    sizes = [size_of(one.own(large, 4) or ()) for one in of_each]
    assert max(sizes) - min(sizes) <= 7
    owners: list[list[Box | None]] = [[one.own(small, 4) for one in of_each] for _ in range(3)]
    assert [boxes.index(small) for boxes in owners] == [0, 1, 2]


LEFT = ("checkpoint-00000007.h5.partial", "checkpoint-00000007.shards.abcd.partial", "checkpoint-00000005.shards.old.partial")
KEPT = ("checkpoint-00000007.h5", "checkpoint-00000007-before.shards", "notes.partial", "x.shards")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in (*LEFT, *KEPT):
        if ".shards" in name:
            (tmp_path / name).mkdir()
            (tmp_path / name / "shard-00000.h5").write_bytes(b"half")
        else:
            (tmp_path / name).write_bytes(b"half")
    return tmp_path


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    for each in (*(path.iterdir() if path.is_dir() else ()), path):
        os.utime(each, (then, then))


def test_all_of_it_goes_before_a_write(directory: Path) -> None:
    growing = directory / LEFT[1]
    assert set(remove_left(directory, growing)) == {directory / LEFT[0], directory / LEFT[2]}
    assert {path.name for path in directory.iterdir()} == {LEFT[1], *KEPT}


def test_elsewhere_what_was_written_to_lately_stays(directory: Path) -> None:
    for name in LEFT:
        age(directory / name, 5000)
    os.utime(directory / LEFT[1] / "shard-00000.h5")
    age(directory / LEFT[2], 3000)
    assert remove_left(directory, least_age_seconds=3600) == [directory / LEFT[0]]
    assert {path.name for path in directory.iterdir()} == {LEFT[1], LEFT[2], *KEPT}


@pytest.mark.job
def test_what_a_living_process_writes_stays(tmp_path: Path) -> None:
    """It stays at any age. A process on another machine may live, so its file stays for an hour, or until a new owner."""
    own = processes.own_mark()
    marks = {"own": own, "dead": replace(own, begun="1"), "foreign": ProcessMark(7, "5", "n.b-1234abcd")}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as living:
        marks["living"] = replace(own, number=living.pid, begun=processes.start_ticks(living.pid))
        files = {name: tmp_path / f"checkpoint-00000003.{kind}.{marks[name]}.partial" for name in marks for kind in ("h5",)}
        shards = tmp_path / f"checkpoint-00000004.shards.abcd.{marks['living']}.partial"
        shards.mkdir()
        for path in files.values():
            path.write_bytes(b"half")
            age(path, 1800)
        assert (remove_left(tmp_path, least_age_seconds=3600), remove_left(tmp_path)) == ([], [files["dead"]])
        age(files["foreign"], 4000)
        age(files["living"], 4000)
        age(shards, 4000)
        assert remove_left(tmp_path) == [files["foreign"]]
        files["foreign"].write_bytes(b"half")
        other = tmp_path / f"best.json.{marks['foreign']}.partial"
        other.write_bytes(b"half")
        assert (remove_left(tmp_path), set(remove_left(tmp_path, owned=True))) == ([], {files["foreign"], other})
        assert set(tmp_path.iterdir()) == {files["own"], files["living"], shards}


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
    assert said() == [f"Cannot write the metrics ({os.strerror(error)}); the run continues and will try again."]
    disk.error = 0
    records.add({"n": 4})
    assert (disk.records, said()[1:]) == ([0, 1, 2, 3, 4], ["The metrics can be written again."])
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


def test_another_reason_is_reported_again(said):
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
    assert not Bookkeeping().attempt("output", lambda: (_ for _ in ()).throw(BrokenPipeError(errno.EPIPE, "x")))
    with pytest.raises(ZeroDivisionError):
        Bookkeeping().attempt("output", lambda: 1 // 0)


def test_a_line_of_metrics_that_was_torn_is_written_whole_later(tmp_path, monkeypatch, said):
    run = RunDirectory.create(tmp_path, "run", config="a: 1\n", versions={}, git={})
    records = PatientRecords(run.bookkeeping, "metrics", run.append_metrics)
    records.add({"kind": "x", "n": 0})
    with open(run.metrics_path, "ab") as file:
        file.write(b'{"kind": "x", "n"')  # as far as there was room
    records.add({"kind": "x", "n": 1})
    assert ([line["n"] for line in run.metrics()], RunDirectory.open(run.path)) == ([0, 1], run)
