"""Augmentations against torchvision's: the same magnitudes, pixels and rectangles for the same draws."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (make parity installs it)")

import torch
from PIL import Image

from hpctrain.data.augmentations import AUGMENTATIONS, randaugment, trivial_augment_wide
from hpctrain.data.augmentations.autoaugment import AutoAugment
from hpctrain.data.augmentations.color_jitter import ColorJitter
from hpctrain.data.augmentations.random_erasing import RandomErasing
from hpctrain.data.picture_operations import NAMES, SIGNED, changed

pytestmark = pytest.mark.torch

#: torchvision's names, in our order
THEIRS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"),
    *("Brightness", "Color", "Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
)
SIZES = [(32, 32), (27, 45), (224, 224)]
RANGES = {"rand": randaugment.RANGES, "trivial": trivial_augment_wide._RANGES}


@pytest.fixture(scope="module")
def theirs() -> Any:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed (make parity-install installs it)")
    from hpctrain_testing import torchvision_models

    return torchvision_models.transforms


def _pictures(size: tuple[int, int]) -> list[np.ndarray]:
    random = np.random.default_rng(size[0])
    noise = random.integers(0, 256, (*size, 3), np.uint8)
    rows, columns = np.mgrid[: size[0], : size[1]]
    smooth = np.stack([(rows + k * columns) * 200 // (size[0] + k * size[1]) for k in (1, 2, 3)], axis=2).astype(np.uint8)
    return [noise, smooth, smooth[:, :, :1], np.full((*size, 3), 77, np.uint8)]


def _space(theirs: Any, kind: str, bins: int, size: tuple[int, int]) -> dict[str, tuple[torch.Tensor, bool]]:
    augment = theirs.autoaugment.RandAugment() if kind == "rand" else theirs.autoaugment.TrivialAugmentWide()
    space = augment._augmentation_space(bins, size) if kind == "rand" else augment._augmentation_space(bins)
    assert isinstance(space, dict)
    return space


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rand", "trivial"])
@pytest.mark.parametrize("bins", [31, 10, 5, 2])
def test_magnitudes_are_torchvisions(theirs: Any, kind: str, bins: int) -> None:
    for size in SIZES:
        space = _space(theirs, kind, bins, size)
        assert tuple(space) == THEIRS
        for ours, (magnitudes, signed) in zip(NAMES, space.values(), strict=True):
            assert (ours in SIGNED) == signed
            for position in range(bins):
                wanted = float(magnitudes[position]) if magnitudes.ndim else 0.0
                magnitude = RANGES[kind].magnitude(ours, position, bins, size)
                assert magnitude == pytest.approx(wanted, rel=3e-7, abs=1e-6), (ours, position)
                assert int(magnitude) == int(wanted) or not ours.startswith("translate"), position


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("size", SIZES[:2])
def test_pixels_are_torchvisions(theirs: Any, size: tuple[int, int], interpolation: str) -> None:
    mode = theirs.InterpolationMode(interpolation)
    for image in _pictures(size):
        picture = _picture(image)
        for ours, name in zip(NAMES, THEIRS, strict=True):
            for position in (0, 4, 9, 17, 30):
                for sign in (1, -1) if ours in SIGNED else (1,):
                    for ranges in RANGES.values():
                        magnitude = sign * ranges.magnitude(ours, position, 31, size)
                        wanted = np.asarray(theirs.autoaugment._apply_op(picture, name, magnitude, mode, None))
                        result = changed(image, [(ours, magnitude)], interpolation)
                        assert np.array_equal(result.reshape(wanted.shape), wanted), (name, magnitude)


class _Drawn:
    """In place of `torch` in torchvision's module: numbers of ours, in double precision."""

    def __init__(self, tries: np.ndarray, corner: np.ndarray) -> None:
        self._tries, self._corner = iter(tries.tolist()), iter(corner.tolist())
        self.log, self.exp = torch.log, torch.exp

    def randperm(self, count: int) -> torch.Tensor:
        return torch.as_tensor(np.argsort([next(self._corner) for _ in range(count)], kind="stable"))

    def tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def empty(self, count: int) -> SimpleNamespace:
        return SimpleNamespace(
            uniform_=lambda low, high: torch.as_tensor(low + (high - low) * next(self._tries), dtype=torch.float64)
        )

    def randint(self, low: int, high: int, size: tuple[int]) -> torch.Tensor:
        return torch.tensor(low + int(next(self._corner) * (high - low)))


