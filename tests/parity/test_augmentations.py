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

from hpctrain.data.augmentations import randaugment, trivial_augment_wide
from hpctrain.data.augmentations.random_erasing import RandomErasing
from hpctrain.data.picture_operations import NAMES, SIGNED, changed

pytestmark = pytest.mark.torch

#: torchvision's names, in our order
THEIRS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"),
    *("Brightness", "Color", "Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
)
SIZES = [(32, 32), (27, 45), (224, 224)]
RANGES = {"rand": randaugment._RANGES, "trivial": trivial_augment_wide._RANGES}


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
        picture = Image.fromarray(image if image.shape[2] == 3 else image[:, :, 0])
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

    def tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def empty(self, count: int) -> SimpleNamespace:
        return SimpleNamespace(uniform_=lambda low, high: torch.as_tensor(low + (high - low) * next(self._tries)))

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
