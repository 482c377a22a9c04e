"""Tensors of shards as a mapping: whole, in part, and without reading what nobody asks for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.boxes import Box
from hpctrain.storage import sharded_tensors
from hpctrain.storage.shard_file import Part, ShardFacts, write_shard
from hpctrain.storage.sharded_tensors import ShardedTensors

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
