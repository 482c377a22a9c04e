"""Batches are the same bytes on any number of ranks, from either kind of file, decoded by any number of threads."""

import hashlib

import numpy as np
import pytest

from hpctrain.data.format import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler
from tests.support.cached import in_memory

BATCHES = 50
AUGMENT = [("random_resized_crop", {"size": 12}), ("flip", {}), ("random_erasing", {"probability": 0.5})]


def first_batches(path, ranks, threads, memory=None, **options):
    """sha256 of the first 50 batches, those of a batch's ranks one behind another."""
    loaders = []
    for rank in range(ranks):
        file = ImageFile.open(path)
        file.decode_by(threads)
        pipeline = Pipeline(AUGMENT, 3, file.mean, file.std)
        pipeline.share_out(threads)
        pixels = None if memory is None else in_memory(file, memory)
        loaders.append(Loader(file, Sampler(len(file), 7, seed=3), pipeline, rank=rank, ranks=ranks, pixels=pixels, **options))
    digest, left = hashlib.sha256(), BATCHES
    for epoch in range(BATCHES):
        for of_ranks in zip(*(loader.epoch(epoch) for loader in loaders), strict=True):
            if left == 0:
                continue
            for array in ([batch.x for batch in of_ranks], [batch.y for batch in of_ranks]):
                digest.update(np.concatenate(array).tobytes())
            left -= 1
        if left == 0:
            return digest.hexdigest()
    raise AssertionError("too few batches")


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [2, 0])
@pytest.mark.parametrize("memory", [None, 1 << 20, 20_000], ids=["no memory", "all in memory", "a part in memory"])
def test_batches_are_the_same(make_encoded, memory, prefetch):
    files = make_encoded(count=45, shape=(20, 18, 3))
    reference = first_batches(files[1].path, 1, 1)
    for file in files:
        for ranks in (1, 2, 4):
            for threads in (1, 4):
                found = first_batches(file.path, ranks, threads, memory, prefetch=prefetch)
                assert found == reference, f"{ranks} ranks, {threads} threads"
