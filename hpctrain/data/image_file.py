"""The data format, and open data files: images, labels and class names, from a file or synthetic.

A data file is an HDF5 file with all images of a split in one contiguous block, as pixels or as picture files.

| object        | shape          | type    | what it holds |
|---------------|----------------|---------|---------------|
| `images`      | (N, H, W, C)   | uint8   | version 2: pixels, contiguous, unfiltered: readable by offset |
| `blob`        | (bytes,)       | uint8   | version 3, instead of `images`: JPEG and PNG files, one after the other |
| `offsets`     | (N + 1,)       | int64   | version 3: offset of each file in `blob`, and of the end of the last one |
| `labels`      | (N,)           | int64   | 0 .. classes - 1 |
| `class_names` | (classes,)     | UTF-8   | fixed length, padded with zero bytes |
| `mean`, `std` | (C,)           | float64 | per channel over the pixels of the whole file, in units of 0..1 |
| `sums`        | (N,)           | uint32  | crc32 of each sample's stored bytes; missing in early files of version 2 |
| `pixel_sums`  | (N,)           | uint32  | version 3: crc32 of the decoded pixels of each picture file |

The root has the attributes `format` and `version`; each dataset has `sha256`, the checksum of its bytes. The attribute `fit`
("crop" or "squash") of `images` or `blob` is present if pictures were brought to one size. `blob` also has `form`, the (H, W, C)
of the decoded pictures, and `max_pixels`, the size limit of a picture, if it is not the decoder's own limit. Whenever a file is
opened, everything but the images is compared with its checksum.

HDF5's own structures have checksums from its 1.10 format on, except the heap of variable-length values. A damaged byte in this
heap can make HDF5 loop without end, so texts have a fixed length.

HDF5 opens the file without locks and returns the offset of the images. They are then mapped into memory, so reading a sample is a
copy from the page cache. This module also maps classes of several files to one order by name (`with_class_order`), computes the
facts by which a run identifies its training data (`DataFacts`) and ranks compare their files (`compared_facts`), and makes
synthetic images, which depend on split, sample number and shape only.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from hpctrain.backend.counter_random import key, words
from hpctrain.core.errors import DataError
from hpctrain.data.files import require_file, system_errors_as
from hpctrain.data.readers import BlockReader, Extents, MappedReader, ReadImages, UnreadableError, reason

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


_SIGNATURE = b"\x89HDF\r\n\x1a\n"


ImageArray = np.ndarray | ReadImages


class ImageFile:
    """An open data file, with a read-only memory map and a descriptor, which end with the object.

    Attributes:
        images: (N, H, W, C) uint8, read-only map, or what is read, decoded or made as one. To touch a map that its disk does
            not give back ends the process; what trains reads `pixels`.
        pixels: the same images, by what raises an error then. labels: (N,) int64, in memory.
        class_names: one per class. mean, std: (C,) float64, in units of 0..1.
        fit: how pictures were brought to the images' size ("crop", "squash"); None: unknown.
        sums: (N,) crc32 of each sample's stored bytes; None: the file has none.
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

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of every image."""
        height, width, channels = self.images.shape[1:]
        return height, width, channels

    @property
    def stored_bytes(self) -> int:
        """Bytes of all samples in the file; 0 of images that are made up."""
        return self.pixels.extents.size_bytes if isinstance(self.pixels, BlockReader) else 0

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def stored_digest(self) -> str:
        """sha256 of the images as they are stored: pixels, or picture files."""
        return self.manifest["blob" if "blob" in self.manifest else "images"]

    def decode_by(self, threads: int) -> None:
        """Let `threads` threads decode pictures from now on, if the file holds picture files."""
        if isinstance(self.pixels, BlockReader):
            self.pixels.threads = threads

    def take_labels(self, samples: np.ndarray, out: np.ndarray) -> None:
        """Write the labels of samples (n,) to `out` (n,): of those that were read in place of unreadable ones."""
        if isinstance(self.pixels, BlockReader) and (replaced := self.pixels.replaced):
            samples = np.array([replaced.get(sample, sample) for sample in samples.tolist()], np.int64)
        # "clip" because "raise" makes NumPy gather into a copy first; a sampler's samples are in range.
        np.take(self.labels, samples, out=out, mode="clip")

    @classmethod
    def open(cls, path: str | Path) -> ImageFile:
        """Open for reading, without file locks (parallel file systems often have none).

        Raises:
            DataError: missing, not readable, truncated, empty, not of this format, with anything but the images other than its
                checksum says, or with a label outside 0 .. classes - 1.
        """
        contents = read_contents(Path(path))
        check(Path(path), contents)
        return cls.of(Path(path), contents)

    @classmethod
    def of(cls, path: Path, contents: Stored) -> ImageFile:
        """Return the file with these contents, whose structure was checked.

        Raises:
            DataError: it cannot be mapped into memory.
        """
        moments = np.asarray(contents.mean, np.float64), np.asarray(contents.std, np.float64)
        labels = np.asarray(contents.labels, np.int64)
        images, reader = _map(path, contents)
        digests = dict(contents.digests)
        return cls(path, images, labels, contents.class_names, moments, digests, reader, contents.fit, contents.sums)

    def verify(self) -> None:
        """Compare the samples' stored bytes with their sha256; reads the whole file. The rest was compared when it was opened.

        Raises:
            DataError: they changed since the file was written. UnreadableError: they cannot be read.
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
    """Read all of a data file but its images, unchecked.

    Raises:
        DataError: missing, not readable, truncated, empty, or not of this format.
    """
    require_file(
        path,
        "data file",
        "make it with `hpctrain data convert`, or with `hpctrain data fetch fashion-mnist --out DIRECTORY`",
    )
    try:
        return _read(path)
    except DataError:
        raise
    except Exception as error:  # h5py raises almost anything for damaged files
        if (why := reason(error)) is not None:
            raise DataError(f"The data file {path} cannot be read: {why}.") from error
        raise _damaged(path, "truncated" if "truncated" in str(error) else "damaged, or not an HDF5 file") from error


