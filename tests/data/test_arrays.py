"""Batches of arrays are those of a file with the same samples, on any grid."""

from pathlib import Path

import numpy as np
import pytest

from hpctrain.boxes import Box, even_interval
from hpctrain.data import format as data_format
from hpctrain.data.arrays import ArrayLoader
from hpctrain.data.format import ImageFile
from hpctrain.data.loader import Batch, BatchSource, Loader, TileOfRank
from hpctrain.data.mixing import Mixing
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler
from hpctrain.errors import ShapeError

SAMPLES, SHAPE = 23, (6, 5, 3)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ImageFile:
    path: Path = tmp_path_factory.mktemp("arrays") / "train.h5"
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (SAMPLES, *SHAPE), dtype=np.uint8)
    data_format.write(path, SAMPLES, SHAPE, ["a", "b"], [(images, random.integers(0, 2, SAMPLES))])
    return ImageFile.open(path)


def _rows_of_images(split_size: int) -> TileOfRank:
    def tiles(counts: tuple[int, ...], image_shape: tuple[int, int, int]) -> tuple[Box, ...]:
        heights = (even_interval(SHAPE[0], split_size, rank) for rank in range(split_size))
        # One row more on each side, as a convolution reads it; beyond the image there are zeros.
        return tuple(((0, sum(counts)), (start - 1, stop + 1), (0, SHAPE[1]), (0, SHAPE[2])) for start, stop in heights)

    return tiles


def _copies(source: BatchSource, epoch: int, first: int) -> list[Batch]:
    return [Batch(**{**vars(batch), "x": batch.x.copy(), "y": batch.y.copy()}) for batch in source.epoch(epoch, first)]


@pytest.mark.parametrize(("ranks", "split_size"), [(1, 1), (3, 1), (5, 1), (2, 2), (6, 3)])
@pytest.mark.parametrize("first", [0, 10])
@pytest.mark.parametrize("tiled", [False, True])
def test_batches_are_those_of_a_file(file: ImageFile, ranks: int, split_size: int, first: int, tiled: bool) -> None:
    pipeline = Pipeline([], seed=0, mean=np.zeros(3), std=np.ones(3), dtype="float64")
    images = np.empty((SAMPLES, *SHAPE))
    pipeline(np.asarray(file.images), np.arange(SAMPLES), 0, images)
    tiles = _rows_of_images(split_size) if tiled else None
    for rank in range(ranks):
        sampler = Sampler(SAMPLES, 8, seed=3)
        place = {"rank": rank, "ranks": ranks, "split_size": split_size, "tiles": tiles}
        expected = _copies(Loader(file, sampler, pipeline, **place, prefetch=0), 2, first)  # type: ignore[arg-type]
        got = _copies(ArrayLoader(images, np.asarray(file.labels), sampler, **place), 2, first)  # type: ignore[arg-type]
        assert len(got) == len(expected)
        for ours, theirs in zip(got, expected, strict=True):
            for name, value in vars(theirs).items():
                assert np.array_equal(getattr(ours, name), value), name
            assert ours.y.dtype == np.int64


@pytest.mark.parametrize(("images", "labels"), [((4, 3, 3), 4), ((4, 3, 3, 1), 5), ((5, 3, 3, 1), 5)])
def test_arrays_that_are_no_samples_are_refused(images: tuple[int, ...], labels: int) -> None:
    with pytest.raises(ShapeError, match="are not 4 samples; give images"):
        ArrayLoader(np.zeros(images), np.zeros(labels, np.int64), Sampler(4, 2))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_images_are_mixed_with_those_of_the_step_in_the_opposite_order(ranks: int) -> None:
    random, mixing = np.random.default_rng(0), Mixing(0.5, 1.0, seed=4)
    images, labels = random.standard_normal((11, 5, 4, 2)), random.integers(0, 3, 11)
    sampler = Sampler(11, 4, seed=1)
    loaders = [ArrayLoader(images, labels, sampler, rank=rank, ranks=ranks, mixing=mixing) for rank in range(ranks)]
    for step, batches in enumerate(zip(*(loader.epoch(1) for loader in loaders), strict=True)):
        ids, mix = sampler.ids(1, step), mixing.draw(1, 4 * step, 5, 4)
        assert mix is not None
        expected = images[ids].copy()
        mix.apply(expected, images[ids[::-1]].copy(), ((0, 5), (0, 4)))
        assert np.concatenate([batch.x for batch in batches]).tobytes() == expected.tobytes()
        partners = [batch.mixed.labels for batch in batches if batch.mixed is not None]
        assert np.array_equal(np.concatenate(partners), labels[ids[::-1]])
        assert all(batch.mixed is not None and batch.mixed.weight == mix.weight for batch in batches)
