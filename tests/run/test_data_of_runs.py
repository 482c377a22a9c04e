"""The data of a run: levels of memory and local copies, loaders, and samples that cannot be read."""

import hashlib
import itertools
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpctrain.assembly.images import evaluation_images, open_images, training_images
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import KernelSet, PixelInput
from hpctrain.backend.pixels import PixelBatch
from hpctrain.comm import shared_memory
from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.groups import node_numbers
from hpctrain.comm.shared_memory import SharedMemory
from hpctrain.config.load import parse
from hpctrain.config.schema import CacheConfig
from hpctrain.core.errors import DataError, HpctrainError
from hpctrain.data import pipeline as batch_threads
from hpctrain.data.cache import ReadCounts, SampleCache, bytes_for, summed
from hpctrain.data.image_file import DataFacts, ImageFile, synthetic_file
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.readers import UnreadableError
from hpctrain.data.sampler import Mixing, Sampler
from hpctrain.data.writer import write_data_file
from hpctrain.job.session import Session
from hpctrain.launch.process_end import STOPPED
from hpctrain.launch.threads import ThreadPlan
from hpctrain.run import data_cache
from hpctrain.run.data_cache import add_caches, fill
from hpctrain.run.images import make_loader
from hpctrain_testing.faults import Fault, prepare, run_fault
from hpctrain_testing.run import Outcome, clean_environment, run_job
from hpctrain_testing.virtual.run import run_virtual
from tests.support import local_copies
from tests.support.local_copies import ASKED_WHILE_FILLING, IMAGES, TEST_IMAGES, Trainings
from tests.support.runs import virtual_engine, work_virtual
from tests.support.signal_storm import final_tensors, same_bits
from tests.support.tiny_runs import whole_lines

