"""Sharded checkpoints: whole or not there, no damage unnoticed, and the older ones are used as with single files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import CheckpointError
from hpctrain.storage import checkpoint, sharded_checkpoint
from hpctrain.storage.background_writer import BackgroundWriter
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path, prune, read, read_newest, set_aside, write
from hpctrain.storage.leftovers import remove_left
from hpctrain.storage.shard_file import Part, write_shard
from hpctrain.storage.sharded_checkpoint import moved_away, publish, unfinished

SHAPES = {"parameters/w": (7, 6), "parameters/b": (), "statistics/m": (5,)}


def content(step: int) -> CheckpointContent:
    random = np.random.default_rng(step)
    tensors = {key: np.array(random.standard_normal(shape), "<f4") for key, shape in SHAPES.items()}
    return CheckpointContent(tensors, {"global_step": step, "epoch": 1})


def parts_of(step: int) -> list[dict[str, Part]]:
    """Of two ranks: one tensor is split, the others are of one rank each."""
    tensors = content(step).tensors
    split = tensors["parameters/w"]
    return [
        {
            "parameters/w": Part((7, 6), ((0, 7), (0, 4)), np.ascontiguousarray(split[:, :4])),
            "parameters/b": Part((), (), tensors["parameters/b"]),
        },
        {
            "parameters/w": Part((7, 6), ((0, 7), (4, 6)), np.ascontiguousarray(split[:, 4:])),
            "statistics/m": Part((5,), ((0, 5),), tensors["statistics/m"]),
        },
    ]


def write_sharded(directory: Path, step: int, token: str = "t") -> Path:
    path = checkpoint_path(directory, step, sharded=True)
    growing = unfinished(path, token)
    remove_left(directory, growing)
    publish(growing, path, [write_shard(growing, rank, parts) for rank, parts in enumerate(parts_of(step))], content(step).meta)
    return path


def write_single(directory: Path, step: int) -> Path:
    path = checkpoint_path(directory, step)
    write(path, content(step))
    return path


WRITERS: dict[str, Callable[[Path, int], Path]] = {"single": write_single, "sharded": write_sharded}


def assert_is(found: CheckpointContent, step: int) -> None:
    expected = content(step)
    assert found.meta == expected.meta
    assert set(found.tensors) == set(expected.tensors)
    for key, values in expected.tensors.items():
        assert found.tensors[key].tobytes() == values.tobytes()
        assert found.tensors[key].shape == values.shape


def replace(path: Path, data: bytes) -> None:
    """As another file: HDF5 may still know the one that it has read."""
    other = path.with_name("other")
    other.write_bytes(data)
    other.replace(path)


def test_round_trip_beside_single_files(tmp_path: Path) -> None:
    first, second = write_single(tmp_path, 7), write_sharded(tmp_path, 9)
    assert_is(read(second), 9)
    assert checkpoint.checkpoints(tmp_path) == [(7, first), (9, second)]
    found = read_newest(tmp_path)
    assert found is not None
    assert found[0] == second
    assert sorted(path.name for path in second.iterdir()) == [
        "manifest.json",
        "manifest.sha256",
        "shard-00000.h5",
        "shard-00001.h5",
    ]


def test_a_file_that_is_gone_is_found(tmp_path: Path) -> None:
    path = write_sharded(tmp_path, 9)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        file.unlink()
        with pytest.raises(CheckpointError):
            read(path)
        replace(file, whole)
    assert_is(read(path), 9)


def test_a_shard_of_another_step_or_rank_is_found(tmp_path: Path) -> None:
    first, second = write_sharded(tmp_path, 7), write_sharded(tmp_path, 9)
    kept = (second / "shard-00001.h5").read_bytes()
    for other in (first / "shard-00001.h5", second / "shard-00000.h5"):
        shutil.copy(other, second / "shard-00001.h5")
        with pytest.raises(CheckpointError, match="shard-00001"):
            read(second)
    (second / "shard-00001.h5").write_bytes(kept)
    assert_is(read(second), 9)
    shutil.copy(first / "manifest.json", second / "manifest.json")
    with pytest.raises(CheckpointError, match="manifest"):
        read(second)


def test_old_ones_are_pruned_and_later_ones_set_aside(tmp_path: Path) -> None:
    for seconds, step in enumerate((5, 7, 9, 11)):
        os.utime(WRITERS["sharded" if step % 4 == 1 else "single"](tmp_path, step), (seconds, seconds))
    aside = set_aside(tmp_path, 7)
    assert [path.name for path in aside] == ["checkpoint-00000009-set-aside.shards", "checkpoint-00000011-set-aside.h5"]
    assert prune(tmp_path, 1) == [checkpoint_path(tmp_path, 5, sharded=True), aside[0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000007.h5", aside[1].name]


def test_a_step_is_set_aside_once_more(tmp_path: Path) -> None:
    """As in a run that goes back twice: the later one takes the place of the earlier one."""
    for kind in ("sharded", "single", "sharded"):
        WRITERS[kind](tmp_path, 9)
        (aside,) = set_aside(tmp_path, 7)
        assert_is(read(aside), 9)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_same_step_once_more(tmp_path: Path) -> None:
    path = write_sharded(tmp_path, 7)
    (path / "shard-00000.h5").write_bytes(b"damaged")
    write_sharded(tmp_path, 7)
    assert_is(read(path), 7)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_parts_that_lack_something_are_a_bug(tmp_path: Path) -> None:
    growing = unfinished(checkpoint_path(tmp_path, 7, sharded=True), "t")
    with pytest.raises(AssertionError, match="parts of parameters/w have 28 elements"):
        publish(growing, checkpoint_path(tmp_path, 7, sharded=True), [write_shard(growing, 0, parts_of(7)[0])], {})


_CALLS = ("pwrite", "fsync", "replace", "ftruncate", "open", "unlink", "mkdir", "rmdir")


def _crash_at(call: int, work: Callable[[], object]) -> bool:
    """Run `work` in a thread of a child process that ends before its call number `call` to the system; whether it did all."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    made = []
    try:
        for name in _CALLS:
            original = getattr(os, name)

            def counted(*arguments: object, original: Callable[..., object] = original, **options: object) -> object:
                made.append(1)
                if len(made) > call:
                    os._exit(1)
                return original(*arguments, **options)

            setattr(os, name, counted)
        writer = BackgroundWriter()
        writer.start(work)
        os._exit(0 if writer.wait(60) and writer.result() is None else 2)
    finally:
        os._exit(3)


