"""Sharded checkpoints: whole or not there, read in parts, and no damage unnoticed, as with single files."""

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.errors import CheckpointError
from hpctrain.core.intervals import Box, relative
from hpctrain.storage import checkpoint, hdf5_store
from hpctrain.storage import shards as sharded_checkpoint
from hpctrain.storage.atomic_write import partial_path
from hpctrain.storage.checkpoint import (
    CheckpointContent,
    checkpoint_path,
    prune,
    read,
    remove_left,
    set_aside,
    write,
)
from hpctrain.storage.hdf5_store import ShardedTensors, ShardFacts, ShardReader, contiguous_runs
from hpctrain.storage.shards import (
    Part,
    moved_away,
    publish,
    shares,
    write_shard,
)
from tests.support.crashes import crash_at
from tests.support.newest_checkpoint import read_newest
from tests.support.sampling import amount

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
    growing = partial_path(path, token)
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
    assert (found.meta, set(found.tensors)) == (expected.meta, set(expected.tensors))
    for key, values in expected.tensors.items():
        assert (found.tensors[key].tobytes(), found.tensors[key].shape) == (values.tobytes(), values.shape)


def put(path: Path, data: bytes) -> None:
    """As another file: HDF5 may still know the one that it has read."""
    other = path.with_name("other")
    other.write_bytes(data)
    other.replace(path)


def test_round_trip_next_to_single_files(tmp_path: Path) -> None:
    first, second = write_single(tmp_path, 7), write_sharded(tmp_path, 9)
    assert_is(read(second), 9)
    assert checkpoint.checkpoints(tmp_path) == [(7, first), (9, second)]
    found = read_newest(tmp_path)
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
        put(file, whole)
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
    growing = partial_path(checkpoint_path(tmp_path, 7, sharded=True), "t")
    with pytest.raises(AssertionError, match="parts of parameters/w have 28 elements"):
        publish(growing, checkpoint_path(tmp_path, 7, sharded=True), [write_shard(growing, 0, parts_of(7)[0])], {})


@pytest.mark.slow
@pytest.mark.job
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "older", "old"),
    [("single", "sharded", 7), ("sharded", "single", 7), ("sharded", "sharded", 7), ("sharded", "sharded", 9)],
)
def test_a_crash_at_any_call_to_the_system_leaves_a_checkpoint_to_go_on_from(
    tmp_path: Path, kind: str, older: str, old: int
) -> None:
    """Of two, one is kept. The older one may be of the same step, which is written once more."""

    def work(directory: Path) -> None:
        WRITERS[kind](directory, 9)
        prune(directory, 1)

    call, steps, done = 0, set(), False
    while not done:
        directory = tmp_path / f"{call}"
        directory.mkdir()
        os.utime(WRITERS[older](directory, old), (1, 1))
        done = crash_at(call, partial(work, directory))
        found = read_newest(directory)
        assert found is not None, f"nothing is left after {call} calls"
        step = int(str(found[1].meta["global_step"]))
        assert_is(found[1], step)
        steps.add(step)
        last = WRITERS[kind](directory, 11 if old == 7 else 9)
        assert not list(directory.glob("*.partial")), f"something is left after {call} calls"
        assert old == 7 or list(directory.iterdir()) == [last]
        assert_is(read(checkpoint.checkpoints(directory)[-1][1]), 11 if old == 7 else 9)
        shutil.rmtree(directory)
        call += 1
    assert steps == {old, 9}
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
        with pytest.raises(CheckpointError, match=r"cannot be written \(No space left on device\); free disk space or"):
            write_sharded(tmp_path, 9)
    found = read_newest(tmp_path)
    assert_is(found[1], 7)
    assert_is(read(write_sharded(tmp_path, 9)), 9)
    assert not list(tmp_path.glob("*.partial"))


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_checkpoint, "_VERSION", 2)
    path = write_sharded(tmp_path, 7)
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError, match="has format version 2, but this hpctrain reads version 1; use the hpctrain that wrote it"
    ):
        read(path)