N, SHAPE = 203, (9, 11, 3)
SIZE = 9 * 11 * 3
BATCHES = 50
_CONFIG = """
{name: cached, model: {name: small, channels: [2], hidden: 3}, data: {train: train.h5}, batch: 8, epochs: 1,
 optimizer: {name: sgd, lr: 0.01}, schedule: constant}
"""
#: limits of memory: none, two fifths of the samples, more than all
LIMITS = {"off": 0, "some": 85 * SIZE, "all": 1 << 20}
#: sections `data.cache` with a local copy, and the samples that are read from the file in the first epoch and in each later one
LOCAL: dict[str, tuple[dict[str, Any], int]] = {
    "local": ({"memory": 0}, 0),
    "local in part": ({"memory": 0, "local_limit": 100 * SIZE}, N - 100),
    "both": ({"memory": 85 * SIZE}, 0),
    "both in part": ({"memory": 85 * SIZE, "local_limit": 50 * SIZE}, N - 84 - 50),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached")
    generator = np.random.default_rng(3)
    images, labels = generator.integers(0, 256, (N, *SHAPE), np.uint8), generator.integers(0, 4, N)
    write_data_file(folder / "train.h5", N, SHAPE, [f"class {number}" for number in range(4)], [(images, labels)])
    (folder / "cached.yaml").write_text(_CONFIG)
    return folder


def loader_of(session: Session, path: Path, *, prefetch: int, mixing: Mixing | None = None) -> Loader:
    file = ImageFile.open(path)
    pipeline = Pipeline([("pad_crop", {"padding": 2}), ("flip", {})], 5, file.mean, file.std)
    place = {"rank": session.groups.position, "ranks": session.groups.all_ranks.size}
    return Loader(file, Sampler(N, 8, 5), pipeline, **place, prefetch=prefetch, mixing=mixing)


def stream(
    folder: Path, ranks: int, cache: Mapping[str, Any], *, per_node: int | None = None, **options: Any
) -> tuple[str, dict]:
    """SHA-256 of the first batches over all ranks, over two epochs, and what the ranks have read."""

    def work(session: Session) -> tuple[list[list[bytes]], dict[str, int]]:
        loader = loader_of(session, folder / "train.h5", **options)
        levels = add_caches(session, CacheConfig.model_validate(cache), [loader])
        batches: list[list[bytes]] = []
        for epoch in range(2):
            for batch in loader.epoch(epoch):
                session.world.allgather_object(None)  # virtual ranks take turns, and go on together as in a training
                if len(batches) < BATCHES:
                    batches.append([batch.x.tobytes(), batch.y.tobytes()])
        session.world.allgather_object(None)
        return batches, levels.counts.values()

    results = work_virtual(ranks, folder / "cached.yaml", (), work, per_node)
    digest = hashlib.sha256()
    for step in range(BATCHES):
        for part in range(2):
            for batches, _ in results:
                digest.update(batches[step][part])
    return digest.hexdigest(), summed(counts for _, counts in results)


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    """Of one rank that reads the file itself."""
    return stream(folder, 1, {"memory": 0}, prefetch=0)[0]


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.sample(3)
@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (2, None), (4, 2), (3, 2), (4, 1)])
def test_the_batches_are_the_same_bits(
    folder: Path, expected: str, ranks: int, per_node: int | None, limit: str, prefetch: int
) -> None:
    cache = {"memory": LIMITS[limit], "fill": "first_epoch"}
    digest, read = stream(folder, ranks, cache, per_node=per_node, prefetch=prefetch)
    assert digest == expected
    nodes = -(-ranks // (per_node or ranks))
    held = {"off": 0, "some": 84, "all": N}[limit]
    # On each node a sample is read from the file where a rank of it needs it first; the others are read in both epochs.
    assert read["file_samples"] + read["memory_samples"] == 2 * N
    assert held + 2 * (N - held) <= read["file_samples"] <= nodes * held + 2 * (N - held)
    if nodes == 1:
        assert read["file_samples"] == held + 2 * (N - held)
    assert read["file_bytes"] == read["file_samples"] * SIZE


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("limit", ["some", "all"])
@pytest.mark.sample(3)
@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (2, None), (4, 2), (3, 2), (4, 1), (5, 3)])
def test_memory_that_is_filled_at_the_start_has_each_sample_read_once_by_the_job(
    folder: Path, expected: str, ranks: int, per_node: int | None, limit: str, prefetch: int
) -> None:
    cache = {"memory": LIMITS[limit]} | ({"fill": "start"} if per_node is None else {})  # what auto is on several nodes
    digest, read = stream(folder, ranks, cache, per_node=per_node, prefetch=prefetch)
    assert digest == expected
    held, nodes = {"some": 84, "all": N}[limit], -(-ranks // (per_node or ranks))
    assert (read["file_samples"], read["file_bytes"]) == (held + 2 * (N - held), read["file_samples"] * SIZE)
    assert (read["nodes_samples"], read["memory_samples"]) == ((nodes - 1) * held, 2 * held)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("levels", LOCAL)
@pytest.mark.sample(3)
@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (2, None), (4, 2)])
def test_a_local_copy_has_the_same_bits(
    folder: Path, tmp_path: Path, expected: str, ranks: int, per_node: int | None, levels: str, prefetch: int
) -> None:
    section, again = LOCAL[levels]
    cache = {**section, "local": str(tmp_path), "fill": "first_epoch"}
    digest, read = stream(folder, ranks, cache, per_node=per_node, prefetch=prefetch)
    assert (digest, read["file_samples"] + read["memory_samples"] + read["local_samples"]) == (expected, 2 * N)
    if per_node is None:
        assert read["file_samples"] == N + again
    assert list(tmp_path.iterdir()) == []


def test_mixed_images_read_each_sample_once_more_or_less(folder: Path) -> None:
    """A sample is another one's partner in the same step; ranks may then read it at once, and both get it right."""
    mixing = Mixing(1.0, 1.0, seed=3)
    plain = stream(folder, 2, {"memory": 0}, prefetch=0, mixing=mixing)[0]
    for prefetch in (0, 2):
        digest, read = stream(folder, 2, {}, prefetch=prefetch, mixing=mixing)
        assert digest == plain
        assert N <= read["file_samples"] < 1.1 * N


def notes(folder: Path, ranks: int, cache: Mapping[str, Any], loaders: int = 1) -> tuple[str, ...]:
    def work(session: Session) -> tuple[str, ...]:
        made = [loader_of(session, folder / "train.h5", prefetch=0) for _ in range(loaders)]
        return add_caches(session, CacheConfig.model_validate(cache), made).notes

    first, *others = work_virtual(ranks, folder / "cached.yaml", (), work)
    assert all(other == first for other in others)
    return tuple(note.replace(str(folder), "").replace("/train.h5", "train.h5") for note in first)


