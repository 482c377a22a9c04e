"""Batches are the same bytes on any number of ranks, from either kind of file, decoded by any number of threads."""

import hashlib

import numpy as np
import pytest

from hpctrain.data.format import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler

BATCHES = 50
AUGMENT = [("random_resized_crop", {"size": 12}), ("flip", {}), ("random_erasing", {"probability": 0.5})]


def first_batches(path, ranks, threads, **options):
    """sha256 of the first 50 batches, those of a batch's ranks one behind another."""
    loaders = []
    for rank in range(ranks):
        file = ImageFile.open(path)
        if hasattr(file.pixels, "threads"):
            file.pixels.threads = threads
        pipeline = Pipeline(AUGMENT, 3, file.mean, file.std)
        loaders.append(Loader(file, Sampler(len(file), 7, seed=3), pipeline, rank=rank, ranks=ranks, **options))
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
@pytest.mark.parametrize("options", [{}, {"prefetch": 0}], ids=["plain", "no prefetch"])
def test_batches_are_the_same(make_encoded, options):
    files = make_encoded(count=45, shape=(20, 18, 3))
    reference = first_batches(files[1].path, 1, 1)
    for file in files:
        for ranks in (1, 2, 4):
            for threads in (1, 4) if file is files[0] else (1,):
                assert first_batches(file.path, ranks, threads, **options) == reference, f"{ranks} ranks, {threads} threads"
