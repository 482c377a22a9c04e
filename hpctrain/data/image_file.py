"""The data format, and open data files: images, labels and class names, from a file or synthetic.

A data file is an HDF5 file with all images of a split in one contiguous block, as pixels or as picture files.

| object        | shape          | type    | what it holds |
|---------------|----------------|---------|---------------|
| `images`      | (N, H, W, C)   | uint8   | pixels, contiguous, unfiltered: readable by offset |
| `blob`        | (bytes,)       | uint8   | instead of `images`: JPEG and PNG files, one after the other |
| `offsets`     | (N + 1,)       | int64   | with `blob`: offset of each file in `blob`, and of the end of the last one |
| `labels`      | (N,)           | int64   | 0 .. classes - 1 |
| `class_names` | (classes,)     | UTF-8   | fixed length, padded with zero bytes |
| `mean`, `std` | (C,)           | float64 | per channel over the pixels of the whole file, in units of 0..1 |
| `sums`        | (N,)           | uint32  | crc32 of each sample's stored bytes |
| `pixel_sums`  | (N,)           | uint32  | with `blob`: crc32 of the decoded pixels of each picture file |

The root has the attributes `format` and `version`; each dataset has `sha256`, the checksum of its bytes. The attribute `fit`
("crop" or "squash") of `images` or `blob` is present if pictures were resized to one size. `blob` also has `form`, the (H, W, C)
of the decoded pictures, and `max_pixels`, the size limit of a picture, if it is not the decoder's own limit. The attribute
`range` of `images` or `blob` is present if values of more than 8 bits were scaled: (low, high), which became 0 and 255. Whenever
a file is opened, everything but the images is compared with its checksum.

HDF5's own structures have checksums from its 1.10 format on, except the heap of variable-length values. A damaged byte in this
heap can make HDF5 loop without end, so texts have a fixed length.

HDF5 opens the file without locks and returns the offset of the images. They are then mapped into memory, so reading a sample is a
copy from the page cache. This module also maps classes of several files to one order by name (`with_class_order`), computes the
facts by which a run identifies its training data (`DataFacts`), compares how labels and pixels of two files were made
(`described`, `differences`), and generates synthetic images, which depend on split, sample number and shape only.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.backend.counter_random import key, words
from hpctrain.core import user_code
from hpctrain.core.errors import DataError
from hpctrain.core.files import open_regular
from hpctrain.data.files import require_file, system_errors_as
from hpctrain.data.readers import BlockReader, Extents, MappedReader, ReadImages, UnreadableError, ValueRange
from hpctrain.storage.hdf5_store import require_stored, system_reason

FORMAT = "hpctrain-images"
VERSION = 1
_LARGEST = 1e37  # maximum magnitude of a normalised pixel; that of float32 is 3.4e38
#: attribute of the images: method by which pictures were resized to one size
FIT = "fit"
#: attribute of the picture files: (H, W, C) of the decoded pictures
FORM = "form"
#: attribute of the picture files: maximum number of pixels of a picture, if other than the decoder's own limit
MAX_PIXELS = "max_pixels"
#: attribute of the images: (low, high) of the deeper values that became 0 and 255
RANGE = "range"
#: datasets with a checksum in a file of pixels, and in a file of picture files
DATASETS = ("images", "sums", "labels", "class_names", "mean", "std")
_ENCODED_DATASETS = ("blob", "offsets", "pixel_sums", *DATASETS[1:])


@dataclass(frozen=True)
class StoredImages:
    """Place of the images in a file.

    Attributes:
        shape: (N, H, W, C), as stored in the file.
        dtype: dtype, as stored in the file.
        offset: offset of the images in the file; None if they are not in one block.
        stored_bytes: size of the block in the file.
        offsets: (N + 1,) offsets of the picture files in the block, and the end of the block; None: the block holds pixels.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int | None
    stored_bytes: int
    offsets: np.ndarray | None = None

    @property
    def needed_bytes(self) -> int:
        """Size of all samples, in bytes."""
        return int(np.prod(self.shape, dtype=object)) if self.offsets is None else int(self.offsets[-1])