def test_the_share_that_is_kept_is_reported(folder: Path) -> None:
    assert notes(folder, 2, {}) == ("data train.h5: all samples stay in memory of each node (60.5 kB)",)
    assert notes(folder, 2, {"memory": 0}) == ()
    (some,) = notes(folder, 2, {"memory": 85 * SIZE})
    assert (
        some
        == "data train.h5: 41 % of the samples stay in memory of each node (25.1 kB), the others are read again in each epoch"
    )
    both = notes(folder, 2, {"memory": 300 * SIZE}, loaders=2)  # the second file has what the first leaves
    assert [note.split(" stay")[0] for note in both] == ["data train.h5: all samples", "data train.h5: 46 % of the samples"]


def test_other_channels_are_refused_with_both_files_named() -> None:
    config = parse(
        "{model: small, data: {train: synthetic}, batch: 4, epochs: 1, optimizer: {name: sgd, lr: 0.1}, schedule: constant}"
    )[0]
    grey, colour = (DataFacts.of(synthetic_file("train", 8, (8, 8, channels), 2)) for channels in (1, 3))
    with pytest.raises(DataError, match=r"synthetic has images of 3 channels, those of train\.h5 have 1; .* --channels 1\."):
        evaluation_images(config, {"test": synthetic_file("test", 8, (8, 8, 3), 2)}, "test", grey, "train.h5")
    with pytest.raises(DataError, match=r"synthetic has images of 1 channel, those of the checkpoint have 3;"):
        training_images(config, synthetic_file("train", 8, (8, 8, 1), 2), colour)


def test_a_disk_without_room_is_reported(folder: Path, tmp_path: Path) -> None:
    cache = {"memory": 85 * SIZE, "local": f"{tmp_path}/file/below"}
    (tmp_path / "file").write_bytes(b"")
    memory, local = notes(folder, 2, cache)
    assert memory.endswith("kB), the others are read again in each epoch")
    assert local == f"data train.h5: there is no local copy, as {tmp_path}/file/below cannot be used: Not a directory"


def test_more_than_a_node_has_is_cut_and_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_cache, "available_bytes", lambda: 100 * SIZE)
    note, kept = notes(folder, 2, {"memory": "1TB"})
    assert note == "data.cache.memory is 1 TB, but a node has 29.7 kB free, of which at most 90 % may be used"
    assert kept.startswith("data train.h5: 43 % of the samples")
    assert notes(folder, 2, {})[0].startswith("data train.h5: 24 % of the samples")


