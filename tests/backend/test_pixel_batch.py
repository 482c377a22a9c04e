"""Stored pixels and what is left to do: as an array they are the images."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.pixel_batch import WINDOW, PixelBatch


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