@dataclass(frozen=True)
class Stored:
    """Contents of a data file other than the pixels.

    Attributes:
        labels, mean, std: in the shape and dtype of the file.
        digests: sha256 of each dataset, in hexadecimal. For picture files, "images" identifies the decoded pictures.
        fit: method by which pictures were resized to one size ("crop", "squash"); None: not resized, or unknown.
        sums: (N,) crc32 of each sample's stored bytes.
        pixel_sums: (N,) crc32 of the decoded pixels; None for a file of pixels.
        max_pixels: maximum number of pixels of a picture; None: the decoder's own limit.
        value_range: (low, high), the values that became 0 and 255; None: the usual ones of the source's type, such as 0 and 255.
    """

    images: StoredImages
    labels: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    class_names: tuple[str, ...]
    digests: Mapping[str, str]
    sums: np.ndarray
    fit: str | None = None
    pixel_sums: np.ndarray | None = None
    max_pixels: int | None = None
    value_range: ValueRange | None = None


def text(value: object) -> str:
    """Return a text attribute as str. In files of hpctrain it has a fixed length (bytes); in other files it may be str."""
    return value.decode() if isinstance(value, bytes) else str(value)


def read_stored(file: h5py.File) -> Stored:
    """Return the contents of an open HDF5 file other than the pixels.

    Raises:
        Exception: any exception of h5py, if the file is damaged.
    """
    encoded = file.get("blob", getlink=True) is not None  # `in` would follow a link
    datasets = _ENCODED_DATASETS if encoded else DATASETS
    for name in datasets:
        require_stored(file, name)
    block = file["blob" if encoded else "images"]
    names = _values(file, "class_names").tolist()
    labels, mean, std = (_values(file, name) for name in ("labels", "mean", "std"))
    offsets, pixel_sums = (_values(file, name) if encoded else None for name in ("offsets", "pixel_sums"))
    fit = text(block.attrs[FIT]) if FIT in block.attrs else None
    low_high = block.attrs[RANGE].tolist() if RANGE in block.attrs else None
    value_range = None if low_high is None else (float(low_high[0]), float(low_high[1]))
    shape = block.shape
    if offsets is not None:
        shape = (max(0, len(offsets) - 1), *(int(size) for size in block.attrs[FORM]))
    digests = {name: text(file[name].attrs["sha256"]) for name in datasets}
    if encoded:
        how = fit if value_range is None else f"{fit} {value_range}"
        digests["images"] = hashlib.sha256(f"{digests['blob']} {shape} {how}".encode()).hexdigest()
    return Stored(
        StoredImages(shape, block.dtype, block.id.get_offset(), block.id.get_storage_size(), offsets),
        labels,
        mean,
        std,
        tuple(name.decode() for name in names),
        digests,
        _values(file, "sums"),
        fit,
        pixel_sums,
        int(block.attrs[MAX_PIXELS]) if MAX_PIXELS in block.attrs else None,
        value_range,
    )


def _values(file: h5py.File, name: str) -> np.ndarray:
    """Return the values of a dataset.

    Raises:
        ValueError: the file holds fewer bytes than the dataset claims, which would allocate too much memory.
    """
    dataset = file[name]
    if dataset.nbytes > dataset.id.get_storage_size():
        raise ValueError(f"{name} has {dataset.nbytes} bytes, but the file holds {dataset.id.get_storage_size()}")
    return np.asarray(dataset[()])


