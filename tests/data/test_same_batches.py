"""Batches are the same bytes on any number of ranks, from either kind of file, through any levels, made by any threads."""

import hashlib
import itertools
from dataclasses import dataclass

import pytest

from hpctrain.config.data_section import CacheConfig
from hpctrain.data import batch_threads
from hpctrain.data.format import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.read_counts import summed
from hpctrain.data.sampler import Sampler
from hpctrain.experiment.data_cache import give_levels
from tests.support.virtual_runs import work_virtual

N, SHAPE, BATCH = 45, (20, 18, 3), 7
SIZE = 20 * 18 * 3
BATCHES = 50  # seven epochs, and one batch of the eighth
AUGMENT = [("random_resized_crop", {"size": 12}), ("flip", {}), ("random_erasing", {"probability": 0.5})]
_CONFIG = """
name: same
model: {name: small, channels: [2], hidden: 3}
data: {train: train.h5}
batch: 7
epochs: 1
optimizer: {name: sgd, lr: 0.01}
schedule: constant
"""
_HALF = 22 * (SIZE + 1) + 64  # of memory, which holds 22 samples
#: by name, the keys of `data.cache`, and the origins from which samples come after they were in the data file
LEVELS = {
    "off": ({"memory": 0}, set()),
    "memory": ({"memory": "1MB"}, {"memory"}),
    "a part in memory": ({"memory": _HALF}, {"memory"}),
    "local": ({"memory": 0, "local": True}, {"local"}),
    "both": ({"memory": _HALF, "local": True}, {"memory", "local"}),
}
#: ranks of a job, and of each of its nodes
ONE_NODE = ((1, 1), (2, 2), (4, 4))
NODES = (*ONE_NODE, (4, 2))
#: level, fill, batches made ahead, ranks; without memory there is nothing to fill at the start
TABLE = [
    *((level, "first_epoch", prefetch, ONE_NODE) for level in LEVELS for prefetch in (2, 0)),
    *((level, "start", 2, NODES) for level, (_, origins) in LEVELS.items() if "memory" in origins),
]


@dataclass(frozen=True)
class Case:
    """A line of the table. path: of the data file. cache: its section of a configuration. per_node: ranks of a node."""

    path: str
    cache: dict
    ranks: int
    per_node: int
    threads: int
    prefetch: int

    def loader(self, rank):
        file = ImageFile.open(self.path)
        file.decode_by(self.threads)
        pipeline = Pipeline(AUGMENT, 3, file.mean, file.std)
        pipeline.share_out(self.threads)
        return Loader(file, Sampler(N, BATCH, seed=3), pipeline, rank=rank, ranks=self.ranks, prefetch=self.prefetch)


def first_batches(loader):
    """Images and labels of the first batches of one rank, as bytes."""
    epochs = itertools.chain.from_iterable(loader.epoch(epoch) for epoch in itertools.count())
    for batch in itertools.islice(epochs, BATCHES):
        yield batch.x.tobytes(), batch.y.tobytes()


def digest_of(batches_of_ranks):
    """sha256 of the batches, those of a batch's ranks one behind another: images first."""
    digest = hashlib.sha256()
    for of_ranks in zip(*batches_of_ranks, strict=True):
        for part in zip(*of_ranks, strict=True):
            digest.update(b"".join(part))
    return digest.hexdigest()


def through_levels(case, folder):
    """The digest of a job's first batches, and what all ranks have read."""

    def work(session):
        loader = case.loader(session.world.rank)
        levels = give_levels(session, CacheConfig.model_validate(case.cache), [loader])
        batches = []
        for batch in first_batches(loader):
            session.world.allgather_object(None)  # virtual ranks take turns, and go on together as in a training
            batches.append(batch)
        return batches, levels.counts.values()

    results = work_virtual(case.ranks, folder / "same.yaml", (), work, case.per_node)
    return digest_of(batches for batches, _ in results), summed(counts for _, counts in results)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("level", "fill", "prefetch", "jobs"), TABLE, ids=lambda value: None if isinstance(value, tuple) else str(value)
)
def test_batches_are_the_same(make_encoded, tmp_path, monkeypatch, level, fill, prefetch, jobs):
    monkeypatch.setattr(batch_threads, "_LEAST_CHUNK_BYTES", 1)  # else one thread makes a whole batch of such small images
    encoded, pixels = make_encoded(count=N, shape=SHAPE)
    (tmp_path / "same.yaml").write_text(_CONFIG)
    plain = Case(pixels.path, {}, 1, 1, 1, 0)  # of one rank that reads the pixels itself
    reference = digest_of([first_batches(plain.loader(0))])
    keys, origins = LEVELS[level]
    cache = {**keys, "fill": fill} | ({"local": str(tmp_path / "local")} if "local" in keys else {})
    for file, (ranks, per_node), threads in itertools.product((encoded, pixels), jobs, (1, 4)):
        case = Case(file.path, cache, ranks, per_node, threads, prefetch)
        found, read = through_levels(case, tmp_path)
        assert found == reference, str(case)
        assert {origin for origin in ("memory", "local") if read[f"{origin}_samples"]} == origins, str(case)
        assert (read["nodes_samples"] > 0) == (per_node < ranks), str(case)