def test_ranks_that_cannot_share_memory_keep_their_own_parts(folder: Path, expected: str, monkeypatch) -> None:
    def denied(*arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(shared_memory, "_mapped", denied)
    digest, read = stream(folder, 2, {"memory": 2 * 85 * SIZE}, prefetch=0)
    assert digest == expected
    assert read["memory_samples"] > 0
    (note,) = notes(folder, 2, {"memory": 2 * 85 * SIZE})
    assert note.startswith(
        "data train.h5: 41 % of the samples stay in memory of each rank, as the ranks of a node cannot share it ("
    )
    assert ") (25" in note, "the memory of a rank, not that of the node"


_JOB = """
import json, sys
import hpctrain
def read_bytes():
    "Of this process, by system calls."
    return int(next(line.split()[1] for line in open("/proc/self/io") if line.startswith("rchar")))
with hpctrain.start(batch=8) as job:
    model = hpctrain.Sequential({"flatten": hpctrain.Flatten(), "fc": hpctrain.Linear(9 * 11 * 3, 4)})
    replica = job.replica(model, (9, 11, 3))
    loader = job.loader(replica, "train.h5", cache=json.loads(sys.argv[1]))
    epochs = []
    for epoch in range(3):
        job.world.allgather_object(None)
        before = read_bytes()
        look = read_bytes() - before
        for batch in loader.epoch(epoch):
            pass
        epochs.append(read_bytes() - before - 2 * look)
    for lines in zip(*job.world.allgather_object(epochs)):
        job.print("epoch", sum(lines))
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [0, 2, 3])
def test_processes_read_the_file_once_by_the_count_of_the_system(job: Callable[..., Outcome], folder: Path, ranks: int) -> None:
    """From the second epoch on there is no file input at all where memory holds all samples."""
    for cache, times in (({}, (1, 0, 0)), ({"memory": 0}, (0, 0, 0)), ({"memory": 102 * (SIZE + 1) + 64}, (203, 101, 101))):
        outcome = job(ranks, ["-c", textwrap.dedent(_JOB), json.dumps(cache)], cwd=folder)
        assert outcome.code == 0, outcome.output
        read = [int(line.split()[1]) for line in outcome.stdout.splitlines() if line.startswith("epoch ")]
        expected = [times[0] * N * SIZE, 0, 0] if times[0] < 2 else [count * SIZE for count in times]
        assert read == expected  # without memory, samples come out of the map


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_run_says_and_records_what_it_read(job: Callable[..., Outcome], folder: Path, tmp_path: Path, ranks: int) -> None:
    words = ["train", str(folder / "cached.yaml"), f"data.train={folder}/train.h5", f"data.test={folder}/train.h5", "epochs=3"]
    outcome = job(ranks, ["-m", "hpctrain", *words, "backend=numpy", "data.augment=[flip]"], cwd=tmp_path)
    assert outcome.code == 0, outcome.output
    assert whole_lines(outcome.stdout).count("train.h5: all samples stay in memory of each node") == 1
    file, memory = 2 * N, 4 * N  # of training, and of evaluation, which reads the same file for itself
    assert f"samples read: {file} from the data files (121 kB), {memory} from memory of the nodes" in whole_lines(outcome.stdout)
    [metrics] = tmp_path.glob("runs/*/metrics.jsonl")
    records = [record for line in metrics.read_text().splitlines() if (record := json.loads(line))["kind"] == "reads"]
    assert [(record["epoch"], record["file_samples"], record["memory_samples"]) for record in records] == [
        (1, N, 0),
        (2, 2 * N, N),
        (3, 2 * N, 3 * N),
    ]
    assert records[-1]["file_bytes"] == 2 * N * SIZE


SMALL_SHAPE = (3, 4, 3)
SMALL_IMAGE_BYTES = 3 * 4 * 3
SMALL_COUNT = 41
SMALL_IMAGES = np.random.default_rng(6).integers(0, 256, (SMALL_COUNT, *SMALL_SHAPE), np.uint8)


class _Source:
    """Images of which a rank cannot read some: that is an error, or others stand in for them."""

    def __init__(self, bad: tuple[int, ...], *, stops: bool) -> None:
        self.shape, self.replaced = SMALL_IMAGES.shape, dict[int, int]()
        self.read: list[int] = []
        self._bad, self._stops = bad, stops

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        for sample, target in zip(samples.tolist(), out, strict=True):
            self.read.append(sample)
            if sample in self._bad:
                if self._stops:
                    raise UnreadableError(f"Sample {sample} cannot be read.")
                self.replaced[sample] = sample - 1
            target[...] = SMALL_IMAGES[self.replaced.get(sample, sample)]
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

    def rank(self, comm: Any) -> tuple[Any, _Source, SampleCache, int]:
        """One rank, its source, its memory, and the number of its node. Collective."""
        node = comm.split_shared_memory("node")
        node_of = node_numbers(comm, node)
        number = node_of[comm.rank]
        array = self.arrays.setdefault(number, np.zeros(bytes_for(self._held(number), SMALL_IMAGE_BYTES), np.uint8))
        counts, source = ReadCounts(), _Source(self._bad, stops=self._stops)
        memory = SampleCache(source, counts, SharedMemory(array), self._held(number))
        rank = SimpleNamespace(world=comm, grid=SimpleNamespace(node_of=node_of), progress=virtual_engine(comm))
        return rank, source, memory, number


def _filled(ranks: int, per_node: int, job: _Job) -> list[tuple[int, list[int], np.ndarray]]:
    """Of each rank: the samples that all hold, what it has read from its source while filling, and which are in its memory."""

    def one(comm: Any) -> tuple[int, list[int], np.ndarray]:
        rank, source, memory, number = job.rank(comm)
        samples, read = fill(rank, memory, shared=True), list(source.read)
        there = job.arrays[number][:samples] == 2
        found = memory.take(np.arange(samples), np.empty((samples, *SMALL_SHAPE), np.uint8))
        assert np.array_equal(found, SMALL_IMAGES[[source.replaced.get(sample, sample) for sample in range(samples)]])
        return samples, read, there

    return run_virtual(ranks, one, ranks_per_node=per_node)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_cache, "_CHUNK_BYTES", 3 * SMALL_IMAGE_BYTES)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 2), (2, 1), (4, 2), (5, 2), (6, 2)])
def test_every_node_holds_what_the_job_has_read_once(ranks: int, per_node: int) -> None:
    results = _filled(ranks, per_node, _Job(lambda node: SMALL_COUNT))
    assert sorted(sample for _, read, _ in results for sample in read) == list(range(SMALL_COUNT))
    assert all(samples == SMALL_COUNT and there.all() for samples, _, there in results)


@pytest.mark.usefixtures("small_chunks")
def test_nodes_with_less_memory_decide_how_many_samples_are_sent() -> None:
    results = _filled(4, 2, _Job(lambda node: (SMALL_COUNT, 17)[node]))
    assert {samples for samples, _, _ in results} == {17}
    assert sorted(sample for _, read, _ in results for sample in read) == list(range(17))


@pytest.mark.usefixtures("small_chunks")
def test_samples_that_others_stand_in_for_are_kept_nowhere() -> None:
    results = _filled(4, 2, _Job(lambda node: SMALL_COUNT, bad=(5, 20)))
    assert all(np.flatnonzero(~there).tolist() == [5, 20] for _, _, there in results)


@pytest.mark.usefixtures("small_chunks")
def test_an_error_of_one_rank_is_raised_on_all() -> None:
    job = _Job(lambda node: SMALL_COUNT, bad=(20,), stops=True)

    def one(comm: Any) -> str:
        rank, _, memory, _ = job.rank(comm)
        with pytest.raises(HpctrainError) as raised:
            fill(rank, memory, shared=True)
        return str(raised.value)

    assert all("Sample 20 cannot be read." in sentence for sentence in run_virtual(4, one, ranks_per_node=2))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 2), (4, 2), (5, 2)])
@pytest.mark.parametrize("asks", [0, 2])
def test_filling_ends_on_all_ranks_where_one_is_asked_to_stop(ranks: int, per_node: int, asks: int) -> None:
    job = _Job(lambda node: SMALL_COUNT)

    def one(comm: Any) -> tuple[int, int]:
        rank, source, memory, _ = job.rank(comm)
        looks = itertools.count()
        samples = fill(rank, memory, shared=True, stop_requested=lambda: next(looks) >= asks and comm.rank == comm.size - 1)
        read = len(source.read)
        comm.allgather_object(None)
        assert np.array_equal(
            memory.take(np.arange(SMALL_COUNT), np.empty((SMALL_COUNT, *SMALL_SHAPE), np.uint8)), SMALL_IMAGES
        )  # the others are read now
        return samples, read

    results = run_virtual(ranks, one, ranks_per_node=per_node)
    expected = min(SMALL_COUNT, asks * 3 * ranks)
    assert ([samples for samples, _ in results], sum(read for _, read in results)) == ([expected] * ranks, expected)


@pytest.mark.usefixtures("small_chunks")
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


Job = Callable[..., Outcome]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """By ranks, the last tensors of a training without any level."""
    trainings = Trainings(run_job, tmp_path_factory.mktemp("undisturbed")).prepare()
    for ranks in (0, 2):
        outcome = trainings.run(f"ranks-{ranks}", ranks=ranks, local=False)
        assert outcome.code == 0, outcome.output
    return {ranks: final_tensors(trainings.folder, f"ranks-{ranks}") for ranks in (0, 2)}


@pytest.fixture
def trainings(job: Job, tmp_path: Path) -> Trainings:
    return Trainings(job, tmp_path).prepare()


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", ["KILLED_COPYING", "KILLED_IN_AN_EPOCH"])
def test_a_killed_rank_leaves_nothing_that_a_later_run_takes_for_whole(
    trainings: Trainings, undisturbed: dict[int, Any], fault: str
) -> None:
    outcome = trainings.run_faulty(getattr(local_copies, fault), "runs")
    assert outcome.code not in (0, 85), outcome.output
    assert "was ended by SIGKILL" in outcome.stderr
    assert list(trainings.copies.iterdir()) == []
    outcome = trainings.run("runs", "--resume", "auto")
    assert outcome.code == 0, outcome.output
    assert "resumed at" in outcome.output
    assert trainings.shared_memory() == []  # MPI's own segments are removed by the next job
    assert "local copy of samples" not in outcome.output  # nothing of the old copy was trusted and found wrong
    assert same_bits(final_tensors(trainings.folder, "runs"), undisturbed[2])
    assert trainings.reads("runs")["file_samples"] > 0
    assert list(trainings.copies.iterdir()) == []


@pytest.mark.job
@pytest.mark.slow
def test_a_copy_without_room_grows_no_further(trainings: Trainings, undisturbed: dict[int, Any]) -> None:
    outcome = trainings.run_faulty(local_copies.NO_SPACE, "runs")
    assert outcome.code == 0, outcome.output
    lines = [line for line in outcome.output.splitlines() if "cannot grow" in line]
    assert len(lines) == 2  # of rank 1, for each data file once
    assert all("(No space left on device); other samples are read from the data file" in line for line in lines)
    assert same_bits(final_tensors(trainings.folder, "runs"), undisturbed[2])
    # Rank 1 has kept 40 of the 80 samples of its first epoch, and no more of any later one.
    assert trainings.reads("runs")["file_samples"] > IMAGES + TEST_IMAGES


def in_a_namespace(trainings: Trainings, size: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command that sees a disk of some size in the place of the directory of local copies; skips where none may be had."""
    mount = f"mount -t tmpfs -o size={size} none {trainings.copies}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *command],
        cwd=trainings.folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("fault", "size"), [("FILLED_DISK", "1m"), ("pass", "64k")])