def check(path: Path, contents: Stored) -> None:
    """Raise an error unless the contents are consistent, and all but the images match their checksums.

    Raises:
        DataError: the message names the fault.
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
    """Raise an error unless shapes and dtypes are valid, and the numbers of samples and channels agree.

    Raises:
        DataError: the message names the fault.
    """
    images, labels, mean, offsets = contents.images, contents.labels, contents.mean, contents.images.offsets
    if not labels.size:
        raise DataError(f"The data file {path} holds no images; at least one is needed.")
    fits = (
        (labels.ndim, labels.dtype.kind, mean.ndim, mean.dtype.kind) == (1, "i", 1, "f")
        and len(images.shape) == 4
        and images.dtype == np.uint8
        and min(images.shape[1:]) >= 1
        and images.offset is not None
        and (images.shape[0], images.shape[3]) == (len(labels), len(mean))
    )
    for sums in (contents.sums, contents.pixel_sums):
        fits &= sums is None or (sums.shape == labels.shape and sums.dtype.kind == "u")
    if offsets is not None:
        fits &= (offsets.ndim, offsets.dtype.kind) == (1, "i") and offsets[0] == 0 and bool((np.diff(offsets) >= 1).all())
    if not fits:
        raise DataError(
            f"{path} holds images of {images.shape} {images.dtype}, labels of {labels.shape} {labels.dtype} and means of "
            f"{mean.shape} {mean.dtype}, but must hold contiguous images (N, H, W, C) uint8, with an integer label and a "
            "checksum for each image, and a floating-point mean for each channel; convert it again."
        )


def check_statistics(origin: str, mean: np.ndarray, std: np.ndarray) -> None:
    """Raise an error unless uint8 images normalised with mean and std (C,) are finite, also in float32.

    Raises:
        DataError: a mean or deviation is not finite, or a deviation is negative or too small. The message names the channel.
    """
    if mean.shape != std.shape or mean.ndim != 1 or not len(mean):
        raise DataError(f"{origin} has means of {mean.shape} and deviations of {std.shape}; both must be (C,), one per channel.")
    for channel, (average, spread) in enumerate(zip(mean.tolist(), std.tolist(), strict=True)):
        most = _LARGEST if spread == 0 else _LARGEST * spread
        if not (0 <= spread <= _LARGEST and abs(average) + 1 <= most):  # false for NaN too
            raise DataError(
                f"In {origin} channel {channel} has mean {average} and deviation {spread}; both must be finite, and the "
                "deviation positive, or 0 to only centre the channel."
            )


def normal_name(name: str) -> str:
    """Return a class name in Unicode's composed form (NFC), for comparisons. File names on macOS are decomposed."""
    return unicodedata.normalize("NFC", name)


def check_names(path: Path, names: Sequence[str]) -> None:
    """Raise an error unless class names can be stored.

    Raises:
        DataError: there is no name, or a name is not valid Unicode or has a zero byte.
    """
    if not names:
        raise DataError(f"{path} defines no classes; give at least one class name.")
    for name in names:
        if "\0" in name or name.encode(errors="replace").decode() != name:
            raise DataError(f"{path} has the class name {name!r}; names must be valid Unicode without zero bytes.")


def check_labels(path: Path, labels: np.ndarray, classes: int, first: int = 0) -> None:
    """Raise an error unless all labels are in 0 .. classes - 1.

    Args:
        first: number of the first sample in `labels`, for the message.

    Raises:
        DataError: labels are outside the range. The message contains the first of them and their number.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        raise DataError(
            f"In {path} sample {first + int(wrong[0])} has label {int(labels[wrong[0]])}, which is outside 0..{classes - 1} "
            f"({classes} classes, {wrong.size} such labels); correct the labels and convert again."
        )


def changed(path: Path, names: Sequence[str]) -> DataError:
    """Return the error for datasets `names` of a file that do not match their checksums."""
    return DataError(f"In {path} {', '.join(names)} changed since the file was written; convert it again.")


def digest_of(values: np.ndarray) -> str:
    """Return the sha256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data).hexdigest()


def names_digest(names: Sequence[str]) -> str:
    """Return the sha256 of class names."""
    return hashlib.sha256(json.dumps(list(names), ensure_ascii=False).encode()).hexdigest()