def test_a_pipe_in_the_place_of_a_manifest_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-00000001.shards"
    path.mkdir()
    os.mkfifo(path / "manifest.json")
    with pytest.raises(CheckpointError, match=r"The manifest of checkpoint .* cannot be read"):
        sharded_checkpoint.open_sharded(path)


BOX = ((2, 4), (0, 3))
PARTS = {"parameters/w": Part((4, 3), BOX, np.arange(6, dtype="<f4").reshape(2, 3))}


def test_parts_are_read_back(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "growing", 3, PARTS)
    assert (shard.name, shard.size) == ("shard-00003.h5", (tmp_path / "growing" / shard.name).stat().st_size)
    assert shard.parts == {"parameters/w": ((4, 3), "<f4", BOX)}
    reader = ShardReader(tmp_path / "growing" / shard.name, shard)
    assert np.array_equal(reader.read("parameters/w", BOX), PARTS["parameters/w"].values)
    places = reader.verify()
    reader.close()
    trusting = ShardReader(tmp_path / "growing" / shard.name, shard, places)
    assert np.array_equal(trusting.read("parameters/w", ((3, 4), (1, 3))), [[4, 5]])
    trusting.close()


@pytest.mark.parametrize("box", [BOX, ((2, 3), (0, 3))])
def test_a_flipped_bit_is_found_in_a_part_and_before_a_piece_of_it_is_used(tmp_path: Path, box: Box) -> None:
    shard = write_shard(tmp_path, 0, PARTS)
    path = tmp_path / shard.name
    data = bytearray(path.read_bytes())
    data[data.index(PARTS["parameters/w"].values.tobytes()) + 23] ^= 1  # of the last element
    path.write_bytes(data)
    reader = ShardReader(path, shard)
    for work in (reader.verify, partial(reader.read, "parameters/w", box)):
        with pytest.raises(CheckpointError, match=r"parameters/w .* does not match"):
            work()
    reader.close()


@given(st.data())
def test_the_runs_of_a_box_are_its_elements_in_order_and_as_long_as_they_can_be(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    first = [data.draw(st.integers(0, 9)) for _ in shape]
    held = tuple((begin, begin + size) for begin, size in zip(first, shape, strict=True))
    box = tuple(tuple(sorted((data.draw(st.integers(begin, stop)), data.draw(st.integers(begin, stop))))) for begin, stop in held)
    elements = np.arange(math.prod(shape), dtype="<u2").reshape(shape)
    run, offsets = contiguous_runs(held, box, 2)
    places = list(offsets)
    memory = elements.tobytes()
    assert b"".join(memory[place : place + run] for place in places) == elements[relative(box, held)].tobytes()
    whole_dims = all(stop - start == size for (start, stop), size in zip(box, shape, strict=True))
    assert not whole_dims or places == [0]


def test_a_file_that_is_not_that_shard_is_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, 0, PARTS)
    path = tmp_path / shard.name
    with pytest.raises(CheckpointError, match="is missing"):
        ShardReader(tmp_path / "absent.h5", shard)
    with pytest.raises(CheckpointError, match=f"has {shard.size} bytes instead of 9"):
        ShardReader(path, replace(shard, size=9))
    more = {**shard.parts, "parameters/v": shard.parts["parameters/w"]}
    for other in (replace(shard, sha256="0" * 64), replace(shard, parts=more)):
        with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
            ShardReader(path, other)


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"shard-00000.h5 cannot be written \(Not a directory\); choose another output\.$"):
        write_shard(tmp_path / "file" / "growing", 0, PARTS)


WHOLE = np.arange(35, dtype="<f8").reshape(5, 7)
BOXES: tuple[Box, ...] = (((0, 2), (0, 7)), ((2, 5), (0, 3)), ((2, 5), (3, 7)))


def shards_in(directory: Path) -> list[ShardFacts]:
    def part(box: Box) -> Part:
        (a, b), (c, d) = box
        return Part((5, 7), box, np.ascontiguousarray(WHOLE[a:b, c:d]))

    return [write_shard(directory, rank, {"parameters/w": part(box)}) for rank, box in enumerate(BOXES)]