def test_a_small_disk_takes_what_fits(trainings: Trainings, undisturbed: dict[int, Any], fault: str, size: str) -> None:
    program = trainings.program(getattr(local_copies, fault, fault), rank=0)
    done = in_a_namespace(trainings, size, [sys.executable, str(program), *trainings.words("runs")])
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    if fault == "pass":
        assert f"{trainings.copies} has room for 59 kB" in " ".join(said.split())
    else:
        assert (
            said.count("cannot grow (No space left on device); other samples are read from the data file") == 2
        )  # of both files
    assert same_bits(final_tensors(trainings.folder, "runs"), undisturbed[0])
    read = trainings.reads("runs")
    assert read["local_samples"] > 0
    assert read["file_samples"] > IMAGES + TEST_IMAGES


CONFIG = """
{{model: small, batch: 16, epochs: 1, optimizer: {{name: sgd, lr: 0.05}}, schedule: constant,
 data: {{train: synthetic, synthetic: {{height: 80, width: 96, samples: 37}}, threads: {threads},
        augment: [{{name: random_resized_crop, size: 88}}, flip, randaugment, random_erasing]}}}}
"""


def _session(threads: object, cores: int) -> Any:
    return SimpleNamespace(
        config=parse(CONFIG.format(threads=threads))[0],
        world=SingleCommunicator(),
        groups=SimpleNamespace(position=0, split_size=1, all_ranks=SimpleNamespace(size=1)),
        threads=ThreadPlan(cores, cores, "here"),
        progress=SimpleNamespace(notes=SimpleNamespace(alive=lambda: None)),
    )


