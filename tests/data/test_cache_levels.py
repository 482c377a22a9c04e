"""Cache levels between loaders and files: memory that ranks of a node share, local copies, and which rank reads for which."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.shared_memory import SharedMemory
from hpctrain.core.text import size_text
from hpctrain.data import local_copy
from hpctrain.data.cache import FillingPlan, NodeRank, ReadCounts, SampleCache, bytes_for, held_in
from hpctrain.data.image_file import ImageFile
from hpctrain.data.local_copy import LocalCopy, LocalFile, open_local, table_bytes
from hpctrain.data.readers import UnreadableError
from hpctrain_testing.virtual.run import run_virtual
from tests.support.sampling import amount

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
            SampleCache(source, counts, memory, self.held, NodeRank(rank, self.ranks))
            for rank, (source, counts) in enumerate(zip(self.sources, self.counts, strict=True))
        ]


def taken(level: SampleCache, samples: list[int]) -> np.ndarray:
    out = np.full((len(samples), *SHAPE), 99, np.uint8)
    assert level.take(np.array(samples, np.int64), out) is out
    return out


def indices() -> Iterator[st.SearchStrategy]:
    yield st.integers(0, N - 1)
    yield st.slices(N)


@settings(max_examples=amount(25, 100), deadline=None)
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

    def read(level: SampleCache) -> None:
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
    broken = SampleCache(Source((7,), stops=True), ReadCounts(), memory, N)
    intact = SampleCache(Source(), ReadCounts(), memory, N)
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

    level = SampleCache(source, ReadCounts(), memory, N, patience_seconds=0.05, sleep=sleep)
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


class Copies:
    """Two ranks' copies over one file and one table."""

    def __init__(self, path: Path, first: int = 0, count: int = N) -> None:
        table = SharedMemory(np.zeros(table_bytes(count), np.uint8))
        self.path = path
        path.touch()
        self.ranks = [LocalCopy(os.open(path, os.O_RDWR), SIZE, table, first, count) for _ in range(2)]


def read(copy: LocalCopy, sample: int) -> bytes | None:
    out = bytearray(SIZE)
    return bytes(out) if copy.read(sample, memoryview(out)) else None


def pixels_of(sample: int) -> memoryview:
    return memoryview(PIXELS[sample].reshape(-1))


def test_each_rank_reads_what_any_has_written(tmp_path: Path) -> None:
    first, second = Copies(tmp_path / "copy", first=3, count=5).ranks
    for sample in (7, 3, 2, 8):
        first.write(sample, pixels_of(sample))
    assert [read(second, sample) for sample in (2, 3, 4, 7, 8)] == [None, PIXELS[3].tobytes(), None, PIXELS[7].tobytes(), None]


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
    ranks = [SampleCache(Source(), counts, copy=copy) for copy in copies.ranks]
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


def test_a_sample_that_others_stand_in_for_is_not_kept(tmp_path: Path) -> None:
    copies = Copies(tmp_path / "copy")
    broken, intact = (
        SampleCache(source, ReadCounts(), copy=copy) for source, copy in zip((Source((4,)), Source()), copies.ranks, strict=True)
    )
    samples, out = np.array([3, 4]), np.empty((2, *SHAPE), np.uint8)
    for _ in range(2):
        assert np.array_equal(broken.take(samples, out), PIXELS[[3, 5]])
        assert np.array_equal(intact.take(samples, out), PIXELS[[3, 4]])
    assert broken.replaced == {4: 5}


Make = Callable[..., tuple[ImageFile, np.ndarray, np.ndarray]]
ALONE = SingleCommunicator()


def fill(local: LocalFile, images: np.ndarray) -> None:
    assert local.copy is not None
    for sample, image in enumerate(images):
        local.copy.write(sample, image.reshape(-1).data)


def read_all(local: LocalFile, images: np.ndarray) -> list[bool]:
    """Whether each sample is there; what is there is right."""
    assert local.copy is not None
    there = []
    for sample, image in enumerate(images):
        out = bytearray(image.nbytes)
        there.append(local.copy.read(sample, memoryview(out)))
        assert not there[-1] or bytes(out) == image.tobytes()
    return there


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_of_a_node_share_one_file(make_file: Make, tmp_path: Path, ranks: int) -> None:
    file, images, _ = make_file()

    def program(comm: object) -> list[bool]:
        local = open_local(comm, file, str(tmp_path / "disk"))  # type: ignore[arg-type]
        assert local.copy is not None
        assert (local.denied, local.copy.count) == ("", len(images))
        if comm.rank == 0:  # type: ignore[attr-defined]
            fill(local, images)
        comm.allgather_object(None)  # type: ignore[attr-defined]
        return read_all(local, images)

    assert run_virtual(ranks, program) == [[True] * len(images)] * ranks
    assert list((tmp_path / "disk").iterdir()) == []