def test_any_box_comes_from_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5_store, "_MOST_READERS", 2)
    tensors = ShardedTensors(tmp_path, shards_in(tmp_path))
    assert np.array_equal(tensors["parameters/w"], WHOLE)
    for a in range(5):
        for b in range(a, 6):
            box = ((a, b), (b, 7))
            assert np.array_equal(tensors.part("parameters/w", box), WHOLE[a:b, b:7])
    tensors.verify()
    tensors.close()
    assert np.array_equal(tensors.part("parameters/w", ((4, 5), (6, 7))), [[34.0]])


def test_names_and_facts_read_nothing(tmp_path: Path) -> None:
    tensors = ShardedTensors(tmp_path / "absent", shards_in(tmp_path))
    assert (list(tensors), len(tensors)) == (["parameters/w"], 1)
    assert "parameters/w" in tensors
    assert "parameters/v" not in tensors
    assert tensors.get("parameters/v") is None
    assert tensors.facts("parameters/w") == ((5, 7), np.dtype("f8"))


def test_a_reader_of_verified_shards_reads_the_bytes_that_it_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = shards_in(tmp_path)
    places = ShardedTensors(tmp_path, shards).verify([0, 2])
    assert set(places) == {0, 2}
    tensors, read, preadv = ShardedTensors(tmp_path, shards), [], os.preadv
    tensors.trust(places)
    monkeypatch.setattr(os, "preadv", lambda *arguments: read.append(preadv(*arguments)) or read[-1])
    assert np.array_equal(tensors.part("parameters/w", ((0, 4), (4, 6))), WHOLE[0:4, 4:6])
    assert sum(read) == 8 * 8
    assert np.array_equal(tensors.part("parameters/w", ((4, 5), (1, 2))), WHOLE[4:5, 1:2])
    assert sum(read) == 8 * 8 + 9 * 8, "the part of a shard that is not verified is read whole"


@given(st.lists(st.integers(1, 1000), max_size=20), st.integers(1, 7))
def test_shares_are_disjoint_and_as_even_as_the_largest_thing_allows(sizes: list[int], ranks: int) -> None:
    numbers = shares(sizes, ranks)
    assert (len(numbers), sorted(number for share in numbers for number in share)) == (ranks, list(range(len(sizes))))
    loads = [sum(sizes[number] for number in share) for share in numbers]
    assert max(loads) - min(loads) <= max(sizes, default=0)


Writer = Callable[[Path, int], Path]
#: writer, file of the checkpoint, bits that flip, early ends
CASES: dict[str, tuple[Writer, str | None, int, int]] = {
    "single": (write_single, None, 300, 60),
    "shard 0": (write_sharded, "shard-00000.h5", 160, 30),
    "shard 1": (write_sharded, "shard-00001.h5", 160, 30),
    "manifest": (write_sharded, "manifest.json", 160, 30),
    "digest": (write_sharded, "manifest.sha256", 50, 20),
}


def used(directory: Path) -> int:
    """The step of the checkpoint that is used, in which every bit is right."""
    newest = read_newest(directory)
    step = int(newest[0].name.split("-")[1].split(".")[0])
    assert_is(newest[1], step)
    return step


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_damage_is_found_and_the_checkpoint_before_is_used(tmp_path: Path, case: str) -> None:
    writer, name, flips, ends = CASES[case]
    write_single(tmp_path, 7)
    path = writer(tmp_path, 9)
    file = path if name is None else path / name
    whole, random = file.read_bytes(), np.random.default_rng(sorted(CASES).index(case))
    for _ in range(amount(flips // 5, flips)):
        place, bit = int(random.integers(len(whole))), int(random.integers(8))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        put(file, bytes(damaged))
        assert used(tmp_path) == 7, f"bit {bit} of byte {place} of {len(whole)}"
    for length in random.integers(0, len(whole), amount(ends // 3, ends)):
        put(file, whole[: int(length)])
        assert used(tmp_path) == 7, f"{length} of {len(whole)} bytes"
    put(file, whole)
    assert used(tmp_path) == 9