@pytest.mark.parametrize("size", [*SIZES, (5, 90), (1, 1)])
def test_rectangles_are_torchvisions(theirs: Any, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    erasing = RandomErasing(probability=1.0)
    image = torch.zeros(3, *size)
    for u in np.random.default_rng(0).random((200, RandomErasing.draws)):
        monkeypatch.setattr(theirs.transforms, "torch", _Drawn(u[1:-2], u[-2:]))
        top, left, height, width, value = theirs.RandomErasing.get_params(image, erasing.scale, erasing.ratio, [0.0])
        monkeypatch.undo()
        wanted = None if value is image else ((top, top + height), (left, left + width))
        assert erasing.box(size, u) == wanted


def _ours(name: str, options: dict[str, Any], image: np.ndarray, u: np.ndarray) -> np.ndarray:
    out = np.empty((1, *image.shape), np.uint8)
    AUGMENTATIONS.create(name, options).apply(image[np.newaxis], u[np.newaxis], out)
    return out[0]


def _picture(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image if image.shape[2] == 3 else image[:, :, 0])


@pytest.mark.parametrize("policy", ["imagenet", "cifar10", "svhn"])
def test_autoaugment_is_torchvisions(theirs: Any, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the 75 pairs of the policies has a typing error."""
    augment = theirs.AutoAugment(theirs.AutoAugmentPolicy(policy))
    u = np.random.default_rng(1).random((400, AutoAugment.draws))
    u[:, 0] = np.arange(400) % 25 / 25 + 0.01
    for number, drawn in enumerate(u):
        image = _pictures(SIZES[number % 2])[number % 4]
        params = int(drawn[0] * 25), torch.as_tensor(drawn[1:3]), torch.as_tensor(drawn[3:] >= 0.5).int()
        monkeypatch.setattr(augment, "get_params", lambda count, params=params: params)
        wanted = np.asarray(augment(_picture(image)))
        assert np.array_equal(_ours("autoaugment", {"policy": policy}, image, drawn).reshape(wanted.shape), wanted), drawn


JITTERS = [(0.4, 0.4, 0.4, 0.1), (0.0, 1.7, 0.0, 0.5), (0.8, 0.0, 3.0, 0.0), (0.0, 0.0, 0.0, 0.5)]


@pytest.mark.parametrize("amounts", JITTERS)
def test_colour_jitter_is_torchvisions(theirs: Any, amounts: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the operations, the range of each factor and the direction in which a hue turns are the same."""
    options = dict(zip(("brightness", "contrast", "saturation", "hue"), amounts, strict=True))
    jitter = theirs.ColorJitter(**options)
    for number, u in enumerate(np.random.default_rng(2).random((60, ColorJitter.draws))):
        image = _pictures(SIZES[number % 2])[number % 4]
        factors = u[4:][np.array(amounts) > 0]
        monkeypatch.setattr(theirs.transforms, "torch", _Drawn(factors, u[:4]))
        params = theirs.ColorJitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
        monkeypatch.undo()
        monkeypatch.setattr(jitter, "get_params", lambda *ranges, params=params: params)
        wanted = np.asarray(jitter(_picture(image)))
        assert np.array_equal(_ours("color_jitter", options, image, u).reshape(wanted.shape), wanted), u


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_rotations_and_mirror_images_are_torchvisions(theirs: Any, interpolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Direction and centre of a rotation and the axis of a mirror image are the same."""
    rotation = theirs.RandomRotation(30, theirs.InterpolationMode(interpolation))
    for number, u in enumerate(np.random.default_rng(3).random((40, 1))):
        image = _pictures(SIZES[number % 2])[number % 4]
        monkeypatch.setattr(rotation, "get_params", lambda degrees, u=u: degrees[0] + (degrees[1] - degrees[0]) * float(u[0]))
        wanted = np.asarray(rotation(_picture(image)))
        options = {"degrees": 30.0, "interpolation": interpolation}
        assert np.array_equal(_ours("rotation", options, image, u).reshape(wanted.shape), wanted), u
        flipped = np.asarray(theirs.functional.vflip(_picture(image)))
        assert np.array_equal(_ours("vertical_flip", {"probability": 1.0}, image, u).reshape(flipped.shape), flipped)