def _epoch(threads: object, cores: int, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, set[int]]:
    """All images of an epoch, and the numbers of threads that batches were shared out over."""
    session = _session(threads, cores)
    counts = set()
    run = batch_threads.BatchThreads.run

    def counted(self: batch_threads.BatchThreads, *arguments: Any) -> None:
        counts.add(self.count)
        run(self, *arguments)

    monkeypatch.setattr(batch_threads.BatchThreads, "run", counted)
    images, _ = training_images(session.config, open_images(session.config, "train"), None)
    loader = make_loader(session, images, None, batch=session.config.batch, shuffle=True)
    return np.concatenate([np.array(batch.x) for batch in loader.epoch(1)]), counts


def test_batches_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, counts = _epoch(1, 4, monkeypatch)
    assert alone.shape == (37, 88, 88, 3)
    assert counts == {1}
    for threads, cores, expected in ((3, 1, 3), ("auto", 1, 1), ("auto", 8, 2), ("auto", 64, 8)):
        shared, counts = _epoch(threads, cores, monkeypatch)
        assert counts == {expected}
        assert np.array_equal(shared, alone)


class _PixelKernels(PixelInput, NumpyKernelSet):
    """Kernels of the host that ask for pixels."""

    def make_input(self, target: Any, images: PixelBatch) -> None:
        target[...] = images


