"""Tensors of shards as a mapping: whole, in part, and without reading what nobody asks for."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.boxes import Box
from hpctrain.storage import sharded_tensors
from hpctrain.storage.shard_file import Part, ShardFacts, write_shard
from hpctrain.storage.sharded_tensors import ShardedTensors, shares

WHOLE = np.arange(35, dtype="<f8").reshape(5, 7)
BOXES: tuple[Box, ...] = (((0, 2), (0, 7)), ((2, 5), (0, 3)), ((2, 5), (3, 7)))


def shards_in(directory: Path) -> list[ShardFacts]:
    def part(box: Box) -> Part:
        (a, b), (c, d) = box
        return Part((5, 7), box, np.ascontiguousarray(WHOLE[a:b, c:d]))

    return [write_shard(directory, rank, {"parameters/w": part(box)}) for rank, box in enumerate(BOXES)]


def test_any_box_comes_from_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_tensors, "_MOST_READERS", 2)
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
    assert list(tensors) == ["parameters/w"]
    assert len(tensors) == 1
    assert "parameters/w" in tensors
    assert "parameters/v" not in tensors
    assert tensors.get("parameters/v") is None
    assert tensors.facts("parameters/w") == ((5, 7), np.dtype("f8"))


def test_who_is_told_of_verified_shards_reads_the_bytes_that_it_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = shards_in(tmp_path)
    places = ShardedTensors(tmp_path, shards).verify([0, 2])
    assert set(places) == {0, 2}
    tensors, read, preadv = ShardedTensors(tmp_path, shards), [], os.preadv
    tensors.trust(places)
    monkeypatch.setattr(os, "preadv", lambda *arguments: read.append(preadv(*arguments)) or read[-1])
    assert np.array_equal(tensors.part("parameters/w", ((0, 4), (4, 6))), WHOLE[0:4, 4:6])
    assert sum(read) == 8 * 8
    assert np.array_equal(tensors.part("parameters/w", ((4, 5), (1, 2))), WHOLE[4:5, 1:2])
    assert sum(read) == 8 * 8 + 9 * 8, "the part of a shard that nobody has verified is read whole"


@given(st.lists(st.integers(1, 1000), max_size=20), st.integers(1, 7))
def test_shares_are_disjoint_and_as_even_as_the_largest_thing_allows(sizes: list[int], ranks: int) -> None:
    numbers = shares(sizes, ranks)
    assert len(numbers) == ranks
    assert sorted(number for share in numbers for number in share) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in share) for share in numbers]
    assert max(loads) - min(loads) <= max(sizes, default=0)
