"""The facts that a run remembers of the data that it is trained on: enough to know it again, and to evaluate without it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hpctrain.data.format import ImageFile


@dataclass(frozen=True)
class DataFacts:
    """A training file, as plain data.

    Args:
        samples: images in it. shape: (H, W, C) of each. images, labels: sha256, as the file has it.
        class_names: what outputs 0, 1, ... of the model mean.
        mean, std: (C,), in units of 0..1: what images are normalised with.
        fit: how pictures were brought to the shape ("crop", "squash"); None: the file does not say.
    """

    samples: int
    shape: tuple[int, ...]
    images: str
    labels: str
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: str | None = None

    @classmethod
    def of(cls, file: ImageFile) -> DataFacts:
        """Those of an open file; reads no image."""
        return cls(
            samples=len(file),
            shape=file.shape,
            images=file.manifest["images"],
            labels=hashlib.sha256(file.labels.astype("<i8").tobytes()).hexdigest(),
            class_names=file.class_names,
            mean=_numbers(file.mean),
            std=_numbers(file.std),
            fit=file.fit,
        )

    @classmethod
    def from_meta(cls, values: Mapping[str, Any]) -> DataFacts:
        """From what JSON has made of `to_meta`."""
        plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        return cls(**plain)

    def to_meta(self) -> dict[str, Any]:
        """As JSON can hold it, to the last bit."""
        values = asdict(self)
        if self.fit is None:
            del values["fit"]  # which earlier versions of hpctrain do not know
        return values


@dataclass(frozen=True)
class ImageForm:
    """The form that pictures of any size are brought to, before they are augmented and normalised.

    Args:
        shape: (H, W, C). fit: "crop" or "squash", see `decoder.decode`.
    """

    shape: tuple[int, int, int]
    fit: str = "crop"

    @classmethod
    def of(cls, file: ImageFile | DataFacts) -> ImageForm:
        """The form of a data file's images; where it does not say how it was made, as the converters do by default."""
        height, width, channels = file.shape
        return cls((height, width, channels), file.fit or "crop")

    @classmethod
    def from_meta(cls, values: Mapping[str, Any]) -> ImageForm:
        """From what JSON has made of `to_meta`."""
        height, width, channels = values["shape"]
        return cls((height, width, channels), values["fit"])

    def to_meta(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def _numbers(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
