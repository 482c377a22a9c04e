"""One rank's shard: its parts and their places, and no other file in its stead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpctrain.errors import CheckpointError
from hpctrain.storage.shard_file import Part, ShardReader, write_shard

BOX = ((2, 4), (0, 3))
PARTS = {"parameters/w": Part((4, 3), BOX, np.arange(6, dtype="<f4").reshape(2, 3))}


def test_parts_are_read_back(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "growing", 3, PARTS)
    assert shard.name == "shard-00003.h5"
    assert shard.size == (tmp_path / "growing" / shard.name).stat().st_size
    assert shard.parts == {"parameters/w": ((4, 3), "<f4", BOX)}
    reader = ShardReader(tmp_path / "growing" / shard.name, shard)
    assert np.array_equal(reader.read("parameters/w", BOX), PARTS["parameters/w"].values)
    with pytest.raises(CheckpointError, match=r"parameters/w .* does not match"):
        reader.read("parameters/w", ((0, 1), (0, 3)))
    with pytest.raises(CheckpointError, match="cannot read it"):
        reader.read("parameters/other", BOX)
    reader.close()


def test_a_file_that_is_not_that_shard_is_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, 0, PARTS)
    path = tmp_path / shard.name
    with pytest.raises(CheckpointError, match="is missing"):
        ShardReader(tmp_path / "absent.h5", shard)
    with pytest.raises(CheckpointError, match=f"has {shard.size} bytes instead of 9"):
        ShardReader(path, replace(shard, size=9))
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        ShardReader(path, replace(shard, sha256="0" * 64))


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_shard(tmp_path / "file" / "growing", 0, PARTS)
