"""Files that are whole or what they were before, whatever interrupts their writing."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.launch import process_mark
from hpctrain.storage import atomic_write
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
from tests.support.nodes import NODES, make_node


def _failing(error: BaseException, number: int, function: Callable[..., object]) -> Callable[..., object]:
    """The function, which raises at its call of that number, counted from 1."""
    calls: list[int] = []

    def call(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == number:
            raise error
        return function(*arguments)

    return call


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupted"])
@pytest.mark.parametrize(("function", "number"), [("fsync", 1), ("replace", 1), ("fsync", 2)])
def test_an_error_at_any_stage_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int, error: BaseException
) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(atomic_write.os, function, _failing(error, number, getattr(os, function)))
        with pytest.raises(type(error)):
            write_text(path, "new")
    assert path.read_text() == ("new" if number == 2 else "old")
    assert list(tmp_path.iterdir()) == [path]


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
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("length", [3, 245])
def test_two_that_write_a_file_at_once_both_write_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    path = tmp_path / ("x" * (length - 3) + ".h5")
    dead = replace(process_mark.own(), begun="1")
    with monkeypatch.context() as patch:
        patch.setattr(process_mark, "own", lambda: dead)
        left = partial_path(path)
        left.write_bytes(b"as a kill leaves it")
    other = replace(process_mark.own(), begun="2", place="other")
    with replacing(path) as first:
        first.write_bytes(b"first")
        with monkeypatch.context() as patch:
            patch.setattr(process_mark, "own", lambda: other)
            with replacing(path) as second:
                second.write_bytes(b"second")
        assert path.read_bytes() == b"second"
        assert (writer_of(first), writer_of(second)) == (process_mark.own(), other)
    assert path.read_bytes() == b"first"
    with replacing(path) as first, replacing(path) as second:  # as by two threads
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


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
    with pytest.raises(OSError, match=r"only a regular file is replaced|Is a directory"), replacing(path) as partial:
        partial.write_text("new")
    (tmp_path / "complete").write_text("new")
    with pytest.raises(OSError, match=r"only a regular file is replaced"):
        publish(tmp_path / "complete", path)
    if kind == "null":
        write_text(path, "new")
    else:  # nobody reads the pipe; the full disk is full
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
    with pytest.raises(OSError, match="it is a link in the place of an unfinished file; delete it"):
        write_text(tmp_path / "a", "new")
    assert (tmp_path / "mine").read_text() == "mine"
