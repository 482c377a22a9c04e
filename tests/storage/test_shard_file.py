"""One rank's shard: its parts and their places, and no other file in its stead."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.boxes import Box, relative
from hpctrain.errors import CheckpointError
from hpctrain.storage.shard_file import Part, ShardReader, runs, write_shard

BOX = ((2, 4), (0, 3))
PARTS = {"parameters/w": Part((4, 3), BOX, np.arange(6, dtype="<f4").reshape(2, 3))}


def test_parts_are_read_back(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "growing", 3, PARTS)
    assert shard.name == "shard-00003.h5"
    assert shard.size == (tmp_path / "growing" / shard.name).stat().st_size
    assert shard.parts == {"parameters/w": ((4, 3), "<f4", BOX)}
    reader = ShardReader(tmp_path / "growing" / shard.name, shard)
    assert np.array_equal(reader.read("parameters/w", BOX), PARTS["parameters/w"].values)
    places = reader.verify()
    reader.close()
    told = ShardReader(tmp_path / "growing" / shard.name, shard, places)
    assert np.array_equal(told.read("parameters/w", ((3, 4), (1, 3))), [[4, 5]])
    told.close()


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


def test_a_shard_whose_manifest_names_other_tensors_is_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, 0, PARTS)
    other = replace(shard, parts={**shard.parts, "parameters/v": shard.parts["parameters/w"]})
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        ShardReader(tmp_path / shard.name, other)


@given(st.data())
def test_the_runs_of_a_box_are_its_elements_in_order_and_as_long_as_they_can_be(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    first = [data.draw(st.integers(0, 9)) for _ in shape]
    held = tuple((begin, begin + size) for begin, size in zip(first, shape, strict=True))
    box = tuple(tuple(sorted((data.draw(st.integers(begin, stop)), data.draw(st.integers(begin, stop))))) for begin, stop in held)
    elements = np.arange(math.prod(shape), dtype="<u2").reshape(shape)
    run, offsets = runs(held, box, 2)
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
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        ShardReader(path, replace(shard, sha256="0" * 64))


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_shard(tmp_path / "file" / "growing", 0, PARTS)
