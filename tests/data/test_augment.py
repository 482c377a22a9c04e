"""Augmentation: pure in (seed, epoch, sample id), independent of batches; each map against its definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hpctrain.backend import counter_random
from hpctrain.data.augmentations import AUGMENTATIONS
from hpctrain.data.pipeline import Pipeline
from hpctrain.errors import ConfigError, DataError, ShapeError

MEAN, STD = np.array([0.3, 0.5, 0.6]), np.array([0.2, 0.25, 0.3])
ALL = [("pad_crop", {"padding": 3}), ("random_resized_crop", {"size": 8}), ("flip", {}), ("center_crop", {"size": 7})]
ALL += [("randaugment", {"magnitude": 15}), ("trivial_augment_wide", {"interpolation": "bilinear"})]
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
@settings(max_examples=40, deadline=None)
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


def test_pad_crop_reaches_every_shift_equally():
    images = np.zeros((1, 5, 5, 1), np.uint8)
    images[0, 2, 2] = 200
    out = pixels([("pad_crop", {"padding": 1})], np.repeat(images, 1800, axis=0), range(1800))
    places, counts = np.unique(np.argwhere(out[..., 0])[:, 1:], axis=0, return_counts=True)
    assert places.tolist() == [[y, x] for y in (1, 2, 3) for x in (1, 2, 3)]
    assert ((counts - 200) ** 2 / 200).sum() < 35  # 8 degrees of freedom


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


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0.01, 1), st.floats(0, 1), st.floats(0.2, 1), st.floats(1, 5))
@settings(max_examples=80, deadline=None)
def test_resized_windows_lie_in_the_image(height, width, low, part, narrow, wide):
    crop = AUGMENTATIONS.create(
        "random_resized_crop", {"size": 8, "scale": [low, low + (1 - low) * part], "ratio": [narrow, wide]}
    )
    u = np.random.default_rng(0).random((50, crop.draws))
    top, left, h, w = crop.boxes(height, width, u).T
    assert min(h.min(), w.min()) >= 1
    assert min(top.min(), left.min()) >= 0
    assert ((top + h) <= height).all()
    assert ((left + w) <= width).all()


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
    with pytest.raises(ConfigError, match=r'"flip" is number 3 of the list, behind "random_erasing", .* at the end'):
        Pipeline([("flip", {}), ("random_erasing", {}), ("flip", {})], 0, MEAN, STD)
    assert len(Pipeline([("flip", {}), ERASING, ERASING], 0, MEAN, STD).normalised) == 2


def test_images_that_are_too_small_or_of_other_channels_are_refused():
    with pytest.raises(ShapeError, match="12 is larger than the images of 9x11; at most 9 fits"):
        Pipeline([("center_crop", {"size": 12})], 0, MEAN, STD).output_shape(9, 11, 3)
    with pytest.raises(ShapeError, match="1 channels, but mean and std have 3"):
        Pipeline([], 0, MEAN, STD).output_shape(9, 11, 1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("padcrop", {}, 'no augmentation "padcrop"; the nearest is "pad_crop"'),
        ("zzz", {}, 'there are "center_crop", "flip", "pad_crop", "randaugment", "random_erasing", "random_resized_crop", "re'),
        ("randaugment", {"operations": 9}, "operations = 9 is outside 1 to 8"),
        ("randaugment", {"magnitude": 31}, "magnitude = 31 is outside 0 to bins - 1 = 30"),
        ("randaugment", {"bins": 1}, "bins = 1 is less than 2"),
        ("randaugment", {"interpolation": "cubic"}, "must be 'nearest' or 'bilinear'"),
        ("trivial_augment_wide", {"bins": 0}, "bins = 0 is less than 2"),
        ("random_erasing", {"probability": 2}, "probability = 2.0 is outside"),
        ("random_erasing", {"scale": [0.5, 1.5]}, r"scale = \[0.5, 1.5\] must be"),
        ("random_erasing", {"ratio": [0, 1]}, r"ratio = \[0.0, 1.0\] must be"),
        ("random_erasing", {"value": float("inf")}, "value = inf must be finite"),
        ("random_erasing", {"value": "noise"}, '"value" .* is "noise"'),
        ("pad_crop", {"pading": 3}, 'no option "pading"; there is only "padding"'),
        ("center_crop", {}, 'needs the option "size"'),
        ("pad_crop", {"padding": -1}, "padding = -1 is negative"),
        ("pad_crop", {"padding": 1.5}, '"padding" .* is 1.5, but must be an integer'),
        ("pad_crop", {"padding": True}, "must be an integer"),
        ("center_crop", {"size": 0}, "size = 0 is not positive"),
        ("flip", {"probability": 1.5}, "1.5 is outside"),
        ("flip", {"probability": float("nan")}, "nan is outside"),
        ("flip", {"probability": "half"}, '"half", but must be a number'),
        ("random_resized_crop", {"size": 0}, "size = 0"),
        ("random_resized_crop", {"size": 8, "scale": [0, 1]}, r"scale = \[0.0, 1.0\] must be"),
        ("random_resized_crop", {"size": 8, "scale": 0.5}, "0.5, but must be a list"),
        ("random_resized_crop", {"size": 8, "scale": [0.5, "1"]}, "must be a number"),
        ("random_resized_crop", {"size": 8, "ratio": [2, 1]}, r"ratio = \[2.0, 1.0\]"),
    ],
)
def test_wrong_options_are_refused_with_one_sentence(name, options, message):
    with pytest.raises(ConfigError, match=message):
        AUGMENTATIONS.create(name, options)


@pytest.mark.parametrize(
    ("mean", "std"), [(np.nan, 0.2), (np.inf, 0.2), (0.3, np.nan), (0.3, np.inf), (0.3, -0.2), (0.3, 1e-320), (1e300, 0.2)]
)
def test_a_normalisation_that_is_not_finite_is_refused(mean, std):
    with pytest.raises(DataError, match=r"the normalisation channel 1 has mean .*must be finite"):
        Pipeline([], 0, np.array([0.3, mean]), np.array([0.2, std]))