def changed_datasets(contents: Stored) -> list[str]:
    """Return the names of datasets, other than the images, that do not match their checksums."""
    actual = {
        "labels": digest_of(contents.labels.astype("<i8", copy=False)),
        "mean": digest_of(contents.mean.astype("<f8", copy=False)),
        "std": digest_of(contents.std.astype("<f8", copy=False)),
        "class_names": names_digest(contents.class_names),
    }
    for name, values in (("sums", contents.sums), ("pixel_sums", contents.pixel_sums)):
        if values is not None:
            actual[name] = digest_of(values.astype("<u4", copy=False))
    if contents.images.offsets is not None:
        actual["offsets"] = digest_of(contents.images.offsets.astype("<i8", copy=False))
    return [name for name, digest in actual.items() if contents.digests[name] != digest]


def check_place(path: Path, images: StoredImages) -> None:
    """Raise an error unless the images lie within the file.

    Raises:
        DataError: the file has fewer bytes than the images need.
    """
    needed = images.needed_bytes
    if images.stored_bytes != needed or images.offset is None:
        raise DataError(
            f"The data file {path} is damaged: images of {images.shape} need {needed} bytes, but it stores "
            f"{images.stored_bytes}; convert it again."
        )
    if images.offset + needed > path.stat().st_size:
        raise DataError(
            f"The data file {path} is truncated: it has {path.stat().st_size} bytes instead of {images.offset + needed} or more; "
            "copy or convert it again."
        )


_SIGNATURE = b"\x89HDF\r\n\x1a\n"


ImageArray = np.ndarray | ReadImages


