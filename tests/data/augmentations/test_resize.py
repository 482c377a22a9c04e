"""Resized images: Pillow's pixels, the proportions of the image, and pipelines that are brought to another size."""

import numpy as np
import pytest
from PIL import Image

from hpctrain.data.pipeline import Pipeline
from tests.data.test_augment import images_of, pixels, run


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(("shape", "size", "expected"), [((9, 9), 6, (6, 6)), ((7, 10), 14, (14, 20)), ((10, 7), 3, (4, 3))])
def test_resize_is_pillows_of_the_columns_and_then_of_the_rows(shape, size, expected, channels):
    images = images_of(3, (*shape, channels))
    out = pixels([("resize", {"size": size})], images, range(3))
    assert out.shape == (3, *expected, channels)
    for image, result in zip(images, out, strict=True):
        for channel in range(channels):
            narrowed = Image.fromarray(np.ascontiguousarray(image[..., channel])).resize((expected[1], shape[0]), Image.BILINEAR)
            assert np.array_equal(result[..., channel], np.asarray(narrowed.resize(expected[::-1], Image.BILINEAR)))


def test_images_of_the_size_that_is_asked_for_stay_as_they_are():
    images = images_of(4, (8, 11, 3))
    assert np.array_equal(pixels([("resize", {"size": 8})], images, range(4)), images)


@pytest.mark.parametrize("channels", [3, 4])
def test_a_resized_pipeline_has_another_size_and_the_same_draws(channels):
    images = images_of(6, (12, 12, channels))
    mean, std = np.zeros(channels), np.full(channels, 1 / 255)

    def resized(specs, side):
        pipeline = Pipeline(specs, 1, mean, std, "float64").resized(side)
        out = np.empty((6, *pipeline.output_shape(12, 12, channels)))
        return pipeline(images, np.arange(6), 2, out)

    shift = ("pad_crop", {"padding": 2})
    erasing = ("random_erasing", {"probability": 1.0})
    for specs, same in (
        ([("random_resized_crop", {"size": 9}), shift], [("random_resized_crop", {"size": 5}), shift]),
        ([("resize", {"size": 9}), ("center_crop", {"size": 8})], [("resize", {"size": 9}), ("center_crop", {"size": 5})]),
        ([shift, ("flip", {})], [shift, ("flip", {}), ("resize", {"size": 5})]),
    ):
        assert np.array_equal(resized(specs, 5), run(same, images, range(6), epoch=2, mean=mean, std=std))
    whole, small = (run([erasing], images, range(6), mean=mean, std=std), resized([erasing], 6))
    assert small.shape == (6, 6, 6, channels)
    assert ((small == 0).any(axis=(1, 2, 3)) == (whole == 0).any(axis=(1, 2, 3))).all()
    assert np.array_equal(resized([shift, erasing], 12), resized([shift, erasing], 12))
