"""A node's local copy of samples: what it gives is what was written, or nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.comm.shared_memory import SharedMemory
from hpctrain.data.local_copy import LocalCopy, LocalSamples, fixed_size, table_bytes
from hpctrain.data.read_counts import CountedImages, ReadCounts
from tests.data.test_sample_memory import PIXELS, SHAPE, SIZE, N, Source


class Copies:
    """Two ranks' copies over one file and one table."""

    def __init__(self, path: Path, first: int = 0, count: int = N) -> None:
        table = SharedMemory(np.zeros(table_bytes(count), np.uint8))
        self.path = path
        path.touch()
        self.ranks = [LocalCopy(os.open(path, os.O_RDWR), fixed_size(SIZE), table, first, count) for _ in range(2)]


def read(copy: LocalCopy, sample: int) -> bytes | None:
    out = bytearray(SIZE)
    return bytes(out) if copy.read(sample, memoryview(out)) else None


def pixels_of(sample: int) -> memoryview:
    return memoryview(PIXELS[sample].reshape(-1))


def test_each_rank_reads_what_any_has_written(tmp_path: Path) -> None:
    first, second = Copies(tmp_path / "copy", first=3, count=5).ranks
    for sample in (7, 3, 2, 8):
        first.write(sample, pixels_of(sample))
    assert [read(second, sample) for sample in (2, 3, 4, 7, 8)] == [
        None,
        PIXELS[3].tobytes(),
        None,
        PIXELS[7].tobytes(),
        None,
    ]


def test_samples_of_any_size(tmp_path: Path) -> None:
    """The bytes of pictures as they are stored, one behind the other."""
    path = tmp_path / "copy"
    path.touch()
    lengths = [5, 0, 700, 1]
    ends = np.cumsum(lengths).tolist()
    stored = [os.urandom(length) for length in lengths]
    table = SharedMemory(np.zeros(table_bytes(4), np.uint8))
    copy = LocalCopy(os.open(path, os.O_RDWR), lambda number: (ends[number] - lengths[number], lengths[number]), table, 0, 4)
    for sample in (2, 0, 3, 1):
        copy.write(sample, memoryview(stored[sample]))
    for sample, expected in enumerate(stored):
        out = bytearray(lengths[sample])
        assert copy.read(sample, memoryview(out))
        assert out == expected
    assert path.stat().st_size == 706


@pytest.mark.parametrize("damage", ["cut", "changed", "removed disk"])
def test_bytes_that_are_others_are_not_given_and_can_be_written_again(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copies = Copies(tmp_path / "copy")
    first, second = copies.ranks
    for sample in range(N):
        first.write(sample, pixels_of(sample))
    preadv = os.preadv
    if damage == "cut":
        os.truncate(copies.path, 4 * SIZE + 1)
    elif damage == "changed":
        with copies.path.open("r+b") as file:
            file.seek(4 * SIZE + 7)
            file.write(bytes([PIXELS[4].reshape(-1)[7] ^ 1]))
    else:
        monkeypatch.setattr(os, "preadv", lambda *arguments: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    assert read(second, 4) is None
    monkeypatch.setattr(os, "preadv", preadv)
    assert read(first, 4) is None  # known to all ranks
    assert read(second, 3) == PIXELS[3].tobytes()
    second.write(4, pixels_of(4))
    assert read(first, 4) == PIXELS[4].tobytes()


def test_a_full_disk_ends_the_writing_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = Copies(tmp_path / "copy").ranks
    first.write(1, pixels_of(1))
    pwrite, calls = os.pwrite, []

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(data) > 50:
            return pwrite(descriptor, data[:50], offset)  # a disk takes what it has room for
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    first.write(2, pixels_of(2))
    first.write(3, pixels_of(3))
    assert len(calls) == 3  # two pieces of sample 2, then the error; nothing of sample 3
    assert [read(first, sample) for sample in (1, 2, 3)] == [PIXELS[1].tobytes(), None, None]


def levels() -> Iterator[tuple[int, int]]:
    yield 0, N
    yield 9, 6
    yield 0, 1


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(list(levels())))
def test_images_through_it_are_those_of_the_source(tmp_path: Path, data: st.DataObject, place: tuple[int, int]) -> None:
    (tmp_path / "copy").unlink(missing_ok=True)
    copies, counts = Copies(tmp_path / "copy", *place), ReadCounts()
    ranks = [LocalSamples(CountedImages(Source(), counts), copy, counts) for copy in copies.ranks]
    given_samples = 0
    for _ in range(data.draw(st.integers(1, 5))):
        level = ranks[data.draw(st.integers(0, 1))]
        samples = np.array(data.draw(st.lists(st.integers(0, N - 1), max_size=9, unique=True)), np.int64)
        out = np.empty((len(samples), *SHAPE), np.uint8)
        assert level.take(samples, out) is out
        assert np.array_equal(out, PIXELS[samples])
        sample = data.draw(st.integers(0, N - 1))
        rows, columns = (data.draw(st.slices(size)) for size in (5, 7))
        assert np.array_equal(level[sample, rows, columns], PIXELS[sample, rows, columns])
        given_samples += len(samples) + 1
        values = counts.values()
        assert values["file_samples"] + values["local_samples"] == given_samples
    some = data.draw(st.slices(N))
    assert np.array_equal(ranks[0][some], PIXELS[some])


def test_each_sample_is_read_from_the_source_once(tmp_path: Path) -> None:
    copies = Copies(tmp_path / "copy", 0, 10)
    sources = [Source(), Source()]
    ranks = [LocalSamples(source, copy, ReadCounts()) for source, copy in zip(sources, copies.ranks, strict=True)]
    for epoch in range(3):
        for number, level in enumerate(ranks):
            level.take(np.arange(N)[(number + epoch) % 2 :: 2], np.empty((N, *SHAPE), np.uint8)[(number + epoch) % 2 :: 2].copy())
    read_times = np.bincount(np.concatenate([source.taken for source in sources]), minlength=N)
    assert read_times.tolist() == [1] * 10 + [3] * (N - 10)


def test_a_sample_that_others_stand_in_for_is_not_kept(tmp_path: Path) -> None:
    copies = Copies(tmp_path / "copy")
    broken, intact = (
        LocalSamples(source, copy, ReadCounts()) for source, copy in zip((Source((4,)), Source()), copies.ranks, strict=True)
    )
    samples, out = np.array([3, 4]), np.empty((2, *SHAPE), np.uint8)
    for _ in range(2):
        assert np.array_equal(broken.take(samples, out), PIXELS[[3, 5]])
        assert np.array_equal(intact.take(samples, out), PIXELS[[3, 4]])
    assert broken.replaced == {4: 5}
