"""Files that are whole or what they were before, whatever interrupts their writing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.storage import atomic_write
from hpctrain.storage.atomic_write import PARTIAL, replacing, write_bytes, write_json, write_text


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
        assert (path.read_text(), partial.name) == ("old", "a.txt" + PARTIAL)
    assert path.read_text() == "new"
    with pytest.raises(FileNotFoundError), replacing(path):
        (tmp_path / "absent" / "half").write_text("half")
    with pytest.raises(FileNotFoundError, match=r"absent/a\.txt'$"):
        write_text(tmp_path / "absent" / "a.txt", "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_json(link, {"a": [1]})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"a": [1]}
    write_text(Path(os.devnull), "nothing")
    assert not Path(os.devnull).is_file()