def _read(path: Path) -> Stored:
    with path.open("rb") as file:
        start = file.read(len(_SIGNATURE) + 1)
    if not start.startswith(_SIGNATURE):
        raise _damaged(path)
    # The superblock's version. Structures of earlier ones have no checksums, so that a damaged byte may make HDF5 loop or crash.
    if start[-1:] < b"\2":
        raise DataError(
            f"{path} is an HDF5 file, but not a data file of hpctrain, as its structures have no checksums; make one with "
            "`hpctrain data convert hdf5`."
        )
    with h5py.File(path, "r", locking=False) as opened:
        if text(opened.attrs.get("format")) != FORMAT:
            raise DataError(
                f"{path} is an HDF5 file, but not a data file of hpctrain; make one with `hpctrain data convert hdf5`."
            )
        version = opened.attrs.get("version")
        if version not in (VERSION, ENCODED_VERSION):
            raise DataError(
                f"{path} has version {version} of the data format, this hpctrain reads versions {VERSION} and "
                f"{ENCODED_VERSION}; convert it again."
            )
        return read_stored(opened)


def _damaged(path: Path, state: str = "damaged, or not an HDF5 file") -> DataError:
    return DataError(f"The data file {path} is {state}; make it again with `hpctrain data convert` or `fetch`.")


def _map(path: Path, contents: Stored) -> tuple[ImageArray, ReadImages]:
    """Return the images, and what reads them from the one block that holds them."""
    images = contents.images
    assert images.offset is not None, "checked"
    with system_errors_as(f"The data file {path} cannot be mapped into memory"):
        if images.offsets is None:
            mapped = np.memmap(path, np.uint8, "r", images.offset, images.shape)
            return np.asarray(mapped), MappedReader(path, mapped, images.offset)
        from hpctrain.data.decoding import EncodedReader  # loads Pillow, which pixels do without

        block = np.memmap(path, np.uint8, "r", images.offset, (images.needed_bytes,))
        assert contents.sums is not None, "checked"
        assert contents.pixel_sums is not None, "checked"
        extents, sums = Extents.rising(images.offset, images.offsets), (contents.sums, contents.pixel_sums)
        form, fit = images.shape[1:], contents.fit or "crop"
        reader = EncodedReader(path, block, extents, sums, form, fit, max_pixels=contents.max_pixels)
        return reader, reader


def class_difference(names: Sequence[str], others: Sequence[str]) -> str | None:
    """Return how two lists of class names differ, in words; None if they are the same names in any order.

    If a name stands for several classes, the order must be the same as well: nothing else distinguishes them.
    """
    names, others = [*map(normal_name, names)], [*map(normal_name, others)]
    if len(names) != len(others):
        return f"there are {len(names)} and {len(others)} classes{_only(names, others)}"
    if sorted(names) == sorted(others) and (len(set(names)) == len(names) or names == others):
        return None
    first = next(number for number, pair in enumerate(zip(names, others, strict=True)) if pair[0] != pair[1])
    return f"class {first} is {names[first]!r} and {others[first]!r}{_only(names, others)}"


def _only(names: Sequence[str], others: Sequence[str]) -> str:
    alone = [f"{name!r}" for one, other in ((names, others), (others, names)) for name in one if name not in other][:1]
    return f", {alone[0]} is in one of them only" if alone else ""


def with_class_order(file: ImageFile, names: Sequence[str], origin: str) -> ImageFile:
    """Return the same file with the classes in the order of `names`, which `origin` has: its labels are mapped by name.

    Raises:
        DataError: it has other classes, or another number of them; the message names the first difference.
    """
    differs = class_difference(file.class_names, names)
    if differs is not None:
        raise DataError(
            f"{file.path} has other classes than {origin}: {differs}. "
            f"Convert it again with the same class names, or use other data."
        )
    names = tuple(names)
    if names == file.class_names:
        return file
    label_of = {normal_name(name): label for label, name in enumerate(names)}
    if len(label_of) < len(names):  # a name stands for several classes; `difference` then requires the same order
        mapped = np.arange(len(names))
    else:
        mapped = np.array([label_of[normal_name(name)] for name in file.class_names], np.int64)
    moments = file.mean, file.std
    labels = mapped[file.labels]
    return ImageFile(file.path, file.images, labels, names, moments, file.manifest, file.pixels, file.fit, file.sums)


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
        """Return the facts of an open file; reads no image."""
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
        """Return the facts from JSON's version of `to_meta`."""
        plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        return cls(**plain)

    def to_meta(self) -> dict[str, Any]:
        """Return the facts as JSON can hold them, to the last bit."""
        values = asdict(self)
        if self.fit is None:
            del values["fit"]  # which earlier versions of hpctrain do not know
        return values


