"""Samples that ranks of a node share: the source's pixels at any limit, each read once, and none that others stand in for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.comm.shared_memory import SharedMemory
from hpctrain.data.read_counts import CountedImages, ReadCounts
from hpctrain.data.sample_memory import NodeRank, SampleMemory, bytes_for, held_in
from hpctrain.data.unreadable import UnreadableError

SHAPE = (5, 7, 3)
SIZE = 5 * 7 * 3
N = 23
PIXELS = np.random.default_rng(4).integers(0, 256, (N, *SHAPE), np.uint8)


class Source:
    """The images, some of which cannot be read by this rank: others stand in for them, or that is an error."""

    def __init__(self, bad: tuple[int, ...] = (), *, stops: bool = False) -> None:
        self.shape = PIXELS.shape
        self.replaced: dict[int, int] = {}
        self.taken: list[int] = []
        self._bad, self._stops = bad, stops

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        self.taken += samples.tolist()
        for sample, target in zip(samples.tolist(), out, strict=True):
            if sample in self._bad:
                if self._stops:
                    raise UnreadableError(f"Sample {sample} cannot be read.")
                self.replaced[sample] = (sample + 1) % N
            target[...] = PIXELS[self.replaced.get(sample, sample)]
        return out

    def __getitem__(self, index: int | slice | tuple[int | slice, slice, slice]) -> np.ndarray:
        wanted, *region = index if isinstance(index, tuple) else (index,)
        assert isinstance(wanted, int), "memory asks for single samples only"
        return self.take(np.array([wanted]), np.empty((1, *SHAPE), np.uint8))[0][tuple(region)]


@dataclass
class Node:
    """Ranks that share memory for `held` samples, each with a source and counts of its own."""

    ranks: int
    held: int
    bad: tuple[int, ...] = ()  # of rank 0

    def __post_init__(self) -> None:
        memory = SharedMemory(np.zeros(bytes_for(self.held, SIZE), np.uint8))
        self.sources = [Source(self.bad if rank == 0 else ()) for rank in range(self.ranks)]
        self.counts = [ReadCounts() for _ in range(self.ranks)]
        self.levels = [
            SampleMemory(CountedImages(source, counts), memory, self.held, counts, NodeRank(rank, self.ranks))
            for rank, (source, counts) in enumerate(zip(self.sources, self.counts, strict=True))
        ]


def taken(level: SampleMemory, samples: list[int]) -> np.ndarray:
    out = np.full((len(samples), *SHAPE), 99, np.uint8)
    assert level.take(np.array(samples, np.int64), out) is out
    return out


def indices() -> Iterator[st.SearchStrategy]:
    yield st.integers(0, N - 1)
    yield st.slices(N)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, N), st.integers(1, 3))
def test_all_ways_to_read_give_the_pixels_of_the_source(data: st.DataObject, held: int, ranks: int) -> None:
    node = Node(ranks, held)
    for _ in range(data.draw(st.integers(1, 6))):
        level = node.levels[data.draw(st.integers(0, ranks - 1))]
        samples = data.draw(st.lists(st.integers(0, N - 1), max_size=9))
        assert np.array_equal(taken(level, samples), PIXELS[samples])
        index = data.draw(st.one_of(*indices()))
        rows, columns = (data.draw(st.slices(size)) for size in (5, 7))
        level.bring(np.array(samples, np.int64))
        assert np.array_equal(level[index, rows, columns], PIXELS[index, rows, columns])
        assert np.array_equal(level[index], PIXELS[index])


@pytest.mark.parametrize("held", [N, 9, 1])
def test_what_is_kept_is_read_from_the_source_once_over_all_ranks(held: int) -> None:
    node = Node(2, held)
    order = np.random.default_rng(1).permutation(N)
    for epoch in range(3):
        for rank, level in enumerate(node.levels):
            samples = np.roll(order, epoch)[rank::2].tolist()
            assert np.array_equal(taken(level, samples), PIXELS[samples])
    read = np.bincount(np.concatenate([source.taken for source in node.sources]), minlength=N)
    assert (read[:held] == 1).all()
    assert (read[held:] == 3).all()
    values = [counts.values() for counts in node.counts]
    file, memory = (sum(value[f"{name}_samples"] for value in values) for name in ("file", "memory"))
    assert (file, memory) == (held + 3 * (N - held), 2 * held)
    assert sum(value["file_bytes"] + value["memory_bytes"] for value in values) == 3 * N * SIZE
    assert all(level.full for level in node.levels)


def test_ranks_that_need_the_same_samples_at_once_share_the_reading() -> None:
    node = Node(2, N)
    start = threading.Barrier(2)

    def read(level: SampleMemory) -> None:
        start.wait()
        level.bring(np.arange(N))

    threads = [threading.Thread(target=read, args=(level,)) for level in node.levels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(taken(level, list(range(N))), PIXELS) for level in node.levels)


def test_a_sample_that_others_stand_in_for_is_not_kept_and_stays_replaced_on_its_rank() -> None:
    """Its label is that of the other one: pixels of the sample itself, which another rank has read, would not go with it."""
    node = Node(2, N, bad=(4,))
    assert np.array_equal(taken(node.levels[0], [3, 4, 5]), PIXELS[[3, 5, 5]])
    assert node.levels[0].replaced == {4: 5}
    assert np.array_equal(taken(node.levels[1], [3, 4, 5]), PIXELS[[3, 4, 5]])
    assert node.sources[1].taken == [4]
    for _ in range(2):
        assert np.array_equal(taken(node.levels[0], [5, 4]), PIXELS[[5, 5]])
        assert np.array_equal(node.levels[0][4], PIXELS[5])


def test_an_error_leaves_nothing_that_looks_as_if_it_were_there() -> None:
    memory = SharedMemory(np.zeros(bytes_for(N, SIZE), np.uint8))
    broken = SampleMemory(Source((7,), stops=True), memory, N, ReadCounts())
    intact = SampleMemory(Source(), memory, N, ReadCounts())
    for read in (lambda: taken(broken, [6, 7, 8]), lambda: broken[7], lambda: broken.bring(np.array([6, 7]))):
        with pytest.raises(UnreadableError, match="Sample 7"):
            read()
    assert np.array_equal(taken(intact, list(range(N))), PIXELS)


def test_a_rank_waits_for_another_that_reads_and_then_reads_by_itself() -> None:
    memory = SharedMemory(np.zeros(bytes_for(N, SIZE), np.uint8))
    source, pauses = Source(), []
    memory.array[[2, 5]] = 1  # being read

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            memory.array[bytes_for(0, SIZE) + 64 + 2 * SIZE :][:SIZE] = PIXELS[2].reshape(-1)
            memory.array[2] = 2  # it is there

    level = SampleMemory(source, memory, N, ReadCounts(), patience_seconds=0.05, sleep=sleep)
    assert np.array_equal(taken(level, [1, 2, 5]), PIXELS[[1, 2, 5]])
    assert source.taken == [1, 5]
    assert sum(pauses) == pytest.approx(0.05)


def test_samples_that_are_read_ahead_are_put_into_memory_of_other_nodes() -> None:
    here, there = Node(2, 9, bad=(4,)), Node(1, 9)
    images, kept = np.empty((6, *SHAPE), np.uint8), np.empty(6, np.uint8)
    here.levels[0].read_ahead(2, images, kept)
    assert kept.tolist() == [1, 1, 0, 1, 1, 1]
    there.levels[0].put(2, images, kept)
    values = there.counts[0].values()
    assert (values["nodes_samples"], values["nodes_bytes"], values["file_samples"]) == (5, 5 * SIZE, 0)
    for node in (here, there):
        level, source = node.levels[-1], node.sources[-1]
        assert np.array_equal(taken(level, list(range(N))), PIXELS)
        assert sorted(source.taken) == [0, 1, 4, *range(8, N)]


def test_what_is_read_cannot_be_written_to() -> None:
    node = Node(1, N)
    assert not node.levels[0][3].flags.writeable


@given(st.integers(0, 5000), st.integers(1, 300), st.integers(1, 2000))
def test_as_many_are_held_as_fit(limit: int, samples: int, image_bytes: int) -> None:
    held = held_in(limit, samples, image_bytes)
    assert 0 <= held <= samples
    if held:
        assert bytes_for(held, image_bytes) <= limit
    if held < samples:  # one more would need more than the limit, but for what alignment takes
        assert bytes_for(held + 1, image_bytes) + 64 > limit
    assert bytes_for(1000, 3072) < 1.001 * 1000 * 3072
