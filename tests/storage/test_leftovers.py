"""Leftovers of killed runs go where they are old, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.launch import process_mark
from hpctrain.launch.process_mark import ProcessMark
from hpctrain.storage.leftovers import remove_left

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
    own = process_mark.own()
    marks = {"own": own, "dead": replace(own, begun="1"), "foreign": ProcessMark(7, "5", "n.b-1234abcd")}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as living:
        marks["living"] = replace(own, number=living.pid, begun=process_mark.begun(living.pid))
        files = {name: tmp_path / f"checkpoint-00000003.{kind}.{marks[name]}.partial" for name in marks for kind in ("h5",)}
        shards = tmp_path / f"checkpoint-00000004.shards.abcd.{marks['living']}.partial"
        shards.mkdir()
        for path in files.values():
            path.write_bytes(b"half")
            age(path, 1800)
        assert remove_left(tmp_path, least_age_seconds=3600) == []
        assert remove_left(tmp_path) == [files["dead"]]
        age(files["foreign"], 4000)
        age(files["living"], 4000)
        age(shards, 4000)
        assert remove_left(tmp_path) == [files["foreign"]]
        files["foreign"].write_bytes(b"half")
        other = tmp_path / f"best.json.{marks['foreign']}.partial"
        other.write_bytes(b"half")
        assert remove_left(tmp_path) == []
        assert set(remove_left(tmp_path, owned=True)) == {files["foreign"], other}
        assert set(tmp_path.iterdir()) == {files["own"], files["living"], shards}


def test_a_directory_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert remove_left(tmp_path / "absent") == []