@dataclass(frozen=True)
class ImageForm:
    """The form that pictures of any size are brought to, before they are augmented and normalised.

    Args:
        shape: (H, W, C). fit: "crop" or "squash", see `decoding.decode`.
    """

    shape: tuple[int, int, int]
    fit: str = "crop"

    @classmethod
    def of(cls, file: ImageFile | DataFacts) -> ImageForm:
        """Return the form of a data file's images; if it does not say how it was made, the converters' default."""
        height, width, channels = file.shape
        return cls((height, width, channels), file.fit or "crop")

    @classmethod
    def from_meta(cls, values: Mapping[str, Any]) -> ImageForm:
        """Return the form from JSON's version of `to_meta`."""
        height, width, channels = values["shape"]
        return cls((height, width, channels), values["fit"])

    def to_meta(self) -> dict[str, Any]:
        """Return the form as JSON can hold it."""
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


Split = Literal["train", "test"]
_WINDOWS = 1 << 20  # places in the pool where an image may begin
_STRIPES = 8  # of one brightness: wider than shifts of augmentations
_MEASURED = 64  # images that mean and deviation are computed from


class SyntheticImages:
    """Images that are made when they are read; it is indexed as an array (N, H, W, C) of uint8 is.

    Args:
        split: test images are others than training images. labels: (N,), the class of each. shape: (H, W, C). classes: of all.
    """

    def __init__(self, split: Split, labels: np.ndarray, shape: tuple[int, int, int], classes: int) -> None:
        self.shape: tuple[int, ...] = (len(labels), *shape)
        self._labels = labels
        self._begins = (words(key("synthetic windows", split), np.arange(len(labels)), range(1))[:, 0] % _WINDOWS).astype(
            np.int64
        )
        self._size = shape[0] * shape[1] * shape[2]
        pool = words(key("synthetic noise"), [0], range(-(-(_WINDOWS + self._size) // 4)))
        self._pool = np.right_shift(pool.reshape(-1).view(np.uint8), 1)
        stripe = np.arange(shape[0]) * _STRIPES // shape[0]
        brightness = words(key("synthetic stripes"), np.arange(classes), range(_STRIPES)) >> np.uint32(25)
        self._stripes = brightness.astype(np.uint8)[:, stripe]

    def __getitem__(self, index: int | slice | tuple[int | slice, slice, slice]) -> np.ndarray:
        """Return pixels of one sample (h, w, C) or of several (n, h, w, C), whole or a region of them."""
        samples, *region = index if isinstance(index, tuple) else (index,)
        rows, columns = region or (slice(None), slice(None))
        if isinstance(samples, slice):
            numbers = range(self.shape[0])[samples]
            out = np.empty((len(numbers), *self._pixels(0)[rows, columns].shape), np.uint8)
            for number, target in zip(numbers, out, strict=True):
                self._write(number, rows, columns, target)
            return out
        out = np.empty(self._pixels(0)[rows, columns].shape, np.uint8)
        self._write(samples, rows, columns, out)
        return out

    def take(self, samples: Sequence[int] | np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write whole images of samples to `out` (n, H, W, C), and return it."""
        for sample, target in zip(samples, out, strict=True):
            self._write(int(sample), slice(None), slice(None), target)
        return out

    def _pixels(self, sample: int) -> np.ndarray:
        """Return a view of the noise of an image."""
        begin = self._begins[sample]
        return self._pool[begin : begin + self._size].reshape(self.shape[1:])

    def _write(self, sample: int, rows: slice, columns: slice, out: np.ndarray) -> None:
        stripes = self._stripes[self._labels[sample], rows]
        np.add(self._pixels(sample)[rows, columns], stripes[:, None, None], out=out)


def synthetic_file(split: Split, samples: int, shape: tuple[int, int, int], classes: int) -> ImageFile:
    """Return synthetic images as if they were in a data file; no file is read.

    Args:
        samples: number of images; image n has class n modulo `classes`. shape: (H, W, C).
    """
    labels = np.arange(samples, dtype=np.int64) % classes
    names = tuple(f"class {number}" for number in range(classes))
    images = SyntheticImages(split, labels, shape, classes)
    some = images[:_MEASURED].reshape(-1, shape[2]) / 255
    description = f"synthetic {split} images 1: {samples} of {shape} and {classes} classes"
    manifest = {"images": hashlib.sha256(description.encode()).hexdigest(), "class_names": names_digest(names)}
    return ImageFile(Path("synthetic"), images, labels, names, (some.mean(axis=0), some.std(axis=0)), manifest)
