"""Operations on pictures: torchvision's magnitudes, pixels that stay what they are, and grey images."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from hpctrain.data.augmentations.randaugment import RandAugment
from hpctrain.data.augmentations.trivial_augment_wide import TrivialAugmentWide
from hpctrain.data.picture_operations import NAMES, SIGNED, OperationRanges, changed, check_channels
from hpctrain.errors import ShapeError

RANGES = OperationRanges(shear=0.3, rotation=30.0, enhancement=0.9, posterized_bits=4, translation=None)


def image_of(channels: int, height: int = 29, width: int = 31) -> np.ndarray:
    """Smooth in part, so that no operation is lost in noise."""
    rows, columns = np.mgrid[:height, :width]
    planes = [(7 * rows + 3 * columns * (channel + 1) + (rows * columns) % 31) % 256 for channel in range(channels)]
    return np.stack(planes, axis=2).astype(np.uint8)


def test_pixels_of_all_operations_are_what_they_were() -> None:
    """By a hash, without PyTorch: a library of pictures that gives others would change trainings without a word."""
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


def test_moves_are_by_whole_pixels_with_black_behind_them() -> None:
    image = image_of(3)
    moved = changed(image, [("translate_x", 4.9)], "nearest")
    assert np.array_equal(moved[:, 4:], image[:, :-4])
    assert not moved[:, :4].any()
    moved = changed(image, [("translate_y", -3.0)], "nearest")
    assert np.array_equal(moved[:-3], image[3:])
    assert not moved[-3:].any()


def test_operations_come_one_after_another() -> None:
    image = image_of(3)
    both = changed(image, [("posterize", 3.0), ("rotate", 20.0)], "bilinear")
    assert np.array_equal(both, changed(changed(image, [("posterize", 3.0)], "bilinear"), [("rotate", 20.0)], "bilinear"))


@pytest.mark.parametrize("channels", [2, 4])
def test_other_channels_are_refused(channels: int) -> None:
    for augmentation in (RandAugment(), TrivialAugmentWide()):
        with pytest.raises(ShapeError, match=f"of 1 or 3 channels, and not of {channels}"):
            augmentation.output_shape(9, 9, channels)
    check_channels("randaugment", 3)


def test_all_operations_and_both_signs_are_drawn_alike() -> None:
    u = np.random.default_rng(0).random((4000, TrivialAugmentWide.draws))
    trivial = TrivialAugmentWide()
    counts = dict.fromkeys(NAMES, 0)
    magnitudes = []
    for one in u:
        name, magnitude = trivial.choice((32, 32), one)
        counts[name] += 1
        if name == "rotate":
            magnitudes.append(magnitude)
    assert all(abs(count - 4000 / 14) < 5 * np.sqrt(4000 / 14) for count in counts.values())
    assert len(set(magnitudes)) > 40  # of 31 positions with two signs
    assert min(magnitudes) == -135.0
    assert max(magnitudes) == 135.0
    drawn = RandAugment(operations=3).choices((32, 32), np.random.default_rng(1).random(RandAugment.draws))
    assert len(drawn) == 3
