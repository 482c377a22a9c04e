"""Images of several sizes by epoch: one stream for any number of ranks, read once, as pipelines of one size make them."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.boxes import even_interval
from hpctrain.data.format import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.mixing import Mixing
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler
from hpctrain.data.sizes import ImageSizes, first_fault
from hpctrain.errors import ConfigError, ShapeError
from tests.support.cached import cached, in_memory

SIZES = ImageSizes(((0, 5), (2, 7), (3, 4)))
CROPPED = [("random_resized_crop", {"size": 9, "scale": [0.5, 1.0]}), ("flip", {})]
SHIFTED = [("pad_crop", {"padding": 2}), ("flip", {}), ("random_erasing", {"value": "random"})]


def make_loader(file, sizes=SIZES, specs=SHIFTED, **options):
    pipeline = Pipeline(specs, 5, file.mean, file.std, "float64")
    return Loader(file, Sampler(len(file), 5, 5), pipeline, sizes=sizes, **options)


def images(loader, epoch, first=0):
    return [batch.x.copy() for batch in loader.epoch(epoch, first)]


def same(some, others):
    return len(some) == len(others) and all(np.array_equal(x, y) for x, y in zip(some, others, strict=True))


@pytest.mark.parametrize(("epoch", "side"), [(0, 5), (1, 5), (2, 7), (3, 4), (99, 4)])
def test_the_latest_size_that_has_begun_counts(epoch, side):
    assert SIZES.at(epoch) == side
    assert SIZES.changes_at(epoch) == (epoch in (0, 2, 3))


@pytest.mark.parametrize(("epochs", "largest"), [(0, 5), (2, 5), (3, 7), (4, 7)])
def test_a_size_that_a_training_does_not_come_to_needs_no_room(epochs, largest):
    assert SIZES.largest(epochs) == largest


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ((), "at least one"),
        (((1, 24),), r"Size 0 of images, \(1, 24\), begins at epoch 1, but images need a size from the first epoch on"),
        (((0, 24), (8, 32), (8, 40)), "Size 2 .* begins at epoch 8, but the size before at epoch 8; the smallest value is 9"),
        (((0, 24), (3, 0)), "has images of 0 px; the smallest side is 1"),
    ],
)
def test_sizes_that_are_out_of_order_are_refused(steps, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ImageSizes(steps)
    assert not steps or first_fault(steps) is not None


@pytest.mark.parametrize("specs", [CROPPED, SHIFTED])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_each_epoch_is_that_of_a_pipeline_of_its_size(make_file, specs, cache, prefetch):
    file, _, _ = make_file(shape=(9, 9, 3))
    loader = make_loader(file, specs=specs, pixels=cached(file, cache=cache), prefetch=prefetch)
    for epoch in (0, 1, 2, 3, 2):
        side = SIZES.at(epoch)
        pipeline = Pipeline(specs, 5, file.mean, file.std, "float64").resized(side)
        expected = images(Loader(file, Sampler(len(file), 5, 5), pipeline), epoch)
        assert same(images(loader, epoch), expected)
        assert expected[0].shape[1:] == loader.image_shape == (side, side, 3)
        assert [batch.image_shape for batch in loader.epoch(epoch)] == [(side, side, 3)] * 3


def test_one_size_that_is_the_images_own_changes_nothing(make_file):
    file, _, _ = make_file(shape=(8, 11, 3))
    plain, sized = make_loader(file, sizes=None), make_loader(file, sizes=ImageSizes(((0, 8),)))
    assert all(same(images(plain, epoch), images(sized, epoch)) for epoch in range(3))


def test_ranks_together_read_the_stream_of_one_rank_from_any_sample_on(make_file):
    file, _, _ = make_file(shape=(9, 9, 3))
    mixing = Mixing(1.0, 1.0, seed=5)
    shares = [make_loader(file, rank=rank, ranks=3, mixing=mixing) for rank in range(3)]
    for epoch, first in ((1, 0), (2, 4), (3, 7), (0, 12)):
        whole = images(make_loader(file, prefetch=0, mixing=mixing), epoch, first)
        together = [np.concatenate(batches) for batches in zip(*(images(one, epoch, first) for one in shares), strict=True)]
        assert same(together, whole)


@pytest.mark.parametrize("cache", [False, True])
def test_tiles_are_those_of_the_size(make_file, cache):
    file, _, _ = make_file(shape=(9, 9, 3))

    def tiles(counts, image_shape):
        rows = (even_interval(image_shape[0], 2, rank) for rank in range(2))
        return [((0, sum(counts)), (start - 1, stop + 1), (0, image_shape[1]), (0, 3)) for start, stop in rows]

    options = {"split_size": 2, "tiles": tiles, "pixels": cached(file, cache=cache)}
    loaders = [make_loader(file, rank=rank, ranks=2, **options) for rank in range(2)]
    for epoch in range(4):
        whole, side = images(make_loader(file, prefetch=0), epoch), SIZES.at(epoch)
        for rank, loader in enumerate(loaders):
            start, stop = even_interval(side, 2, rank)
            for tile, image in zip(images(loader, epoch), whole, strict=True):
                padded = np.pad(image, ((0, 0), (1, 1), (0, 0), (0, 0)))
                assert np.array_equal(tile, padded[:, start : stop + 2])


def test_a_file_in_memory_is_read_once_for_all_sizes(make_file, monkeypatch):
    file, _, _ = make_file(shape=(9, 9, 3))
    reads = []
    take = file.pixels.take
    monkeypatch.setattr(file.pixels, "take", lambda samples, out: reads.extend(samples.tolist()) or take(samples, out))
    loader = make_loader(file, pixels=in_memory(file))
    for epoch in range(4):
        images(loader, epoch)
    assert sorted(reads) == list(range(len(file)))


def test_sizes_that_a_crop_cannot_make_are_refused(make_file):
    file: ImageFile = make_file(shape=(9, 9, 3))[0]
    pipeline = Pipeline([("center_crop", {"size": 4})], 5, file.mean, file.std)
    assert ImageSizes(((0, 9), (1, 3))).shapes(pipeline, file.shape) == ((9, 9, 3), (3, 3, 3))
    assert ImageSizes(((0, 9), (1, 30))).shapes(pipeline, file.shape, 1) == ((9, 9, 3),)
    with pytest.raises(ShapeError, match=r"There cannot be images of 30 px: center_crop.size 30 is larger .*; at most 9 fits\."):
        ImageSizes(((0, 9), (1, 30))).shapes(pipeline, file.shape)
