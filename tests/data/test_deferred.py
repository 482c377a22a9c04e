"""What is left to a kernel set gives the very images that the pipeline makes, bit by bit, whatever steps come before."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.augmentations import AUGMENTATIONS
from hpctrain.data.deferred import can_defer, filling, first_deferred, leaves_resize
from hpctrain.data.pipeline import Pipeline

MEAN, STD = np.array([0.3, 0.5, 0.6]), np.array([0.2, 0.25, 0.3])
WINDOWS = [("pad_crop", {"padding": 3}), ("flip", {}), ("center_crop", {"size": 6}), ("pad_crop", {"padding": 20})]
PIXELS = [("random_resized_crop", {"size": 8}), ("randaugment", {"magnitude": 15}), ("resize", {"size": 7})]
ERASING = ("random_erasing", {"value": 0.7, "probability": 0.6, "scale": [0.1, 0.5]})


def unfinished(pipeline, images, ids, epoch=1):
    """The batch with its last steps left, and the images that the pipeline makes."""
    shape = pipeline.stored_shape(*images.shape[1:])
    out = images if pipeline.keeps_pixels else np.full((len(images), *shape), 77, np.uint8)
    expected = np.empty((len(images), *pipeline.output_shape(*images.shape[1:])), pipeline.dtype)
    return pipeline.unfinished(images, ids, epoch, out), pipeline(images, ids, epoch, expected)


@given(
    st.lists(st.sampled_from(WINDOWS + PIXELS), max_size=5),
    st.sampled_from([[], [ERASING]]),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from(["float32", "float64"]),
    st.integers(0, 9),
    st.integers(0, 2**40),
)
@settings(max_examples=60, deadline=None)
def test_images_made_of_an_unfinished_batch_are_the_pipelines(specs, last, options, dtype, count, seed):
    mirrored, resized, threads = options
    images = np.random.default_rng(seed).integers(0, 256, (count, 9, 11, 3), np.uint8)
    pipeline = Pipeline([*specs, *last], seed, MEAN, STD, dtype)
    pipeline = pipeline.resized(6) if resized else pipeline
    pipeline = pipeline.mirrored() if mirrored else pipeline
    pipeline.share_out(1 + threads)
    batch, expected = unfinished(pipeline, images, np.arange(50, 50 + count))
    assert batch.shape == expected.shape
    assert batch.dtype == expected.dtype
    assert np.asarray(batch).tobytes() == expected.tobytes()


def test_windows_leave_the_stored_pixels_alone():
    images = np.random.default_rng(0).integers(0, 256, (5, 9, 11, 3), np.uint8)
    pipeline = Pipeline(WINDOWS, 3, MEAN, STD)
    assert pipeline.keeps_pixels
    assert pipeline.stored_shape(9, 11, 3) == (9, 11, 3)
    batch, _ = unfinished(pipeline, images, np.arange(5))
    assert batch.pixels is images
    later = Pipeline([*WINDOWS, PIXELS[1], WINDOWS[1]], 3, MEAN, STD)
    assert not later.keeps_pixels
    assert later.stored_shape(9, 11, 3) == (6, 6, 3)


@pytest.mark.parametrize("resize", [PIXELS[0], PIXELS[2]])
def test_a_resize_in_front_of_windows_is_left_too(resize):
    images = np.random.default_rng(0).integers(0, 256, (5, 9, 11, 3), np.uint8)
    pipeline = Pipeline([resize, *WINDOWS[:2]], 3, MEAN, STD)
    assert pipeline.keeps_pixels
    batch, expected = unfinished(pipeline, images, np.arange(5))
    assert batch.pixels is images
    assert batch.resampling is not None
    assert np.asarray(batch[[4, 1]]).tobytes() == expected[[4, 1]].tobytes()
    assert not Pipeline([WINDOWS[0], resize], 3, MEAN, STD).keeps_pixels


def test_steps_are_left_up_to_the_last_that_makes_pixels_but_for_a_resize():
    for made, first in ((PIXELS[0], 4), (PIXELS[1], 5), (PIXELS[2], 4)):
        steps = [AUGMENTATIONS.create(name, options) for name, options in (*WINDOWS, made, WINDOWS[1])]
        assert [first_deferred(steps[:number]) for number in (0, 2, 5, 6)] == [0, 0, first, first]
    assert first_deferred([steps[4], steps[4]]) == 1
    assert [leaves_resize(steps[:number]) for number in (0, 4, 5, 6)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("specs", "can"),
    [
        ([], True),
        ([ERASING], True),
        ([("random_erasing", {"value": "random"})], False),
        ([ERASING, ERASING], False),
    ],
)
def test_one_rectangle_of_one_number_may_be_left(specs, can):
    pipeline = Pipeline(specs, 0, MEAN, STD)
    assert pipeline.can_defer is can
    assert can_defer(pipeline.normalised) is can
    assert (filling(pipeline.normalised) is not None) == (bool(specs) and specs[0][1]["value"] != "random")
