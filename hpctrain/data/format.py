"""The data format: the contents of a data file as they are stored, and the rules that they keep.

A data file is an HDF5 file with all images of a split in one contiguous block, as pixels or as picture files.

| object        | shape          | type    | what it holds |
|---------------|----------------|---------|---------------|
| `images`      | (N, H, W, C)   | uint8   | version 2: pixels, contiguous, unfiltered: readable by offset |
| `blob`        | (bytes,)       | uint8   | version 3: JPEG and PNG files in a row, in place of `images` |
| `offsets`     | (N + 1,)       | int64   | version 3: of each file in `blob`, and of its end |
| `labels`      | (N,)           | int64   | 0 .. classes - 1 |
| `class_names` | (classes,)     | UTF-8   | of fixed length, padded with zero bytes |
| `mean`, `std` | (C,)           | float64 | per channel over the pixels of the whole file, in units of 0..1 |
| `sums`        | (N,)           | uint32  | crc32 of each sample's stored bytes; early files of version 2 have none |
| `pixel_sums`  | (N,)           | uint32  | version 3: crc32 of the pixels that each picture file decodes to |

Attributes of the root: `format`, `version`; of each dataset: `sha256` of its bytes; of `images` or `blob`: `fit`, "crop" or
"squash", where pictures were brought to one size; of `blob`: `form`, the (H, W, C) that they are brought to, and `max_pixels`
of the largest picture, if that is not the decoder's own limit. Everything but the images is compared with its checksum
whenever the file is opened.

HDF5's own structures have checksums from its 1.10 format on, except the heap of variable-length values, where a damaged byte
can make HDF5 loop without end; hence texts of fixed length.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from hpctrain.core.errors import DataError

FORMAT = "hpctrain-images"
VERSION = 2
#: of files that hold picture files in place of pixels
ENCODED_VERSION = 3
_LARGEST = 1e37  # of a normalised pixel; float32 ends at 3.4e38
#: attribute of the images: how pictures were brought to their size
FIT = "fit"
#: attribute of the picture files: (H, W, C) that each is brought to
FORM = "form"
#: attribute of the picture files: pixels of the largest picture that is decoded, if other than the decoder's own limit
MAX_PIXELS = "max_pixels"
#: the datasets of a file of pixels that have a checksum: all but "sums", which early files of version 2 do not have
DATASETS = ("images", "labels", "class_names", "mean", "std")
_ENCODED_DATASETS = ("blob", "offsets", "sums", "pixel_sums", "labels", "class_names", "mean", "std")
_SUMS = "sums"


@dataclass(frozen=True)
class StoredImages:
    """Place of the images in a file.

    Attributes:
        shape, dtype: as the file says. offset: of the first byte in the file; None if they do not lie in one block.
        stored_bytes: that the file keeps for them.
        offsets: (N + 1,) of each picture file in the block, and of the block's end; None: the block holds pixels.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int | None
    stored_bytes: int
    offsets: np.ndarray | None = None

    @property
    def needed_bytes(self) -> int:
        """Bytes of all samples."""
        return int(np.prod(self.shape, dtype=object)) if self.offsets is None else int(self.offsets[-1])


@dataclass(frozen=True)
class Stored:
    """All of a data file but its pixels.

    Attributes:
        labels, mean, std: arrays of whatever shape and dtype the file says. class_names: decoded.
        digests: sha256 of each dataset, in hexadecimal; of a file of picture files also "images", which stands for what the
            pictures decode to.
        fit: how pictures were brought to the images' size ("crop", "squash"); None: they have their own, or it is unknown.
        sums: (N,) crc32 of each sample's stored bytes; None: the file has none. pixel_sums: (N,) of what pictures decode to.
        max_pixels: size limit of a picture that is decoded; None: the decoder's own limit.
    """

    images: StoredImages
    labels: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    class_names: tuple[str, ...]
    digests: Mapping[str, str]
    fit: str | None = None
    sums: np.ndarray | None = None
    pixel_sums: np.ndarray | None = None
    max_pixels: int | None = None


