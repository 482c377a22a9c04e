"""The data format: an HDF5 file with all images of a split in one contiguous block, as pixels or as picture files.

| object        | shape          | type    | what it holds |
|---------------|----------------|---------|---------------|
| `images`      | (N, H, W, C)   | uint8   | version 2: pixels, contiguous, unfiltered: readable by offset |
| `blob`        | (bytes,)       | uint8   | version 3: JPEG and PNG files one behind another, in place of `images` |
| `offsets`     | (N + 1,)       | int64   | version 3: of each file in `blob`, and of its end |
| `labels`      | (N,)           | int64   | 0 .. classes - 1 |
| `class_names` | (classes,)     | UTF-8   | of fixed length, padded with zero bytes |
| `mean`, `std` | (C,)           | float64 | per channel over the pixels of the whole file, in units of 0..1 |
| `sums`        | (N,)           | uint32  | crc32 of each sample's stored bytes; early files of version 2 have none |
| `pixel_sums`  | (N,)           | uint32  | version 3: crc32 of the pixels that each picture file decodes to |

Attributes of the root: `format`, `version`; of each dataset: `sha256` of its bytes; of `images` or `blob`: `fit`, "crop" or
"squash", where pictures were brought to one size; of `blob`: `form`, the (H, W, C) that they are brought to, and `max_pixels` of
the largest picture, if that is not the decoder's own limit. HDF5 opens the file, without locks, to find where the images lie;
from then on they are a memory map, so that reading a sample is a copy from the page cache. Everything but the images is compared
with its checksum whenever the file is opened.

HDF5's own structures have checksums from its 1.10 format on, except the heap of variable-length values, where a damaged byte can
make HDF5 loop without end; hence texts of fixed length. Version 1 had neither and is read by `format_version_1`, without HDF5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import h5py
import numpy as np

from hpctrain.data import format
from hpctrain.data.readers import BlockReader
from hpctrain.data.extents import Extents
from hpctrain.data.files import require_file, system_errors_as
from hpctrain.data.writer import EncodedFileWriter, ImageFileWriter, write
from hpctrain.data.mapped_reader import MappedReader
from hpctrain.data.format import ENCODED_VERSION, FORMAT, VERSION, Stored, changed, check
from hpctrain.data.unreadable import UnreadableError, reason
from hpctrain.core.errors import DataError

__all__ = ["FORMAT", "VERSION", "EncodedFileWriter", "ImageFile", "ImageFileWriter", "write"]

_SIGNATURE = b"\x89HDF\r\n\x1a\n"


class ReadImages(Protocol):
    """Images that are no array, but are read, or made, sample by sample."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, H, W, C)."""

    def __getitem__(self, index: int | slice | tuple[int | slice, slice, slice]) -> np.ndarray:
        """Pixels (uint8) of a sample or of several, of whole images or of a region, as of an array."""

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Whole images of samples (n,), written to `out` (n, H, W, C), which is returned."""


ImageArray = np.ndarray | ReadImages


class ImageFile:
    """An open data file, with a read-only memory map and a descriptor, which end with the object.

    Attributes:
        images: (N, H, W, C) uint8, read-only map, or what is read, decoded or made as one. To touch a map that its disk does
            not give back ends the process; what trains reads `pixels`.
        pixels: the same images, by what raises an error then. labels: (N,) int64, in memory.
        class_names: one per class. mean, std: (C,) float64, in units of 0..1.
        fit: how pictures were brought to the images' size ("crop", "squash"); None: nobody knows.
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
        """From now on so many threads decode pictures, where the file holds picture files."""
        if isinstance(self.pixels, BlockReader):
            self.pixels.threads = threads

    def take_labels(self, samples: np.ndarray, out: np.ndarray) -> None:
        """The labels of samples (n,), written to `out` (n,): of those that were read in their places where they could not be."""
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
        """The file with these contents, whose structure was checked.

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
    """All of a data file but its images, unchecked.

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
    if start[-1:] < b"\2":  # the superblock's version: HDF5's old format, of our version 1
        return _read_old(path)
    with h5py.File(path, "r", locking=False) as opened:
        _check_format(path, {name: opened.attrs.get(name) for name in ("format", "version")}, (VERSION, ENCODED_VERSION))
        return format.read(opened)


def _read_old(path: Path) -> Stored:
    from hpctrain.data import format_version_1

    with format_version_1.OldFile(path) as old:
        try:
            header = old.header()
        except Exception as error:  # version 1 uses only one of the old format's many forms
            if "truncated" in str(error):
                raise
            raise _damaged(path, "damaged, or an HDF5 file of another program") from error
        version = header.get("version")
        if format.text(header.get("format")) == FORMAT and version in (VERSION, ENCODED_VERSION):
            raise DataError(
                f"{path} has version {version} of the data format, but was rewritten in HDF5's old format, which hpctrain reads "
                "of version 1 alone; convert the pictures again, or this file with `hpctrain data convert hdf5`."
            )
        _check_format(path, header, (1,))
        return old.contents()


def _damaged(path: Path, state: str = "damaged, or not an HDF5 file") -> DataError:
    return DataError(f"The data file {path} is {state}; make it again with `hpctrain data convert` or `fetch`.")


def _check_format(path: Path, header: Mapping[str, object], readable: tuple[int, ...]) -> None:
    if format.text(header.get("format")) != FORMAT:
        raise DataError(f"{path} is an HDF5 file, but not a data file of hpctrain; make one with `hpctrain data convert hdf5`.")
    if header.get("version") not in readable:
        raise DataError(
            f"{path} has version {header.get('version')} of the data format, this hpctrain reads versions 1 to "
            f"{ENCODED_VERSION}; convert it again."
        )


def _map(path: Path, contents: Stored) -> tuple[ImageArray, ReadImages]:
    """The images, and what reads them out of the one block in which they lie."""
    images = contents.images
    assert images.offset is not None, "checked"
    with system_errors_as(f"The data file {path} cannot be mapped into memory"):
        if images.offsets is None:
            mapped = np.memmap(path, np.uint8, "r", images.offset, images.shape)
            return np.asarray(mapped), MappedReader(path, mapped, images.offset)
        from hpctrain.data.encoded_reader import EncodedReader  # loads Pillow, which pixels do without

        block = np.memmap(path, np.uint8, "r", images.offset, (images.needed_bytes,))
        assert contents.sums is not None, "checked"
        assert contents.pixel_sums is not None, "checked"
        extents, sums = Extents.rising(images.offset, images.offsets), (contents.sums, contents.pixel_sums)
        form, fit = images.shape[1:], contents.fit or "crop"
        reader = EncodedReader(path, block, extents, sums, form, fit, max_pixels=contents.max_pixels)
        return reader, reader
