"""Stored pixels and what is left to do, and resizing in whole numbers with the bits of Pillow and OpenCV."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hpctrain.backend.pixels import WINDOW, PixelBatch, Resampling, most_taps, resized, taps
from tests.support.sampling import amount

cv2 = pytest.importorskip("cv2")  # which a GPU machine may lack


def _batch() -> PixelBatch:
    """Two images of 2 x 3: of the first a window below it, of the second the mirror image with a filled corner."""
    pixels = np.arange(1, 13, dtype=np.uint8).reshape(2, 2, 3, 1)
    windows = np.zeros(2, WINDOW)
    windows["top"], windows["left"], windows["step"] = (1, 0), (0, 2), (1, -1)
    windows["shown"] = [[(0, 1), (0, 3)], [(0, 2), (0, 3)]]
    windows["filled"][1] = (1, 2), (0, 2)
    return PixelBatch(pixels, windows, (2, 3), np.array([2.0]), np.array([-1.0]), fill=0.5)


def test_as_an_array() -> None:
    images = np.asarray(_batch())
    assert images.dtype == np.float64
    assert images[..., 0].tolist() == [[[7, 9, 11], [-1, -1, -1]], [[17, 15, 13], [0.5, 0.5, 19]]]
    assert np.asarray(_batch(), np.float32).dtype == np.float32
    with pytest.raises(ValueError, match="without a copy"):
        _batch().__array__(copy=False)


@pytest.mark.parametrize("chosen", [slice(1, 2), slice(0, 0), np.array([1, 0, 1])])
def test_parts_of_a_batch(chosen: slice | np.ndarray) -> None:
    batch = _batch()
    part = batch[chosen]
    np.testing.assert_array_equal(np.asarray(part), np.asarray(batch)[chosen])
    assert len(part) == len(np.asarray(part))
    assert part.shape == np.asarray(part).shape
    assert part.dtype == batch.dtype


LENGTHS = st.integers(1, 90)

CHANNELS = st.sampled_from([1, 3])


def _image(seed: int, height: int, width: int, channels: int) -> np.ndarray:
    """At random; every second one of black and white alone, whose sums are the largest."""
    image = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return image if seed % 2 else np.where(image > 127, 255, 0).astype(np.uint8)


def _pillow(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Columns, then rows."""
    made = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    for size in ((width, image.shape[0]), (width, height)):
        made = made.resize(size, Image.Resampling.BILINEAR)
    return np.asarray(made).reshape(height, width, image.shape[2])


def _opencv(image: np.ndarray, height: int, width: int) -> np.ndarray:
    made = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR_EXACT)
    return made.reshape(height, width, image.shape[2])


@given(LENGTHS, LENGTHS, LENGTHS, LENGTHS, CHANNELS, st.integers(0, 2**20))
@settings(max_examples=amount(50, 150), deadline=None)
def test_filtered_ways_are_pillows(height: int, width: int, made_height: int, made_width: int, channels: int, seed: int) -> None:
    image = _image(seed, height, width, channels)
    made = resized(image, (made_height, made_width), interpolates=False)
    np.testing.assert_array_equal(made, _pillow(image, made_height, made_width))


@given(LENGTHS, LENGTHS, LENGTHS, LENGTHS, CHANNELS, st.integers(0, 2**20))
@settings(max_examples=amount(50, 150), deadline=None)
def test_one_way_may_shrink_and_one_grow(
    height: int, width: int, made_height: int, made_width: int, channels: int, seed: int
) -> None:
    image = _image(seed, height, width, channels)
    expected = _pillow(image, min(height, made_height), min(width, made_width))
    if expected.shape[:2] != (made_height, made_width):
        expected = _opencv(expected, made_height, made_width)
    np.testing.assert_array_equal(resized(image, (made_height, made_width), interpolates=True), expected)


@pytest.mark.parametrize(("stored", "made"), [((232, 232), (224, 224)), ((160, 300), (224, 224)), ((500, 375), (298, 224))])
def test_sizes_of_photographs(stored: tuple[int, int], made: tuple[int, int]) -> None:
    image = _image(1, *stored, 3)
    np.testing.assert_array_equal(resized(image, made, interpolates=False), _pillow(image, *made))
    shrunk = _pillow(image, min(stored[0], made[0]), min(stored[1], made[1]))
    expected = shrunk if shrunk.shape[:2] == made else _opencv(shrunk, *made)
    np.testing.assert_array_equal(resized(image, made, interpolates=True), expected)


@given(LENGTHS, LENGTHS, st.booleans())
def test_taps_lie_within_the_image_and_weigh_one(size: int, made: int, interpolates: bool) -> None:
    found = taps(size, made, interpolates=interpolates)
    count = (found.weights > 0).sum(axis=1)
    assert found.weights.shape[1] <= most_taps(size, made)
    assert (found.first >= 0).all()
    assert (found.first + count <= size).all()
    unit = 1 << (8 if found.interpolated else 22)
    assert (np.abs(found.weights.sum(axis=1) - unit) <= found.weights.shape[1]).all()


def test_parts_of_a_batch_have_their_own_boxes() -> None:
    boxes = np.array([[0, 0, 4, 4], [1, 2, 3, 2], [0, 1, 2, 3]], np.int32)
    whole = Resampling(boxes, (5, 3), interpolates=True)
    image = _image(3, 4, 4, 3)
    for number, sample in enumerate((2, 0)):
        np.testing.assert_array_equal(whole.of(np.array([2, 0])).resized(image, number), whole.resized(image, sample))