@pytest.mark.slow
@pytest.mark.job
@pytest.mark.parametrize(("kind", "older"), [("single", "sharded"), ("sharded", "single"), ("sharded", "sharded")])
def test_a_crash_at_any_call_to_the_system_leaves_a_checkpoint_to_go_on_from(tmp_path: Path, kind: str, older: str) -> None:
    def work(directory: Path) -> None:
        WRITERS[kind](directory, 9)
        prune(directory, 1)

    call, steps, done = 0, set(), False
    while not done:
        directory = tmp_path / f"{call}"
        directory.mkdir()
        os.utime(WRITERS[older](directory, 7), (1, 1))
        done = _crash_at(call, partial(work, directory))
        found = read_newest(directory)
        assert found is not None, f"nothing is left after {call} calls"
        step = int(str(found[1].meta["global_step"]))
        assert_is(found[1], step)
        steps.add(step)
        (WRITERS[kind])(directory, 11)
        assert not list(directory.glob("*.partial")), f"something is left after {call} calls"
        assert_is(read(checkpoint.checkpoints(directory)[-1][1]), 11)
        shutil.rmtree(directory)
        call += 1
    assert steps == {7, 9}
    assert call > 10


@pytest.mark.slow
@pytest.mark.job
def test_a_crash_while_the_only_checkpoint_is_written_once_more_leaves_it_whole(tmp_path: Path) -> None:
    """The same step as before, of which one is kept; at the end there is one."""
    call, done = 0, False
    while not done:
        directory = tmp_path / f"{call}"
        directory.mkdir()
        write_sharded(directory, 9)

        def work(directory: Path = directory) -> None:
            write_sharded(directory, 9)
            prune(directory, 1)

        done = _crash_at(call, work)
        found = read_newest(directory)
        assert found is not None, f"nothing is left after {call} calls"
        assert_is(found[1], 9)
        write_sharded(directory, 9)
        assert [path.name for path in directory.iterdir()] == ["checkpoint-00000009.shards"]
        shutil.rmtree(directory)
        call += 1
    assert call > 10


def test_one_that_waits_for_another_of_its_step_is_a_checkpoint(tmp_path: Path) -> None:
    path = write_sharded(tmp_path, 9)
    path.rename(moved_away(path))
    assert checkpoint.checkpoints(tmp_path) == [(9, moved_away(path))]
    write_sharded(tmp_path, 9, token="u")
    assert checkpoint.checkpoints(tmp_path) == [(9, path)]
    shutil.copytree(path, moved_away(path))
    assert [each for _, each in checkpoint.checkpoints(tmp_path)] == [moved_away(path), path], "the new one is the newest"
    for _ in range(2):  # a run may go back to the same step twice
        aside = set_aside(tmp_path, 7)
        assert [each.name for each in aside][-1] == "checkpoint-00000009-set-aside.shards"
        assert checkpoint.checkpoints(tmp_path) == []
        write_sharded(tmp_path, 9)
    assert len(prune(tmp_path, 1)) == 1, "those that are set aside are counted for themselves"


@pytest.mark.parametrize("name", ["pwrite", "fsync", "replace"])
def test_a_full_disk_is_one_sentence_and_trying_again_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_sharded(tmp_path, 7)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, name, full)
        with pytest.raises(CheckpointError, match=r"cannot be written .*No space left on device"):
            write_sharded(tmp_path, 9)
    found = read_newest(tmp_path)
    assert found is not None
    assert_is(found[1], 7)
    assert_is(read(write_sharded(tmp_path, 9)), 9)
    assert not list(tmp_path.glob("*.partial"))


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_checkpoint, "_VERSION", 2)
    path = write_sharded(tmp_path, 7)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="sharded format version 2; this hpctrain reads 1"):
        read(path)


def test_a_pipe_in_the_place_of_a_manifest_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-00000001.shards"
    path.mkdir()
    os.mkfifo(path / "manifest.json")
    with pytest.raises(CheckpointError, match="has no manifest"):
        sharded_checkpoint.open_sharded(path)