def test_each_job_has_a_copy_without_a_name(make_file: Make, tmp_path: Path) -> None:
    file, images, _ = make_file()
    first, second = (open_local(ALONE, file, str(tmp_path / "disk")) for _ in range(2))
    assert list((tmp_path / "disk").iterdir()) == []
    fill(first, images)
    assert read_all(second, images) == [False] * len(images)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("directory", "reason"),
    [
        (
            "$NOT_SET_HERE/x",
            "$NOT_SET_HERE/x cannot be used: the variable NOT_SET_HERE is not set here; set it, or write the path out",
        ),
        ("/proc/nothing", "/proc/nothing cannot be used: No such file or directory"),
        ("{}/train.h5", "cannot be used: File exists"),
    ],
)
def test_no_directory_is_no_error(make_file: Make, tmp_path: Path, ranks: int, directory: str, reason: str) -> None:
    file, _, _ = make_file(name="train.h5")
    found = run_virtual(ranks, lambda comm: open_local(comm, file, directory.format(tmp_path)))
    for local in found:
        assert local.copy is None
        assert reason in local.denied


def test_a_small_disk_gets_a_part_and_a_full_one_nothing(
    make_file: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, images, _ = make_file()
    status = namedtuple("status", ["f_bavail", "f_frsize"])
    size = images[0].nbytes
    monkeypatch.setattr(local_copy.os, "fstatvfs", lambda descriptor: status(10 * size, 1))
    local = open_local(ALONE, file, str(tmp_path))
    assert local.copy is not None
    assert (local.copy.count, local.denied) == (9, f"{tmp_path} has room for {size_text(9 * size)}")
    asked = open_local(ALONE, file, str(tmp_path), 4 * size + 1)
    assert asked.copy is not None
    assert (asked.copy.count, asked.denied) == (4, "")
    monkeypatch.setattr(local_copy.os, "fstatvfs", lambda descriptor: status(0, 4096))
    assert open_local(ALONE, file, str(tmp_path)) == LocalFile(denied=f"{tmp_path} has room for 0 bytes")


def test_the_environment_of_the_node_names_the_directory(
    make_file: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR_OF_JOB", str(tmp_path / "of job"))
    file, _, _ = make_file()
    assert open_local(ALONE, file, "$TMPDIR_OF_JOB/cache").copy is not None
    assert list((tmp_path / "of job").iterdir()) == [tmp_path / "of job" / "cache"]


PLACES = [(0,), (0, 0, 0), (0, 1), (0, 0, 1, 1), (0, 1, 0, 1, 2), (0, 0, 0, 1), (2, 1, 0, 0)]


@pytest.mark.parametrize("memory_of", PLACES)
@pytest.mark.parametrize(("samples", "at_once"), [(0, 3), (1, 3), (7, 1), (40, 3), (36, 6), (5, 100)])
def test_every_memory_gets_each_sample_once(memory_of: tuple[int, ...], samples: int, at_once: int) -> None:
    plan = FillingPlan(samples, at_once, memory_of)
    read: list[int] = []
    got = {memory: Counter[int]() for memory in memory_of}
    for turn in range(plan.rounds):
        for rank, memory in enumerate(memory_of):
            mine = range(*plan.chunk(turn, rank))
            assert len(mine) <= at_once
            read += mine
            got[memory].update(mine)
            for receiver in plan.receivers(turn, rank):
                assert rank in plan.senders(turn, receiver)
                got[memory_of[receiver]].update(mine)
            for sender in plan.senders(turn, rank):
                assert rank in plan.receivers(turn, sender)
    assert sorted(read) == list(range(samples))
    assert all(counts == Counter(range(samples)) for counts in got.values())


def test_the_ranks_of_a_node_receive_in_turn() -> None:
    plan = FillingPlan(1_000, 1, (0, 1, 1, 1))
    assert {plan.receivers(turn, 0) for turn in range(3)} == {(1,), (2,), (3,)}
    assert plan.rounds == 250
