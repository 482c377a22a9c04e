"""Augmentation: pure in (seed, epoch, sample id), independent of batches; each map and operation against its definition."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hpctrain.backend import counter_random
from hpctrain.core.errors import ConfigError, DataError, ShapeError
from hpctrain.data import opencv
from hpctrain.data.augmentations import AUGMENTATIONS
from hpctrain.data.augmentations.randaugment import RandAugment
from hpctrain.data.augmentations.trivial_augment_wide import TrivialAugmentWide
from hpctrain.data.picture_operations import NAMES, SIGNED, OperationRanges, changed
from hpctrain.data.pipeline import Pipeline
from tests.support.sampling import amount

MEAN, STD = np.array([0.3, 0.5, 0.6]), np.array([0.2, 0.25, 0.3])
ALL = [
    ("pad_crop", {"padding": 3}),
    ("random_resized_crop", {"size": 8}),
    ("flip", {}),
    ("center_crop", {"size": 7}),
    ("randaugment", {"magnitude": 15}),
    ("trivial_augment_wide", {"interpolation": "bilinear"}),
    ("vertical_flip", {}),
    ("rotation", {"degrees": 20}),
    ("color_jitter", {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.2}),
    ("autoaugment", {"policy": "cifar10"}),
]
ERASING = ("random_erasing", {"value": "random", "scale": [0.1, 0.5]})


def images_of(count, shape=(9, 11, 3), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)


def run(specs, images, ids, *, seed=1, epoch=0, dtype="float64", mean=MEAN, std=STD):
    pipeline = Pipeline(specs, seed, mean, std, dtype)
    out = np.full((len(images), *pipeline.output_shape(*images.shape[1:])), np.nan, dtype)
    assert pipeline(images, np.asarray(ids, np.int64), epoch, out) is out
    return out


def pixels(specs, images, ids, **options):
    """The augmented uint8 images: normalised with mean 0 and std 1/255."""
    channels = images.shape[3]
    out = run(specs, images, ids, mean=np.zeros(channels), std=np.full(channels, 1 / 255), **options)
    return np.rint(out).astype(np.uint8)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_normalise_is_last_and_as_defined(dtype):
    images = images_of(5)
    out = run([], images, range(5), dtype=dtype)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(out, (images / 255 - MEAN) / STD, atol=tolerance)


def test_a_channel_without_spread_is_only_centred():
    out = run([], np.full((2, 3, 3, 1), 51, np.uint8), [0, 1], mean=np.array([0.2]), std=np.array([0.0]))
    np.testing.assert_allclose(out, 0, atol=1e-15)


@given(st.lists(st.integers(0, 11), max_size=12), st.integers(0, 3), st.integers(0, 2**62), st.permutations(range(len(ALL))))
@settings(max_examples=amount(15, 60), deadline=None)
def test_samples_do_not_depend_on_their_batch(chosen, epoch, seed, order):
    images = images_of(12, (13, 12, 3))
    specs = [*(ALL[i] for i in order), ERASING]
    whole = run(specs, images, range(12), epoch=epoch, seed=seed)
    ids = np.array(chosen, np.int64)
    assert np.array_equal(run(specs, images[ids], ids, epoch=epoch, seed=seed), whole[ids])


def test_scratch_of_a_larger_batch_does_not_show():
    images = images_of(6)
    pipeline = Pipeline(ALL, 1, MEAN, STD)
    shape = pipeline.output_shape(9, 11, 3)
    outs = []
    for start in (0, 2, 5):
        out = np.empty((6 - start, *shape), np.float32)
        outs.append(pipeline(images[start:], np.arange(start, 6), 3, out))
    assert np.array_equal(outs[0][2:], outs[1])
    assert np.array_equal(outs[0][5:], outs[2])


@pytest.mark.parametrize("spec", [("pad_crop", {}), ("random_resized_crop", {"size": 9}), ("flip", {})])
def test_draws_differ_by_sample_epoch_seed_and_position(spec):
    images = np.repeat(images_of(1, (9, 9, 3)), 64, axis=0)
    base = pixels([spec], images, range(64))
    assert len({image.tobytes() for image in base}) > 1
    for other in (
        pixels([spec], images, range(64, 128)),
        pixels([spec], images, range(64), epoch=1),
        pixels([spec], images, range(64), seed=2),
        pixels([("center_crop", {"size": 9}), spec], images, range(64)),
    ):
        assert not np.array_equal(other, base)
    assert np.array_equal(pixels([spec], images, range(64)), base)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("padding", [0, 2, 4, 20])
def test_pad_crop_takes_a_window_of_the_padded_image(channels, padding):
    images = images_of(40, (7, 9, channels)) // 2 + 1
    out = pixels([("pad_crop", {"padding": padding})], images, range(40))
    seen = set()
    for image, result in zip(images, out, strict=True):
        padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (7, 9), (0, 1)).transpose(0, 1, 3, 4, 2)
        places = np.argwhere((windows == result).all(axis=(2, 3, 4)))
        assert len(places) >= 1
        seen.add(tuple(places[0]))
    assert padding == 0 or len(seen) > 5


@pytest.mark.parametrize("probability", [0, 0.25, 1.0])
def test_flip_is_the_image_or_its_mirror(probability):
    images = images_of(400, (3, 4, 3))
    out = pixels([("flip", {"probability": probability})], images, range(400))
    flipped = (out == images[:, :, ::-1]).all(axis=(1, 2, 3))
    kept = (out == images).all(axis=(1, 2, 3))
    assert (flipped | kept).all()
    assert abs(flipped.mean() - probability) <= 5 * np.sqrt(probability * (1 - probability) / 400)


@pytest.mark.parametrize(("shape", "size", "top", "left"), [((9, 11, 3), 5, 2, 3), ((8, 11, 3), 8, 0, 1), ((7, 7, 3), 4, 1, 1)])
def test_center_crop(shape, size, top, left):
    images = images_of(2, shape)
    out = pixels([("center_crop", {"size": size})], images, [0, 1])
    assert np.array_equal(out, images[:, top : top + size, left : left + size])


def test_resized_windows_have_the_area_and_aspect_asked_for():
    crop = AUGMENTATIONS.create("random_resized_crop", {"size": 8, "scale": [0.2, 0.5], "ratio": [0.8, 1.25]})
    boxes = crop.boxes(400, 400, np.random.default_rng(0).random((2000, crop.draws)))
    area, aspect = boxes[:, 2] * boxes[:, 3] / 160000, boxes[:, 3] / boxes[:, 2]
    assert 0.19 < area.min() < 0.22
    assert 0.48 < area.max() < 0.51
    assert abs(area.mean() - 0.35) < 0.01
    assert 0.79 < aspect.min() < 0.82
    assert 1.22 < aspect.max() < 1.27
    assert abs(np.log(aspect).mean()) < 0.02


@pytest.mark.parametrize(("shape", "box"), [((10, 100), (0, 43, 10, 13)), ((100, 10), (43, 0, 13, 10))])
def test_a_window_that_never_fits_is_the_central_one(shape, box):
    crop = AUGMENTATIONS.create("random_resized_crop", {"size": 8, "scale": [1, 1]})
    boxes = crop.boxes(*shape, np.random.default_rng(0).random((3, crop.draws)))
    assert boxes.tolist() == [list(box)] * 3


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_window_that_shrinks_both_ways_is_pillows_bilinear_resize(channels):
    shrunk = 0
    images = images_of(12, (20, 30, channels))
    out = pixels([("random_resized_crop", {"size": 9})], images, range(12))
    crop = AUGMENTATIONS.create("random_resized_crop", {"size": 9})
    u = counter_random.uniform(counter_random.key("augment", 1, 0, 0, "random_resized_crop"), np.arange(12), range(crop.draws))
    for image, result, (top, left, h, w) in zip(images, out, crop.boxes(20, 30, u), strict=True):
        if min(h, w) < 9:
            continue
        shrunk += 1
        for channel in range(channels):
            window = Image.fromarray(np.ascontiguousarray(image[top : top + h, left : left + w, channel]))
            for width, height in ((9, int(h)), (9, 9)):  # the columns first, whatever is less work
                window = window.resize((width, height), Image.Resampling.BILINEAR)
            assert np.array_equal(result[..., channel], np.asarray(window))
    assert shrunk > 3


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [12, 31])
def test_every_window_is_nearly_the_triangle_filter_in_exact_arithmetic(channels, size):
    """Pillow rounds twice, OpenCV once, with weights of eight bits: either is less than 1.5 grey levels away."""
    images = images_of(60, (21, 30, channels))
    crop = AUGMENTATIONS.create("random_resized_crop", {"size": size})
    u = np.random.default_rng(3).random((60, crop.draws))
    out = np.zeros((60, size, size, channels), np.uint8)
    crop.apply(images, u, out)
    boxes = crop.boxes(21, 30, u)
    ways = {(bool(h > size), bool(w > size)) for _, _, h, w in boxes}
    assert len(ways) == (4 if size == 12 else 1)
    for image, result, (top, left, h, w) in zip(images, out, boxes, strict=True):
        window = image[top : top + h, left : left + w].astype(float)
        exact = np.einsum("yh,hwc,xw->yxc", triangle(h, size), window, triangle(w, size))
        assert abs(result - exact).max() < 1.5


def triangle(size, resized):
    """Weights (resized, size) of the triangle filter, which widens where it shrinks."""
    scale = size / resized
    centres = (np.arange(resized)[:, None] + 0.5) * scale - 0.5
    weights = np.maximum(0, 1 - abs(np.arange(size) - centres) / max(scale, 1.0))
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("value", [0, -1.5, "random"])
def test_erasing_fills_one_rectangle_of_normalised_pixels(value):
    images = images_of(300, (20, 30, 3))
    plain = run([("flip", {})], images, range(300))
    out = run([("flip", {}), ("random_erasing", {"value": value, "scale": [0.1, 0.3], "ratio": [0.5, 2.0]})], images, range(300))
    changed, noise = 0, []
    for before, after in zip(plain, out, strict=True):
        places = np.argwhere((before != after).any(axis=2))
        changed += len(places) > 0
        if len(places):
            (top, left), (bottom, right) = places.min(axis=0), places.max(axis=0) + 1
            filled = after[top:bottom, left:right]
            assert 0.08 < filled[..., 0].size / 600 < 0.33
            assert 0.4 < (bottom - top) / (right - left) < 2.5
            if value == "random":
                noise.append(filled.ravel())
            else:
                assert (filled == value).all()
    assert abs(changed - 150) < 5 * np.sqrt(75)
    if noise:
        numbers = np.concatenate(noise)
        assert abs(numbers.mean()) < 5 / np.sqrt(numbers.size)
        assert abs(numbers.std() - 1) < 5 / np.sqrt(2 * numbers.size)
        assert len(np.unique(numbers)) > numbers.size / 3


def test_a_rectangle_that_never_fits_erases_nothing():
    erasing = AUGMENTATIONS.create("random_erasing", {"probability": 1.0, "scale": [1, 1], "ratio": [1, 1]})
    u = np.random.default_rng(0).random(erasing.draws)
    assert erasing.box((9, 9), u) is None
    assert erasing.box((9, 9), np.array([1.0, *u[1:]])) is None


def test_erasing_is_last_in_the_list():
    with pytest.raises(ConfigError, match=r'"flip" is number 3 of the list, after "random_erasing", .* at the end'):
        Pipeline([("flip", {}), ("random_erasing", {}), ("flip", {})], 0, MEAN, STD)
    assert len(Pipeline([("flip", {}), ERASING, ERASING], 0, MEAN, STD).normalised) == 2


def test_images_that_are_too_small_or_of_other_channels_are_refused():
    with pytest.raises(ShapeError, match="12 is larger than the images of 9x11; at most 9 fits"):
        Pipeline([("center_crop", {"size": 12})], 0, MEAN, STD).output_shape(9, 11, 3)
    with pytest.raises(ShapeError, match="1 channels, but mean and std have 3"):
        Pipeline([], 0, MEAN, STD).output_shape(9, 11, 1)


def test_alternating_mirrors_each_image_in_every_second_epoch():
    """Of two consecutive epochs exactly one mirrors an image, and the seed decides which."""
    images = images_of(400, (3, 4, 3))

    def mirrored(epoch, seed=1):
        out = pixels([("flip", {"alternating": True})], images, range(400), epoch=epoch, seed=seed)
        return (out == images[:, :, ::-1]).all(axis=(1, 2, 3))

    first = mirrored(0)
    assert 150 < first.sum() < 250
    for epoch in (1, 2, 3, 8, 9):
        assert np.array_equal(mirrored(epoch), first ^ bool(epoch % 2))
    assert 150 < (mirrored(0, seed=2) ^ first).sum() < 250


@pytest.mark.parametrize(
    ("mean", "std"), [(np.nan, 0.2), (np.inf, 0.2), (0.3, np.nan), (0.3, np.inf), (0.3, -0.2), (0.3, 1e-320), (1e300, 0.2)]
)
def test_a_normalisation_that_is_not_finite_is_refused(mean, std):
    with pytest.raises(DataError, match=r"the normalisation channel 1 has mean .*must be finite"):
        Pipeline([], 0, np.array([0.3, mean]), np.array([0.2, std]))


RANGES = OperationRanges(shear=0.3, rotation=30.0, enhancement=0.9, posterized_bits=4, translation=None)


def image_of(channels: int, height: int = 29, width: int = 31) -> np.ndarray:
    """Smooth in part, so that no operation is lost in noise."""
    rows, columns = np.mgrid[:height, :width]
    planes = [(7 * rows + 3 * columns * (channel + 1) + (rows * columns) % 31) % 256 for channel in range(channels)]
    return np.stack(planes, axis=2).astype(np.uint8)


def test_pixels_of_all_operations_are_what_they_were() -> None:
    """By a hash, without PyTorch: a library of pictures that returns others would change trainings without a word."""
    digest = hashlib.sha256()
    for channels in (1, 3):
        image = image_of(channels)
        for name in NAMES:
            magnitude = RANGES.magnitude(name, 9, 31, (29, 31))
            for signed in (magnitude, -magnitude) if name in SIGNED else (magnitude,):
                result = changed(image, [(name, signed)], "nearest")
                assert result.shape == image.shape
                assert result.dtype == np.uint8
                digest.update(np.ascontiguousarray(result).tobytes())
    assert digest.hexdigest() == "bd949341128ea1697f189dac323aaa4d0b71822028c10d9cbbc0dbab6aa7e1b6"


@pytest.mark.parametrize("channels", [1, 3])
def test_operations_without_strength_change_nothing(channels: int) -> None:
    image = image_of(channels)
    for name in NAMES:
        if name not in ("autocontrast", "equalize"):
            magnitude = RANGES.magnitude(name, 0, 31, (29, 31))
            assert np.array_equal(changed(image, [(name, magnitude)], "bilinear"), image) or name == "solarize"
    assert np.array_equal(changed(image, [("solarize", 256.0)], "nearest"), image)


@pytest.mark.parametrize("channels", [2, 4])
def test_other_channels_are_refused(channels: int) -> None:
    for augmentation in (RandAugment(), TrivialAugmentWide()):
        with pytest.raises(ShapeError, match=rf"requires images of 1 \(grey\) or 3 \(RGB\) channels, not {channels}"):
            augmentation.output_shape(9, 9, channels)
        assert augmentation.output_shape(9, 9, 3) == (9, 9, 3)


def test_all_operations_and_both_signs_are_drawn_alike() -> None:
    u = np.random.default_rng(0).random((4000, TrivialAugmentWide.draws))
    trivial = TrivialAugmentWide()
    counts = dict.fromkeys(NAMES, 0)
    magnitudes = []
    for one in u:
        name, magnitude = trivial.choices((32, 32), one)[0]
        counts[name] += 1
        if name == "rotate":
            magnitudes.append(magnitude)
    assert all(abs(count - 4000 / 14) < 5 * np.sqrt(4000 / 14) for count in counts.values())
    assert len(set(magnitudes)) > 40  # of 31 positions with two signs
    assert min(magnitudes) == -135.0
    assert max(magnitudes) == 135.0
    drawn = RandAugment(operations=3).choices((32, 32), np.random.default_rng(1).random(RandAugment.draws))
    assert len(drawn) == 3


def _targets(shape: tuple[int, ...], dtype: type) -> list[np.ndarray]:
    """Contiguous, and cut out of something larger."""
    return [np.zeros(shape, dtype), np.zeros((shape[0] + 2, shape[1] + 3, shape[2]), dtype)[1:-1, 2:-1]]


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_results_go_where_they_are_wanted(channels: int) -> None:
    image = images_of(1, (9, 7, channels), seed=5)[0]
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


def test_the_bits_of_an_enlarged_image_are_always_the_same() -> None:
    """A run that resumes with another version of OpenCV, or on another processor, sees the same pixels."""
    out = np.zeros((224, 224, 3), np.uint8)
    opencv.enlarge(images_of(1, (201, 155, 3), seed=5)[0], out)
    assert hashlib.sha256(out.tobytes()).hexdigest().startswith("fe0d3b464977b57e")


@pytest.mark.job
def test_opencv_starts_no_thread() -> None:
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
def test_small_images_do_without_opencv(side: int, loaded: bool) -> None:
    program = (
        "import sys, numpy as np\nfrom hpctrain.data.pipeline import Pipeline\n"
        "pipeline = Pipeline([('pad_crop', {}), ('flip', {'probability': 1.0})], 1, np.full(3, 0.5), np.full(3, 0.2))\n"
        f"images = np.zeros((2, {side}, {side}, 3), np.uint8)\n"
        "pipeline(images, np.arange(2), 0, np.zeros(images.shape, np.float32))\n"
        "print('cv2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{loaded}\n"


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