class ImageFile:
    """A data file that is open for reading. Its read-only memory map and its descriptor are closed with the object.

    Attributes:
        images: (N, H, W, C) uint8: a read-only map, or an object that reads, decodes or generates images. If the disk fails,
            touching the map kills the process, so training reads `pixels`.
        pixels: reader of the same images, which raises an error if the disk fails.
        labels: (N,) int64, in memory.
        mean, std: (C,) float64, in units of 0..1.
        fit, value_range: see `Stored`; manifest: its `digests`.
        sums: (N,) uint32, crc32 of each sample's stored bytes; None if the images are generated or single picture files.
    """

    def __init__(
        self,
        path: Path,
        images: ImageArray,
        labels: np.ndarray,
        class_names: tuple[str, ...],
        moments: tuple[np.ndarray, np.ndarray],
        manifest: dict[str, str],
        pixels: ImageArray | None = None,
        fit: str | None = None,
        sums: np.ndarray | None = None,
        value_range: ValueRange | None = None,
    ) -> None:
        self.path = path
        self.images = images
        self.pixels = images if pixels is None else pixels
        self.labels = labels
        self.class_names = class_names
        self.mean, self.std = moments
        self.manifest = manifest
        self.fit = fit
        self.sums = sums
        self.value_range = value_range

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of each image."""
        height, width, channels = self.images.shape[1:]
        return height, width, channels

    @property
    def stored_bytes(self) -> int:
        """Size of all samples in the file, in bytes; 0 if they are not in one data file."""
        return self.pixels.extents.size_bytes if isinstance(self.pixels, BlockReader) else 0

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def stored_digest(self) -> str:
        """sha256 of the stored images: pixels or picture files."""
        return self.manifest["blob" if "blob" in self.manifest else "images"]

    def decode_by(self, threads: int) -> None:
        """Set the number of threads that decode pictures; unused if the file holds pixels."""
        if isinstance(self.pixels, BlockReader):
            self.pixels.threads = threads

    def take_labels(self, samples: np.ndarray, out: np.ndarray) -> None:
        """Write the labels of samples (n,) to `out` (n,). A replaced sample has the label of its replacement."""
        if isinstance(self.pixels, BlockReader) and (replaced := self.pixels.replaced):
            samples = np.array([replaced.get(sample, sample) for sample in samples.tolist()], np.int64)
        # "clip", because with "raise" NumPy gathers into a copy first. A sampler's samples are always in range.
        np.take(self.labels, samples, out=out, mode="clip")

    @classmethod
    def open(cls, path: str | Path) -> ImageFile:
        """Open a data file for reading, without file locks, which parallel file systems often lack.

        Raises:
            DataError: the file is missing, unreadable, truncated, empty, or not a data file; contents other than the images do
                not match their checksums; or a label is outside 0 .. classes - 1.
        """
        contents = read_contents(Path(path))
        check(Path(path), contents)
        return cls.of(Path(path), contents)

    @classmethod
    def of(cls, path: Path, contents: Stored) -> ImageFile:
        """Return the file with these contents, whose structure has been checked.

        Raises:
            DataError: the file cannot be mapped into memory.
        """
        moments = np.asarray(contents.mean, np.float64), np.asarray(contents.std, np.float64)
        labels = np.asarray(contents.labels, np.int64)
        images, reader = _map(path, contents)
        digests = dict(contents.digests)
        how = contents.fit, contents.sums, contents.value_range
        return cls(path, images, labels, contents.class_names, moments, digests, reader, *how)

    def verify(self) -> None:
        """Compare the samples' stored bytes with their sha256, reading the whole file.

        `open` has already compared the other contents.

        Raises:
            DataError: the samples changed since the file was written.
            UnreadableError: a sample cannot be read.
        """
        assert isinstance(self.pixels, BlockReader), "a file"
        digest = hashlib.sha256()
        for _, block, failed in self.pixels.blocks():
            for sample, why in failed.items():
                raise UnreadableError(self.pixels.sentence(sample, why))
            digest.update(block.data)
        name = "blob" if "blob" in self.manifest else "images"
        if digest.hexdigest() != self.stored_digest:
            raise changed(self.path, [name])


def read_contents(path: Path) -> Stored:
    """Read the contents of a data file other than the images, without checking them.

    Raises:
        DataError: the file is missing, unreadable, truncated, empty, or not a data file.
    """
    missing = "it" if path.is_absolute() else f"{path.absolute()} (the path is relative to the current directory)"
    advice = f"make {missing} with `hpctrain data convert`, or with `hpctrain data fetch` for Fashion-MNIST, MNIST and CIFAR-10"
    if not path.is_absolute() and (folder := user_code.folder_with(path)) is not None:
        advice = (
            f"the path is relative to the current directory and means {path.absolute()}, but the file exists at "
            f"{folder / path}, so start from {folder}"
        )
    require_file(path, "data file", advice)
    try:
        return _read(path)
    except DataError:
        raise
    except Exception as error:  # h5py raises almost anything for damaged files
        if (why := system_reason(error)) is not None:
            raise DataError(f"The data file {path} cannot be read: {why}.") from error
        raise _damaged(path, "truncated" if "truncated" in str(error) else "damaged, or not an HDF5 file") from error


def _read(path: Path) -> Stored:
    with open(open_regular(path), "rb") as file:
        start = file.read(len(_SIGNATURE) + 1)
    if not start.startswith(_SIGNATURE):
        raise _damaged(path)
    # Version of the superblock. Before 2, structures have no checksums, so a damaged byte may make HDF5 loop or crash.
    if start[-1:] < b"\2":
        raise DataError(
            f"{path} is an HDF5 file, but not a data file of hpctrain, because its structures have no checksums; make one with "
            "`hpctrain data convert hdf5`."
        )
    with h5py.File(path, "r", locking=False) as opened:
        if text(opened.attrs.get("format")) != FORMAT:
            raise DataError(
                f"{path} is an HDF5 file, but not a data file of hpctrain; make one with `hpctrain data convert hdf5`."
            )
        version = opened.attrs.get("version")
        if version != VERSION:
            raise DataError(
                f"The data file {path} has format version {version}, but this hpctrain reads version {VERSION}; convert it again."
            )
        return read_stored(opened)


def _damaged(path: Path, state: str = "damaged, or not an HDF5 file") -> DataError:
    return DataError(f"The data file {path} is {state}; create it again with `hpctrain data convert` or `hpctrain data fetch`.")


def _map(path: Path, contents: Stored) -> tuple[ImageArray, ReadImages]:
    """Return the mapped images, and the reader of the block that holds them."""
    images = contents.images
    assert images.offset is not None, "checked"
    with system_errors_as(f"The data file {path} cannot be mapped into memory"):
        if images.offsets is None:
            mapped = np.memmap(path, np.uint8, "r", images.offset, images.shape)
            return np.asarray(mapped), MappedReader(path, mapped, images.offset)
        from hpctrain.data.decoding import EncodedReader  # loads Pillow, which pixels do not need

        block = np.memmap(path, np.uint8, "r", images.offset, (images.needed_bytes,))
        assert contents.pixel_sums is not None, "checked"
        extents, sums = Extents.rising(images.offset, images.offsets), (contents.sums, contents.pixel_sums)
        form, fit = images.shape[1:], contents.fit or "crop"
        reader = EncodedReader(path, block, extents, sums, form, fit, 1, contents.max_pixels, contents.value_range)
        return reader, reader


def class_difference(names: Sequence[str], others: Sequence[str], *, ordered: bool = False) -> str | None:
    """Return the difference between two lists of class names, in words; None if they hold the same names in any order.

    If two classes have the same name, or if `ordered`, the order must be the same as well.
    """
    names, others = [*map(normal_name, names)], [*map(normal_name, others)]
    if len(names) != len(others):
        return f"there are {len(names)} and {len(others)} classes{_only(names, others)}"
    if names == others or (sorted(names) == sorted(others) and len(set(names)) == len(names) and not ordered):
        return None
    first = next(number for number, pair in enumerate(zip(names, others, strict=True)) if pair[0] != pair[1])
    return f"class {first} is {names[first]!r} and {others[first]!r}{_only(names, others)}"


def _only(names: Sequence[str], others: Sequence[str]) -> str:
    alone = [f"{name!r}" for one, other in ((names, others), (others, names)) for name in one if name not in other][:1]
    return f", {alone[0]} is in only one of them" if alone else ""


#: ranges that count as equal, because each is the whole range of its type: bytes, 16-bit integers, floating-point numbers
_WHOLE_RANGES = ((0.0, 255.0), (0.0, 65535.0), (0.0, 1.0))
_FEWEST_VALUES = 16  # width of the narrowest range that may be one of pictures
#: key of each fact about the making of pixels -> function that returns its text
_FACTS: Mapping[str, Callable[[Any], str]] = {
    "image_shape": lambda shape: "images of " + " x ".join(map(str, shape[:2])),
    "fit": lambda fit: f"--fit {fit}",
    "value_range": lambda low_high: "--range " + " ".join(f"{value:g}" for value in low_high),
    "mean": lambda values: "mean " + " ".join(f"{value:.4g}" for value in values),
    "std": lambda values: "deviation " + " ".join(f"{value:.4g}" for value in values),
}


def described(data: ImageFile | DataFacts) -> dict[str, Any]:
    """Return the facts about how labels and pixels of a file were made, by their keys in the metadata of exported weights.

    Unknown facts are absent, except that an unknown range of values, or a whole one, is (0, 255).
    """
    value_range = _WHOLE_RANGES[0] if data.value_range in (None, *_WHOLE_RANGES) else data.value_range
    facts = {"classes": data.class_names, "image_shape": data.shape, "fit": data.fit, "value_range": value_range}
    moments = {"mean": tuple(map(float, data.mean)), "std": tuple(map(float, data.std))}
    return {key: value for key, value in (facts | moments).items() if value is not None}


def differences(
    origin: object, facts: Mapping[str, Any], place: object, known: Mapping[str, Any], *, measured: bool = False
) -> tuple[str, ...]:
    """Return a warning that names all differences of two descriptions (see `described`); () if there are none.

    All comparisons of descriptions use this function. A fact that one of the two lacks is not compared.

    Args:
        origin, place: names of the data.
        measured: whether means and deviations only describe the pixels; large differences then indicate another range of values.
            False: images are normalised with them, and every difference is named.

    Raises:
        DataError: the classes, or their order, differ.
    """
    if "classes" in facts and "classes" in known:
        _require_classes(origin, facts["classes"], place, known["classes"], ordered=True)
    pairs = {key: (text(facts[key]), text(known[key])) for key, text in _FACTS.items() if key in facts and key in known}
    if measured:
        (mean, std), (other_mean, other_std) = (np.array([one["mean"], one["std"]]) for one in (facts, known))
        least, most = np.minimum(std, other_std), np.maximum(std, other_std)
        if (most <= 3 * least).all() and (np.abs(mean - other_mean) <= 2 * most).all():
            pairs = {key: pair for key, pair in pairs.items() if key not in ("mean", "std")}
    different = [f"{one} instead of {other}" for one, other in pairs.values() if one != other]
    return (f"warning: {origin} was made differently from {place}: {', '.join(different)}",) if different else ()


def _require_classes(
    origin: object, names: Sequence[str], place: object, others: Sequence[str], *, ordered: bool = False
) -> None:
    differs = class_difference(names, others, ordered=ordered)
    if differs is not None:
        raise DataError(
            f"{origin} has other classes than {place}: {differs}. Convert it again with the same class names, or use other data."
        )


def with_class_order(file: ImageFile, names: Sequence[str], origin: str) -> ImageFile:
    """Return the file with its classes in the order of `names`. Labels are mapped by name.

    Args:
        origin: origin of `names`, for messages.

    Raises:
        DataError: the file has other classes, or another number of them. The message names the first difference.
    """
    _require_classes(file.path, file.class_names, origin, names)
    names = tuple(names)
    if names == file.class_names:
        return file
    label_of = {normal_name(name): label for label, name in enumerate(names)}
    if len(label_of) < len(names):  # several classes have one name, so `class_difference` has required the same order
        mapped = np.arange(len(names))
    else:
        mapped = np.array([label_of[normal_name(name)] for name in file.class_names], np.int64)
    reordered = copy(file)
    reordered.labels, reordered.class_names = mapped[file.labels], names
    return reordered


@dataclass(frozen=True)
class DataFacts:
    """Facts about a training file, as plain data.

    Args:
        shape: (H, W, C) of each image.
        images, labels: sha256, as stored in the file.
        class_names: class of each output 0, 1, ... of the model.
        mean, std: (C,), for the normalisation, in units of 0..1.
        fit, value_range: see `Stored`.
        held_out: number of images that are held out for validation, and sha256 of their numbers; None: no image is held out.
    """

    samples: int
    shape: tuple[int, ...]
    images: str
    labels: str
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: str | None = None
    held_out: tuple[int, str] | None = None
    value_range: ValueRange | None = None

    @property
    def training_samples(self) -> int:
        """Number of images of an epoch: those that are not held out for validation."""
        return self.samples - (0 if self.held_out is None else self.held_out[0])

    @classmethod
    def of(cls, file: ImageFile, held_out: np.ndarray | None = None) -> DataFacts:
        """Return the facts of an open file, without reading images.

        Args:
            held_out: numbers of the images that are held out for validation; None: no image is held out.
        """
        return cls(
            samples=len(file),
            shape=file.shape,
            images=file.manifest["images"],
            labels=hashlib.sha256(file.labels.astype("<i8").tobytes()).hexdigest(),
            class_names=file.class_names,
            mean=tuple(file.mean.tolist()),
            std=tuple(file.std.tolist()),
            fit=file.fit,
            held_out=None if held_out is None else (len(held_out), digest_of(held_out.astype("<i8"))),
            value_range=file.value_range,
        )

    @classmethod
    def from_meta(cls, values: Mapping[str, Any]) -> DataFacts:
        """Return the facts from the JSON form of `to_meta`."""
        plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        return cls(**plain)

    def to_meta(self) -> dict[str, Any]:
        """Return the facts as JSON-compatible data, with exact numbers. Facts that are None are left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class ImageForm:
    """Form to which pictures of any size are converted before augmentation and normalisation.

    Args:
        shape: (H, W, C).
        fit, value_range: see `decoding.decode`.
    """

    shape: tuple[int, int, int]
    fit: str = "crop"
    value_range: ValueRange | None = None

    @classmethod
    def of(cls, file: ImageFile | DataFacts) -> ImageForm:
        """Return the form of a data file's images. If `fit` is missing, the converters' default is used.

        A narrow range, such as -1 to 1, is that of floating-point numbers in arrays; it does not suit pictures and is left out.
        """
        height, width, channels = file.shape
        low, high = file.value_range or (0.0, 0.0)
        return cls((height, width, channels), file.fit or "crop", file.value_range if high - low >= _FEWEST_VALUES else None)


