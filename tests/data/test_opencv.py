"""OpenCV's operations: their definition, wherever the result goes, and bits that no version and no processor may change."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from hpctrain.data import opencv


def _image(height: int, width: int, channels: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (height, width, channels), np.uint8)


def _targets(shape: tuple[int, ...], dtype: type) -> list[np.ndarray]:
    """Contiguous, and cut out of something larger."""
    return [np.zeros(shape, dtype), np.zeros((shape[0] + 2, shape[1] + 3, shape[2]), dtype)[1:-1, 2:-1]]


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_results_go_where_they_are_wanted(channels: int) -> None:
    image = _image(9, 7, channels)
    for out in _targets((9, 7, channels), np.uint8):
        opencv.mirror(image, out)
        assert np.array_equal(out, image[:, ::-1])
    enlarged = []
    for out in _targets((11, 8, channels), np.uint8):
        opencv.enlarge(image, out)
        enlarged.append(out)
    assert np.array_equal(*enlarged)
    assert enlarged[0].any()
    for out in _targets((9, 7, channels), np.uint8):
        opencv.enlarge(image, out)
        assert np.array_equal(out, image)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_each_channel_has_a_table(channels: int, dtype: type) -> None:
    image, table = _image(6, 5, channels), np.random.default_rng(1).random((1, 256, channels)).astype(dtype)
    for out in _targets((6, 5, channels), dtype):
        opencv.look_up(image, table, out)
        assert np.array_equal(out, np.stack([table[0, image[..., c], c] for c in range(channels)], axis=2))


def test_the_bits_of_an_enlarged_image_are_always_the_same() -> None:
    """A run that resumes with another version of OpenCV, or on another processor, sees the same pixels."""
    out = np.zeros((224, 224, 3), np.uint8)
    opencv.enlarge(_image(201, 155, 3), out)
    assert hashlib.sha256(out.tobytes()).hexdigest().startswith("fe0d3b464977b57e")


@pytest.mark.job
def test_it_starts_no_thread() -> None:
    program = (
        "import os, numpy as np\nbefore = len(os.listdir('/proc/self/task'))\nfrom hpctrain.data import opencv\n"
        "opencv.enlarge(np.zeros((900, 900, 3), np.uint8), np.zeros((999, 999, 3), np.uint8))\n"
        "opencv.mirror(np.zeros((900, 900, 3), np.uint8), np.zeros((900, 900, 3), np.uint8))\n"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "0\n"


@pytest.mark.job
@pytest.mark.sample(1)
@pytest.mark.parametrize(("side", "loaded"), [(32, False), (160, True)])
def test_small_images_do_without_it(side: int, loaded: bool) -> None:
    program = (
        "import sys, numpy as np\nfrom hpctrain.data.pipeline import Pipeline\n"
        "pipeline = Pipeline([('pad_crop', {}), ('flip', {'probability': 1.0})], 1, np.full(3, 0.5), np.full(3, 0.2))\n"
        f"images = np.zeros((2, {side}, {side}, 3), np.uint8)\n"
        "pipeline(images, np.arange(2), 0, np.zeros(images.shape, np.float32))\n"
        "print('cv2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{loaded}\n"