def test_kernels_that_take_pixels_get_them() -> None:
    session = _session(1, 1)
    images, _ = training_images(session.config, open_images(session.config, "train"), None)

    def epoch(kernels: KernelSet) -> Iterator[np.ndarray | PixelBatch]:
        loader = make_loader(session, images, None, batch=16, shuffle=True, kernels=kernels)
        return (batch.x for batch in loader.epoch(0))

    plain = [np.array(x) for x in epoch(NumpyKernelSet())]  # a pipeline makes the batches of one loader at a time
    for expected, ours in zip(plain, epoch(_PixelKernels()), strict=True):
        assert isinstance(ours, PixelBatch)
        np.testing.assert_array_equal(np.asarray(ours), expected)
    assert all(isinstance(x, np.ndarray) for x in epoch(NumpyKernelSet()))


#: samples 5 and 6 of the data file, of 72 bytes each, cannot be read
_DISK = """
import errno
from hpctrain.data import readers
preadv = os.preadv
opened = {}
initialise = readers.MappedReader.__init__
def remember(self, path, images, offset):
    initialise(self, path, images, offset)
    opened["offset"] = offset
readers.MappedReader.__init__ = remember
readers._copy = lambda *arguments: -1
def broken(descriptor, buffers, at):
    if (at - opened.get("offset", at)) // 72 in (5, 6):
        raise OSError(errno.EIO, "Input/output error")
    return preadv(descriptor, buffers, at)
os.preadv = broken
"""


def records(folder: Path, kind: str) -> list[dict]:
    [metrics] = folder.glob("runs/*/metrics.jsonl")
    return [record for line in metrics.read_text().splitlines() if (record := json.loads(line))["kind"] == kind]


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("cache", ["true", "false"])
def test_the_job_ends_with_one_sentence(tmp_path: Path, cache: str) -> None:
    prepare(tmp_path)
    outcome = run_fault(
        Fault("a disk that fails", _DISK, (), overrides=(f"data.cache={cache}", "deadline_seconds=100")), tmp_path
    )
    assert outcome.code == 2, outcome.output
    said = [line for line in outcome.stderr.splitlines() if line.startswith("hpctrain: ")]
    assert len(said) == 1, outcome.stderr
    assert "of the data file train.h5 cannot be read: Input/output error, in 4 attempts (on rank 1 of 3, " in said[0]
    assert "Traceback" not in outcome.stderr


@pytest.mark.job
@pytest.mark.slow
def test_samples_that_replace_unreadable_ones_are_reported(tmp_path: Path) -> None:
    prepare(tmp_path)
    overrides = ("data.on_unreadable=skip", "data.max_unreadable=0.08", "deadline_seconds=100")
    outcome = run_fault(Fault("skip", _DISK, (), ranks=(0, 1, 2), overrides=overrides), tmp_path)
    assert outcome.code == 0, outcome.output
    replaced = records(tmp_path, "unreadable")  # training and test data are the same file, which two loaders read
    assert [(record["file"], record["samples"], record["instead"]) for record in replaced] == [("train.h5", [5, 6], [7, 7])] * 2
    assert outcome.output.count("2 of 24 samples of train.h5 could not be read; other samples replaced them") == 2
    warning = r"warning: sample 5 and 1 more of train.h5 cannot be read on ranks? [012, and-]+; other samples replace them"
    assert len(re.findall(warning, whole_lines(outcome.stdout))) == 2  # on the ranks to which they have come
    own = [line for line in outcome.stderr.splitlines() if "cannot be read" in line]
    assert all("(on rank 0 of 3" in line for line in own)  # other ranks' own words are in their log files
    assert [record["images"] for record in records(tmp_path, "epoch")] == [24, 24]


@pytest.mark.job
@pytest.mark.slow
def test_ranks_that_share_samples_do_not_skip_any(tmp_path: Path) -> None:
    prepare(tmp_path)
    overrides = ("data.on_unreadable=skip", "grid.rows=3", "plan={default: model}", "deadline_seconds=100")
    outcome = run_fault(Fault("rows", "", (), overrides=overrides), tmp_path)
    assert outcome.code == 2, outcome.output
    assert "data.on_unreadable is skip, but grid.rows is 3, and ranks that share samples" in outcome.stderr