_WINDOWS = 1 << 20  # number of places in the pool where an image may begin
_STRIPES = 8  # number of stripes of constant brightness, wider than the shifts of augmentations
_BLOCK_BYTES = 1 << 18  # size of the images that are generated at a time
_MEASURED = 64  # number of images from which mean and deviation are computed


class SyntheticImages(ReadImages):
    """Images generated when they are read; indexed like a uint8 array (N, H, W, C).

    Args:
        split: name of the split; each split has different images.
        labels: (N,) class of each image.
        shape: (H, W, C).
    """

    def __init__(self, split: str, labels: np.ndarray, shape: tuple[int, int, int], classes: int) -> None:
        self.shape: tuple[int, ...] = (len(labels), *shape)
        self._labels = labels
        self._begins = (words(key("synthetic windows", split), np.arange(len(labels)), range(1))[:, 0] % _WINDOWS).astype(
            np.int64
        )
        self._size = shape[0] * shape[1] * shape[2]
        pool = words(key("synthetic noise"), [0], range(-(-(_WINDOWS + self._size) // 4)))
        noise = np.right_shift(pool.reshape(-1).view(np.uint8), 1)
        self._windows = np.lib.stride_tricks.sliding_window_view(noise, self._size)
        stripe = np.arange(shape[0]) * _STRIPES // shape[0]
        brightness = words(key("synthetic stripes"), np.arange(classes), range(_STRIPES)) >> np.uint32(25)
        self._stripes = brightness.astype(np.uint8)[:, stripe]

    def take(self, samples: Sequence[int] | np.ndarray, out: np.ndarray) -> np.ndarray:
        numbers, block = np.asarray(samples), max(1, _BLOCK_BYTES // max(1, self._size))
        for low in range(0, len(numbers), block):
            some = numbers[low : low + block]
            pixels = self._windows[self._begins[some]].reshape(-1, *self.shape[1:])
            np.add(pixels, self._stripes[self._labels[some], :, None, None], out=out[low : low + block])
        return out


def synthetic_file(split: str, samples: int, shape: tuple[int, int, int], classes: int) -> ImageFile:
    """Return synthetic images in the form of an open data file, without reading a file.

    Args:
        samples: number of images; image n has class n modulo `classes`.
        shape: (H, W, C).
    """
    labels = np.arange(samples, dtype=np.int64) % classes
    names = tuple(f"class {number}" for number in range(classes))
    images = SyntheticImages(split, labels, shape, classes)
    some = images[:_MEASURED].reshape(-1, shape[2]) / 255
    description = f"synthetic {split} images 1: {samples} of {shape} and {classes} classes"
    manifest = {"images": hashlib.sha256(description.encode()).hexdigest(), "class_names": names_digest(names)}
    return ImageFile(Path("synthetic"), images, labels, names, (some.mean(axis=0), some.std(axis=0)), manifest)
