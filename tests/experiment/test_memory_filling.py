"""Memory of nodes filled at the start: what goes wrong on one rank is told on all, and what cannot be read is left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpctrain.comm.shared_memory import SharedMemory
from hpctrain.comm.two_level import node_numbers
from hpctrain.data.read_counts import CountedImages, ReadCounts
from hpctrain.data.sample_memory import SampleMemory, bytes_for
from hpctrain.data.unreadable import UnreadableError
from hpctrain.errors import HpctrainError
from hpctrain.experiment import memory_filling
from hpctrain.experiment.memory_filling import fill
from hpctrain.launch.exit_codes import STOPPED
from hpctrain.virtual.run import run_virtual
from tests.support.jobs import Outcome
from tests.support.local_copies import ASKED_WHILE_FILLING, IMAGES, Trainings
from tests.support.signal_storm import final_tensors, same_bits
from tests.support.virtual_runs import virtual_engine

SHAPE = (3, 4, 3)
SIZE = 3 * 4 * 3
N = 41
PIXELS = np.random.default_rng(6).integers(0, 256, (N, *SHAPE), np.uint8)


class _Source:
    """Images of which a rank cannot read some: that is an error, or others stand in for them."""

    def __init__(self, bad: tuple[int, ...], *, stops: bool) -> None:
        self.shape, self.replaced = PIXELS.shape, dict[int, int]()
        self.read: list[int] = []
        self._bad, self._stops = bad, stops

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        for sample, target in zip(samples.tolist(), out, strict=True):
            self.read.append(sample)
            if sample in self._bad:
                if self._stops:
                    raise UnreadableError(f"Sample {sample} cannot be read.")
                self.replaced[sample] = sample - 1
            target[...] = PIXELS[self.replaced.get(sample, sample)]
        return out

    def __getitem__(self, index: int | slice | tuple[int | slice, slice, slice]) -> np.ndarray:
        raise AssertionError("whole images are read")


class _Job:
    """Virtual ranks with memory for some samples on each node.

    Attributes:
        arrays: the memory of each node.
    """

    def __init__(self, held: Callable[[int], int], bad: tuple[int, ...] = (), *, stops: bool = False) -> None:
        self.arrays: dict[int, np.ndarray] = {}
        self._held, self._bad, self._stops = held, bad, stops

    def rank(self, comm: Any) -> tuple[Any, _Source, SampleMemory, int]:
        """One rank, its source, its memory, and the number of its node. Collective."""
        node = comm.split_shared_memory("node")
        node_of = node_numbers(comm, node)
        number = node_of[comm.rank]
        array = self.arrays.setdefault(number, np.zeros(bytes_for(self._held(number), SIZE), np.uint8))
        counts, source = ReadCounts(), _Source(self._bad, stops=self._stops)
        memory = SampleMemory(CountedImages(source, counts), SharedMemory(array), self._held(number), counts)
        rank = SimpleNamespace(world=comm, grid=SimpleNamespace(node_of=node_of), progress=virtual_engine(comm))
        return rank, source, memory, number


def _filled(ranks: int, per_node: int, job: _Job) -> list[tuple[int, list[int], np.ndarray]]:
    """Of each rank: the samples that all hold, what it has read from its source while filling, and which are in its memory."""

    def one(comm: Any) -> tuple[int, list[int], np.ndarray]:
        rank, source, memory, number = job.rank(comm)
        samples, read = fill(rank, memory, shared=True), list(source.read)
        there = job.arrays[number][:samples] == 2
        found = memory.take(np.arange(samples), np.empty((samples, *SHAPE), np.uint8))
        assert np.array_equal(found, PIXELS[[source.replaced.get(sample, sample) for sample in range(samples)]])
        return samples, read, there

    return run_virtual(ranks, one, ranks_per_node=per_node)


pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_filling, "_CHUNK_BYTES", 3 * SIZE)


@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 2), (2, 1), (4, 2), (5, 2), (6, 2)])
def test_every_node_holds_what_the_job_has_read_once(ranks: int, per_node: int) -> None:
    results = _filled(ranks, per_node, _Job(lambda node: N))
    assert sorted(sample for _, read, _ in results for sample in read) == list(range(N))
    assert all(samples == N and there.all() for samples, _, there in results)


def test_nodes_with_less_memory_decide_how_many_samples_are_sent() -> None:
    results = _filled(4, 2, _Job(lambda node: (N, 17)[node]))
    assert {samples for samples, _, _ in results} == {17}
    assert sorted(sample for _, read, _ in results for sample in read) == list(range(17))


def test_samples_that_others_stand_in_for_are_kept_nowhere() -> None:
    results = _filled(4, 2, _Job(lambda node: N, bad=(5, 20)))
    assert all(np.flatnonzero(~there).tolist() == [5, 20] for _, _, there in results)


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    job = _Job(lambda node: N, bad=(20,), stops=True)

    def one(comm: Any) -> str:
        rank, _, memory, _ = job.rank(comm)
        with pytest.raises(HpctrainError) as raised:
            fill(rank, memory, shared=True)
        return str(raised.value)

    assert all("Sample 20 cannot be read." in sentence for sentence in run_virtual(4, one, ranks_per_node=2))


@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 2), (4, 2), (5, 2)])
@pytest.mark.parametrize("asks", [0, 2])
def test_filling_ends_on_all_ranks_where_one_is_asked_to_stop(ranks: int, per_node: int, asks: int) -> None:
    job = _Job(lambda node: N)

    def one(comm: Any) -> tuple[int, int]:
        rank, source, memory, _ = job.rank(comm)
        looks = itertools.count()
        samples = fill(rank, memory, shared=True, stop_requested=lambda: next(looks) >= asks and comm.rank == comm.size - 1)
        read = len(source.read)
        comm.allgather_object(None)
        assert np.array_equal(memory.take(np.arange(N), np.empty((N, *SHAPE), np.uint8)), PIXELS)  # the others are read now
        return samples, read

    results = run_virtual(ranks, one, ranks_per_node=per_node)
    expected = min(N, asks * 3 * ranks)
    assert [samples for samples, _ in results] == [expected] * ranks
    assert sum(read for _, read in results) == expected


@pytest.mark.job
@pytest.mark.slow
def test_a_run_that_is_to_stop_fills_no_further(job: Callable[..., Outcome], tmp_path: Path) -> None:
    """A request during filling is one from before the first step: a checkpoint, exit code 85, and the same bits at the end."""
    trainings = Trainings(job, tmp_path).prepare()
    cache = ("data.cache.memory=1MB", "data.cache.fill=start")
    outcome = trainings.run("whole", *cache, local=False)
    assert outcome.code == 0, outcome.output
    assert f"memory was filled with {IMAGES} samples" in " ".join(outcome.stdout.split())
    outcome = trainings.run_faulty(ASKED_WHILE_FILLING, "runs", *cache, rank=None, local=False)
    assert outcome.code == STOPPED, outcome.output
    assert "memory was filled with 20 samples" in " ".join(outcome.stdout.split())
    assert outcome.stdout.count("memory was filled") == 1  # that of the test file was not begun
    assert "stopped by SIGTERM on rank 1 after step 1" in outcome.stdout  # a checkpoint after each step reads its sums at once
    outcome = trainings.run("runs", "--resume", "auto", *cache, local=False)
    assert outcome.code == 0, outcome.output
    assert same_bits(final_tensors(tmp_path, "runs"), final_tensors(tmp_path, "whole"))
