"""The facts that a run stores about its training data, enough to recognise it and to evaluate without it.

Also the facts by which the ranks of a job check that they read the same data.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hpctrain.data.readers import BlockReader
from hpctrain.data.image_file import ImageFile
from hpctrain.data.format import digest_of

#: limits on the samples whose stored bytes are compared, in number and in bytes; at least two samples are
_MOST_SAMPLES, _MOST_BYTES = 16, 1 << 20


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


def compared_facts(file: ImageFile) -> dict[str, Any]:
    """Return the facts by which ranks check that they have opened the same data, in the order of comparison.

    They describe the samples, not the file format: if a file of pixels and one of picture files hold the same samples, the facts
    that both have are equal. A fact that a format lacks is left out. Labels and the checksums of all samples are those that the
    file declares. The stored bytes of at most 16 evenly spaced samples are read.

    Returns:
        "samples", "shape", "classes", "labels" (sha256), "mean", "deviation", "image N" (crc32 of the pixels of sample N),
        "sums" (sha256 of these of all samples) and "images" (sha256 of all pixels).
    """
    reader, manifest = file.pixels, file.manifest
    facts: dict[str, Any] = {
        "samples": len(file),
        "shape": file.shape,
        "classes": tuple(unicodedata.normalize("NFC", name) for name in file.class_names),
        "labels": manifest.get("labels") or digest_of(file.labels.astype("<i8", copy=False)),
        "mean": _numbers(file.mean),
        "deviation": _numbers(file.std),
    }
    if isinstance(reader, BlockReader):
        mean_bytes = max(1, reader.extents.size_bytes // len(file))
        count = min(len(file), _MOST_SAMPLES, max(2, _MOST_BYTES // mean_bytes))
        samples = np.unique(np.linspace(0, len(file) - 1, count).astype(np.int64))
        facts |= {f"image {sample}": value for sample, value in reader.read_sums(samples).items()}
        sums = reader.pixel_sums(file.sums)
        if sums is not None:
            facts["sums"] = digest_of(sums.astype("<u4", copy=False))
    if "images" in manifest and "blob" not in manifest:
        facts["images"] = manifest["images"]
    return facts


def _numbers(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
