"""The levels of a job's data: the batches are those of the file, in whatever memory, and each sample is read once on a node."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.comm import shared_memory
from hpctrain.config.data_section import CacheConfig
from hpctrain.data import format as data_format
from hpctrain.data.format import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.mixing import Mixing
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.read_counts import summed
from hpctrain.data.sampler import Sampler
from hpctrain.errors import ConfigError
from hpctrain.experiment import data_cache
from hpctrain.experiment.data_cache import cache_of, give_levels
from hpctrain.experiment.session import Session
from tests.support.jobs import Outcome
from tests.support.virtual_runs import work_virtual

N, SHAPE = 203, (9, 11, 3)
SIZE = 9 * 11 * 3
BATCHES = 50
_CONFIG = """
name: cached
model: {name: small, channels: [2], hidden: 3}
data: {train: train.h5}
batch: 8
epochs: 1
optimizer: {name: sgd, lr: 0.01}
schedule: constant
"""
#: limits of memory: none, two fifths of the samples, more than all
LIMITS = {"off": 0, "some": 85 * SIZE, "all": 1 << 20}
#: sections `data.cache` with a local copy, and the samples that are read from the file in the first epoch and in each later one
LOCAL: dict[str, tuple[dict[str, Any], int]] = {
    "local": ({"memory": 0}, 0),
    "local in part": ({"memory": 0, "local_limit": 100 * SIZE}, N - 100),
    "both": ({"memory": 85 * SIZE}, 0),
    "both in part": ({"memory": 85 * SIZE, "local_limit": 50 * SIZE}, N - 84 - 50),
    "kept": ({"memory": 85 * SIZE, "keep": True}, 0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cached")
    generator = np.random.default_rng(3)
    images, labels = generator.integers(0, 256, (N, *SHAPE), np.uint8), generator.integers(0, 4, N)
    data_format.write(folder / "train.h5", N, SHAPE, [f"class {number}" for number in range(4)], [(images, labels)])
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
        levels = give_levels(session, CacheConfig.model_validate(cache), [loader])
        batches: list[list[bytes]] = []
        for epoch in range(2):
            for batch in loader.epoch(epoch):
                session.world.allgather_object(None)  # virtual ranks take turns, and go on together as in a training
                if len(batches) < BATCHES:
                    batches.append([batch.x.tobytes(), batch.y.tobytes()])
        session.world.allgather_object(None)
        levels.keep()
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
@pytest.mark.sample(6)
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
@pytest.mark.sample(6)
@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (2, None), (4, 2), (3, 2), (4, 1), (5, 3)])
def test_memory_that_is_filled_at_the_start_has_each_sample_read_once_by_the_job(
    folder: Path, expected: str, ranks: int, per_node: int | None, limit: str, prefetch: int
) -> None:
    cache = {"memory": LIMITS[limit]} | ({"fill": "start"} if per_node is None else {})  # what auto is on several nodes
    digest, read = stream(folder, ranks, cache, per_node=per_node, prefetch=prefetch)
    assert digest == expected
    held, nodes = {"some": 84, "all": N}[limit], -(-ranks // (per_node or ranks))
    assert read["file_samples"] == held + 2 * (N - held)
    assert read["file_bytes"] == read["file_samples"] * SIZE
    assert read["nodes_samples"] == (nodes - 1) * held
    assert read["memory_samples"] == 2 * held


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("levels", LOCAL)
@pytest.mark.sample(5)
@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (2, None), (4, 2)])
def test_a_local_copy_gives_the_same_bits(
    folder: Path, tmp_path: Path, expected: str, ranks: int, per_node: int | None, levels: str, prefetch: int
) -> None:
    section, again = LOCAL[levels]
    cache = {**section, "local": str(tmp_path), "fill": "first_epoch"}
    for found in range(2):
        digest, read = stream(folder, ranks, cache, per_node=per_node, prefetch=prefetch)
        assert digest == expected
        assert read["file_samples"] + read["memory_samples"] + read["local_samples"] == 2 * N
        if found and section.get("keep") and per_node is None:
            assert read["file_samples"] == 0
        elif per_node is None:
            assert read["file_samples"] == N + again
    assert len(list(tmp_path.iterdir())) == 2 * bool(section.get("keep"))


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
        return give_levels(session, CacheConfig.model_validate(cache), made).notes

    first, *others = work_virtual(ranks, folder / "cached.yaml", (), work)
    assert all(other == first for other in others)
    return tuple(note.replace(str(folder), "").replace("/train.h5", "train.h5") for note in first)


def test_the_share_that_is_kept_is_told(folder: Path) -> None:
    assert notes(folder, 2, {}) == ("data train.h5: all samples stay in memory of each node (6.05e-05 GB)",)
    assert notes(folder, 2, {"memory": 0}) == ()
    (some,) = notes(folder, 2, {"memory": 85 * SIZE})
    assert (
        some
        == "data train.h5: 41 % of the samples stay in memory of each node (2.51e-05 GB), the others are read again in each epoch"
    )
    both = notes(folder, 2, {"memory": 300 * SIZE}, loaders=2)  # the second file has what the first leaves
    assert [note.split(" stay")[0] for note in both] == ["data train.h5: all samples", "data train.h5: 46 % of the samples"]


def test_a_disk_without_room_is_told(folder: Path, tmp_path: Path) -> None:
    cache = {"memory": 85 * SIZE, "local": f"{tmp_path}/file/below"}
    (tmp_path / "file").write_bytes(b"")
    memory, local = notes(folder, 2, cache)
    assert memory.endswith("GB), the others are read again in each epoch")
    assert local == f"data train.h5: there is no local copy, as {tmp_path}/file/below cannot be used: Not a directory"


def test_more_than_a_node_has_is_cut_and_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_cache, "available_bytes", lambda: 100 * SIZE)
    told, kept = notes(folder, 2, {"memory": "1TB"})
    assert told == "data.cache.memory is 1e+03 GB, but a node has 2.97e-05 GB free, of which 90 % count"
    assert kept.startswith("data train.h5: 43 % of the samples")
    assert notes(folder, 2, {})[0].startswith("data train.h5: 24 % of the samples")


def test_ranks_that_cannot_share_memory_keep_their_own_parts(
    folder: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(shared_memory, "_open", denied)
    digest, read = stream(folder, 2, {"memory": 2 * 85 * SIZE}, prefetch=0)
    assert digest == expected
    assert read["memory_samples"] > 0
    (told,) = notes(folder, 2, {"memory": 2 * 85 * SIZE})
    assert told.startswith(
        "data train.h5: 41 % of the samples stay in memory of each rank, as the ranks of a node cannot share it ("
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [({"memroy": 1}, "there is no key 'memroy'"), ({"memory": "much"}, 'memory must be "auto", or a size'), (3, "it must be")],
)
def test_a_program_is_told_what_is_wrong(value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cache_of(value)
    assert cache_of(False) == CacheConfig(memory=0)


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


@pytest.mark.job
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


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_run_says_and_records_what_it_read(job: Callable[..., Outcome], folder: Path, tmp_path: Path, ranks: int) -> None:
    words = ["train", str(folder / "cached.yaml"), f"data.train={folder}/train.h5", f"data.test={folder}/train.h5", "epochs=3"]
    outcome = job(ranks, ["-m", "hpctrain", *words, "backend=numpy", "data.augment=[flip]"], cwd=tmp_path)
    assert outcome.code == 0, outcome.output
    assert outcome.stdout.count("train.h5: all samples stay in memory of each node") == 1
    file, memory = 2 * N, 4 * N  # of training, and of evaluation, which reads the same file for itself
    assert f"samples read: {file} from the data files (0.000121 GB),\n  {memory} from memory of the nodes" in outcome.stdout
    [metrics] = tmp_path.glob("runs/*/metrics.jsonl")
    records = [record for line in metrics.read_text().splitlines() if (record := json.loads(line))["kind"] == "reads"]
    assert [(record["epoch"], record["file_samples"], record["memory_samples"]) for record in records] == [
        (1, N, 0),
        (2, 2 * N, N),
        (3, 2 * N, 3 * N),
    ]
    assert records[-1]["file_bytes"] == 2 * N * SIZE
