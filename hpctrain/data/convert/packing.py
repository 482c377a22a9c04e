"""Pictures put into a data file, as pixels or as the files that they are, a chunk at a time and from where a beginning ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.data import decoding
from hpctrain.data.convert.common import Advance
from hpctrain.data.decoding import Fit, decode, read_picture
from hpctrain.data.writer import DataFileWriter, EncodedFileWriter, ImageFileWriter

_CHUNK_BYTES = 16 << 20
_CHUNK_ITEMS = 4096


@dataclass(frozen=True)
class PictureForm:
    """The form that pictures get in a data file.

    Attributes:
        size: (H, W) that they are brought to; None: they all have one. fit: "crop" or "squash", how. channels: 1 or 3.
        keep_files: store the picture files as they are, in place of pixels.
        max_pixels: pixels of the largest picture that is accepted; see `decoder.decode`.
    """

    size: tuple[int, int] | None
    fit: Fit
    channels: int
    keep_files: bool = False
    max_pixels: int | None = None

    def picture(self, source: Path | bytes, label: int) -> DecodedPicture:
        """A picture file decoded.

        Raises:
            DataError: it cannot be read or decoded; the sentence does not name it.
        """
        content = read_picture(source, self.max_pixels) if isinstance(source, Path) else source
        pixels = decode(content, self.size, self.fit, self.channels, self.max_pixels)
        return DecodedPicture(pixels, label, content if self.keep_files else b"")

    def writer(
        self, out: Path, count: int, shape: tuple[int, int, int], class_names: Sequence[str], source: str
    ) -> ImageFileWriter | EncodedFileWriter:
        """A writer of `count` such pictures, of `shape` (H, W, C); see `DataFileWriter`."""
        fit = None if self.size is None else self.fit
        if self.keep_files:
            return EncodedFileWriter(out, count, shape, class_names, fit, source, max_pixels=self.max_pixels)
        return ImageFileWriter(out, count, shape, class_names, fit, source)

    def source(self, items: object, class_names: Sequence[str], skips: bool = False) -> str:
        """A name for all that a data file is made of and how.

        Args:
            items: tells the pictures from others, as JSON can hold it. skips: those that cannot be decoded are left out.
        """
        how = [self.size, self.fit, self.channels, self.keep_files, self.max_pixels, skips, list(class_names), decoding.versions()]
        return hashlib.sha256(json.dumps([how, items]).encode(errors="surrogateescape")).hexdigest()


@dataclass(frozen=True)
class DecodedPicture:
    """A picture: pixels (H, W, C) uint8, its label, and the file's content where it is kept."""

    pixels: np.ndarray
    label: int
    content: bytes = b""


def pack(
    writer: ImageFileWriter | EncodedFileWriter, pictures: Iterable[DecodedPicture | str], advance: Advance, *, skip: bool = False
) -> list[str]:
    """Append pictures; give the names of all that are strings, which stand for pictures that cannot be decoded.

    Unless these may be skipped nothing is appended behind the first, but all are read, so that all are named at once.
    """
    unreadable: list[str] = []
    gathered: list[DecodedPicture] = []
    skipped: list[str] = []

    def flush() -> None:
        if skip or not unreadable:
            _append(writer, gathered, skipped)
        advance(len(gathered) + len(skipped))
        gathered.clear()
        skipped.clear()

    for picture in pictures:
        if isinstance(picture, str):
            unreadable.append(picture)
            skipped.append(picture)
        else:
            gathered.append(picture)
        full = bool(gathered) and len(gathered) * (gathered[0].pixels.nbytes + len(gathered[-1].content)) >= _CHUNK_BYTES
        if full or len(gathered) + len(skipped) >= _CHUNK_ITEMS:
            flush()
    flush()
    return unreadable


def _append(writer: DataFileWriter, pictures: Sequence[DecodedPicture], skipped: Sequence[str]) -> None:
    if not pictures and not skipped:
        return
    labels = np.array([picture.label for picture in pictures], np.int64)
    pixels = [picture.pixels for picture in pictures]
    images = np.stack(pixels) if pixels else np.empty((0, *writer.shape), np.uint8)
    if isinstance(writer, EncodedFileWriter):
        writer.append([picture.content for picture in pictures], images, labels, skipped=skipped)
    elif isinstance(writer, ImageFileWriter):
        writer.append(images, labels, skipped=skipped)