def text(value: object) -> str:
    """Return a text attribute: ours have a fixed length (bytes); those of other programs may not (str)."""
    return value.decode() if isinstance(value, bytes) else str(value)


def read_stored(file: h5py.File) -> Stored:
    """Return all contents of an open HDF5 file but its pixels.

    Raises:
        Exception: whatever h5py raises where the file is damaged.
    """
    encoded = "blob" in file
    block = file["blob" if encoded else "images"]
    names = _values(file, "class_names").tolist()
    labels, mean, std = (_values(file, name) for name in ("labels", "mean", "std"))
    offsets, pixel_sums = (_values(file, name) if encoded else None for name in ("offsets", "pixel_sums"))
    fit = text(block.attrs[FIT]) if FIT in block.attrs else None
    shape = block.shape
    if offsets is not None:
        shape = (max(0, len(offsets) - 1), *(int(size) for size in block.attrs[FORM]))
    datasets = _ENCODED_DATASETS if encoded else DATASETS + ((_SUMS,) if _SUMS in file else ())
    digests = {name: text(file[name].attrs["sha256"]) for name in datasets}
    if encoded:
        digests["images"] = hashlib.sha256(f"{digests['blob']} {shape} {fit}".encode()).hexdigest()
    return Stored(
        StoredImages(shape, block.dtype, block.id.get_offset(), block.id.get_storage_size(), offsets),
        labels,
        mean,
        std,
        tuple(name.decode() for name in names),
        digests,
        fit,
        _values(file, _SUMS) if _SUMS in file else None,
        pixel_sums,
        int(block.attrs[MAX_PIXELS]) if MAX_PIXELS in block.attrs else None,
    )


def _values(file: h5py.File, name: str) -> np.ndarray:
    """Return the values of a dataset.

    A dataset may claim more values than were ever written, and would fill memory when it is read.

    Raises:
        ValueError: the file holds fewer bytes than the dataset claims.
    """
    dataset = file[name]
    if dataset.nbytes > dataset.id.get_storage_size():
        raise ValueError(f"{name} has {dataset.nbytes} bytes, but the file holds {dataset.id.get_storage_size()}")
    return np.asarray(dataset[()])


def check(path: Path, contents: Stored) -> None:
    """Make sure that all of it fits together, and that everything but the images has its checksum.

    Raises:
        DataError: names what is wrong.
    """
    check_structure(path, contents)
    check_names(path, contents.class_names)
    check_labels(path, contents.labels, len(contents.class_names))
    check_statistics(str(path), contents.mean, contents.std)
    wrong = changed_datasets(contents)
    if wrong:
        raise changed(path, wrong)
    check_place(path, contents.images)


def check_structure(path: Path, contents: Stored) -> None:
    """Make sure that there are as many of everything as there are samples.

    Raises:
        DataError: names what is wrong.
    """
    images, labels = contents.images, contents.labels
    if labels.ndim != 1 or labels.dtype.kind != "i" or contents.mean.ndim != 1 or contents.mean.dtype.kind != "f":
        raise DataError(f"{path} does not hold labels (N,) int64 and means (C,) float64; convert it again.")
    if len(images.shape) != 4 or min(images.shape[1:]) < 1 or images.dtype != np.uint8 or images.offset is None:
        raise DataError(f"{path} does not hold contiguous uint8 images (N, H, W, C); convert it again.")
    if not labels.size:
        raise DataError(f"The data file {path} holds no image; at least one is needed.")
    if images.shape[0] != len(labels) or images.shape[3] != len(contents.mean):
        raise DataError(
            f"{path} holds images of {images.shape}, but {len(labels)} labels and means of {len(contents.mean)} channels."
        )
    for sums in (contents.sums, contents.pixel_sums):
        if sums is not None and (sums.shape != labels.shape or sums.dtype.kind != "u"):
            raise DataError(f"{path} does not hold one checksum for each of {len(labels)} images; convert it again.")
    offsets = images.offsets
    if offsets is not None and (
        offsets.ndim != 1 or offsets.dtype.kind != "i" or offsets[0] != 0 or (np.diff(offsets) < 1).any()
    ):
        raise DataError(f"{path} does not hold offsets (N + 1,) int64 that rise from 0; convert it again.")


