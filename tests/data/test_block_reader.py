"""Stored bytes of samples, of one size and of several, whatever the disk does."""

import os

import numpy as np
import pytest

from hpctrain.data import block_reader
from hpctrain.data.block_reader import BlockReader
from hpctrain.data.extents import Extents
from hpctrain.data.unreadable import UnreadableError

pytestmark = pytest.mark.usefixtures("way")

SIZES = [5, 1, 300, 4097, 2, 9000, 77]
FIRST = 123


@pytest.fixture
def reader(tmp_path):
    """A reader of samples of `SIZES`, and their bytes."""
    random = np.random.default_rng(1)
    contents = [random.bytes(size) for size in SIZES]
    (tmp_path / "block").write_bytes(bytes(FIRST) + b"".join(contents) + b"behind")
    extents = Extents.rising(FIRST, np.cumsum([0, *SIZES]).astype(np.int64))
    block = np.memmap(tmp_path / "block", np.uint8, "r", FIRST, (extents.size_bytes,))
    return BlockReader(tmp_path / "block", block, extents), contents


def fetched(reader, samples):
    """What a reader fetches of samples, and the ones that it could not."""
    samples = np.array(samples, np.int64)
    sizes = reader.extents.sizes(samples)
    ends = np.cumsum(sizes)
    out = np.zeros(int(sizes.sum()), np.uint8)
    starts = reader.extents.starts(samples)[:, None]
    failed = reader.fetch(samples, starts, (ends - sizes)[:, None], sizes, out, patient=False)
    return [out[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)], failed


@pytest.mark.parametrize("samples", [[], [3], [6, 0, 0, 5], list(range(7))])
@pytest.mark.parametrize("at_once", [1, 3, 1024])
def test_stored_bytes_come_in_any_order(reader, samples, at_once, monkeypatch):
    reader, contents = reader
    monkeypatch.setattr(block_reader, "_PIECES_AT_ONCE", at_once)
    assert fetched(reader, samples) == ([contents[sample] for sample in samples], {})
    assert [reader.stored(sample) for sample in samples] == [contents[sample] for sample in samples]


@pytest.mark.parametrize("chunk", [1, 100, 4000, 1 << 20])
def test_blocks_cover_all_samples_in_order(reader, chunk, monkeypatch):
    reader, contents = reader
    monkeypatch.setattr(block_reader, "_CHUNK_BYTES", chunk)
    blocks = list(reader.blocks())
    assert np.concatenate([numbers for numbers, _, _ in blocks]).tolist() == list(range(7))
    assert b"".join(block.tobytes() for _, block, _ in blocks) == b"".join(contents)
    assert all(not failed for _, _, failed in blocks)
    assert len(blocks) == (1 if chunk == 1 << 20 else len(blocks))


def test_samples_behind_the_end_of_a_file_are_named(reader, tmp_path):
    reader, contents = reader
    os.truncate(tmp_path / "block", 4096)  # inside sample 3
    read, failed = fetched(reader, [6, 1, 3, 0])
    assert (read[1], read[3]) == (contents[1], contents[0])
    assert sorted(failed) == [0, 2]
    assert "the file ends at byte 4096" in failed[2]
    (_, _, missing), *_ = reader.blocks()
    assert sorted(missing) == [3, 4, 5, 6]
    with pytest.raises(UnreadableError, match=r"Sample 5 of the data file .*block cannot be read: the file ends at byte 4096"):
        reader.stored(5)