def check_statistics(origin: str, mean: np.ndarray, std: np.ndarray) -> None:
    """Make sure that uint8 images normalised with mean and std (C,) are finite numbers, in float32 too.

    Raises:
        DataError: names the channel whose mean or deviation is not finite, or whose deviation is negative or too small.
    """
    if mean.shape != std.shape or mean.ndim != 1 or not len(mean):
        raise DataError(f"{origin} has means of {mean.shape} and deviations of {std.shape}; both must be (C,), one per channel.")
    for channel, (average, spread) in enumerate(zip(mean.tolist(), std.tolist(), strict=True)):
        most = _LARGEST if spread == 0 else _LARGEST * spread
        if not (0 <= spread <= _LARGEST and abs(average) + 1 <= most):  # false for NaN too
            raise DataError(
                f"In {origin} channel {channel} has mean {average} and deviation {spread}; both must be finite, and the "
                "deviation above 0, or 0 where the channel is only to be centred."
            )


def normal_name(name: str) -> str:
    """Return a class name in Unicode's composed form (NFC), for comparisons: macOS decomposes the names of files."""
    return unicodedata.normalize("NFC", name)


def check_names(path: Path, names: Sequence[str]) -> None:
    """Make sure that class names can be stored.

    Raises:
        DataError: no name, or one that is not valid Unicode or has a zero byte.
    """
    if not names:
        raise DataError(f"{path} has no class; name at least one.")
    for name in names:
        if "\0" in name or name.encode(errors="replace").decode() != name:
            raise DataError(f"{path} has the class name {name!r}; names are valid Unicode without zero bytes.")


def check_labels(path: Path, labels: np.ndarray, classes: int, first: int = 0) -> None:
    """Refuse labels outside 0 .. classes - 1.

    Args:
        first: number of the sample that `labels` begins with, for the message.

    Raises:
        DataError: the first label that is outside, and how many are.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        raise DataError(
            f"In {path} sample {first + int(wrong[0])} has label {int(labels[wrong[0]])}, which is outside 0..{classes - 1} "
            f"({classes} classes, {wrong.size} such labels)."
        )


def changed(path: Path, names: Sequence[str]) -> DataError:
    """Return the error for datasets that do not match their checksum."""
    return DataError(f"In {path} {', '.join(names)} changed since the file was written; make it again.")


def digest_of(values: np.ndarray) -> str:
    """Return the sha256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data).hexdigest()


def sum_of(values: np.ndarray) -> int:
    """Return the crc32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def names_digest(names: Sequence[str]) -> str:
    """Return the sha256 of class names."""
    return hashlib.sha256(json.dumps(list(names), ensure_ascii=False).encode()).hexdigest()


def changed_datasets(contents: Stored) -> list[str]:
    """Return the names of the datasets, other than the images, that do not match their checksum."""
    actual = {
        "labels": digest_of(contents.labels.astype("<i8", copy=False)),
        "mean": digest_of(contents.mean.astype("<f8", copy=False)),
        "std": digest_of(contents.std.astype("<f8", copy=False)),
        "class_names": names_digest(contents.class_names),
    }
    for name, values in ((_SUMS, contents.sums), ("pixel_sums", contents.pixel_sums)):
        if values is not None:
            actual[name] = digest_of(values.astype("<u4", copy=False))
    if contents.images.offsets is not None:
        actual["offsets"] = digest_of(contents.images.offsets.astype("<i8", copy=False))
    return [name for name, digest in actual.items() if contents.digests[name] != digest]


def check_place(path: Path, images: StoredImages) -> None:
    """Make sure that the images lie within the file.

    Raises:
        DataError: the file has fewer bytes than they need.
    """
    needed = images.needed_bytes
    if images.stored_bytes != needed or images.offset is None:
        raise DataError(
            f"The data file {path} is damaged: images of {images.shape} need {needed} bytes, it has {images.stored_bytes}."
        )
    if images.offset + needed > path.stat().st_size:
        raise DataError(f"The data file {path} is truncated: {images.offset + needed} bytes are needed, it has fewer.")
