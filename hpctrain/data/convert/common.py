"""Shared parts of the converters: class names, chunks, parallel decoding in order, and the summary.

`PictureForm` defines how a data file stores pictures, as pixels or as unchanged picture files, and decodes them. `pack` writes
decoded pictures into a data file in chunks.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.core.files import read_bytes
from hpctrain.core.text import counted, escaped
from hpctrain.data.decoding import Fit, decode, deep_maximum, read_picture
from hpctrain.data.files import require_file, system_errors_as
from hpctrain.data.image_file import ImageFile, normal_name
from hpctrain.data.readers import ValueRange
from hpctrain.data.writer import ImageFileWriter
from hpctrain.launch.control_groups import available_bytes, whole_quota

Item = TypeVar("Item")
Result = TypeVar("Result")
#: callback, called with the number of samples just processed
Advance = Callable[[int], None]

_CHUNK_BYTES = 16 << 20
_MOST_CLASSES = 1 << 20
_MOST_BYTES_OF_NAMES = 64 << 20
#: number of names in a line of the summary, and in a message
_EXAMPLES, _LISTED = 5, 20


def no_progress(count: int) -> None:
    """Ignore the progress (a no-op `Advance`)."""


def default_threads() -> int:
    """Return the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, whole_quota() or cores)


def named_labels(
    labels: np.ndarray, names: Sequence[str] | None, origin: object, classes: int = 1
) -> tuple[np.ndarray, Sequence[str]]:
    """Return the class of each label, and the class names.

    Labels are indices of the names. If all names are numbers, each label means the class whose name is this number.

    Args:
        names: names of the classes; None: "0", "1", ...
        origin: file of the labels, for messages.
        classes: minimum number of classes without names.

    Raises:
        DataError: some names are numbers other than their indices, and not all names are numbers or a label is none of them. Or
            there are no names, and a value from 0 to the largest label has no sample, or the largest label is too large.
    """
    used = np.unique(labels)
    if names is not None:
        index_of = {int(name): index for index, name in enumerate(names) if name.isdecimal()}
        if all(number == index for number, index in index_of.items()):
            return labels, names
        unclear = [label for label in used.tolist() if label not in index_of or len(index_of) < len(names)]
        if unclear:
            raise DataError(
                f"The class of label {unclear[0]} in {origin} is uncertain, as class names are numbers other than their indices; "
                "renumber the labels, or give class names in the order of the labels."
            )
        return np.array([index_of[label] for label in used.tolist()], np.int64)[np.searchsorted(used, labels)], names
    largest = max(classes - 1, int(used[-1])) if used.size else classes - 1
    if largest >= _MOST_CLASSES:
        raise DataError(f"The largest label is {largest} in {origin}; labels without names must be below {_MOST_CLASSES}.")
    used = used[used >= 0]
    if used.size and used.size <= largest:
        first = next(value for value in range(largest + 1) if value >= used.size or used[value] != value)
        raise DataError(
            f"The labels in {origin} have {used.size} values from {int(used[0])} to {int(used[-1])}, but none is {first}; name "
            f"all {largest + 1} classes in --class-names, or renumber the labels from 0 to {used.size - 1}."
        )
    return labels, [str(label) for label in range(largest + 1)]


def require_memory(count: int, origin: object) -> None:
    """Raise an error unless `count` bytes fit into memory. Call this before allocating the size that a file declares.

    Raises:
        DataError: fewer than `count` bytes are available to this process.
    """
    room = available_bytes()
    if room is not None and count > room:
        raise DataError(f"{origin} needs {count:,} bytes of memory, but {room:,} are available; split it.")


def in_order(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Yield results in the order of the items, with at most 4 * threads items in progress. The first error ends the iteration."""
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="hpctrain-decode") as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) >= 4 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def slices(images: np.ndarray, labels: np.ndarray, advance: Advance = no_progress) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield chunks (images, labels) of about 16 MiB of an array of images (N, H, W, C) and their labels."""
    step = max(1, _CHUNK_BYTES // max(1, images[:1].nbytes))
    for start in range(0, len(images), step):
        yield images[start : start + step], labels[start : start + step]
        advance(len(images[start : start + step]))


def listed(noun: str, names: Sequence[str]) -> str:
    """Return "2 files (a.jpg, b.jpg)" for messages. Long lists are shortened."""
    shown = ", ".join(map(escaped, names[:_LISTED])) + (f", and {len(names) - _LISTED:,} more" if len(names) > _LISTED else "")
    return f"{counted(len(names), noun)} ({shown})"


def read_names(path: Path) -> list[str]:
    """Return class names from a text file in UTF-8, one per line, in Unicode's composed form.

    Raises:
        DataError: the file is missing, not text or empty, or contains a name twice.
    """
    require_file(path, "file of class names", "it must contain one name per line")
    try:
        with system_errors_as(f"The file of class names {path} cannot be read"):
            text = read_bytes(path, _MOST_BYTES_OF_NAMES).decode("utf-8-sig")
        names = [normal_name(line.strip()) for line in text.splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"The file of class names {path} is not UTF-8 text; it must contain one name per line.") from error
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if not names or twice:
        reason = f"contains {', '.join(twice[:_EXAMPLES])} twice" if twice else "is empty"
        raise DataError(f"The file of class names {path} {reason}; it must contain one name per line, each once.")
    return names


@dataclass(frozen=True)
class LeftOut:
    """Files, directories or samples of a source that were not converted, for one reason.

    Attributes:
        places: path or number of each item.
        unreadable: whether the items belong to the data set but are unreadable, and the user requested to skip them.
    """

    reason: str
    places: tuple[str, ...]
    unreadable: bool = False

    def __str__(self) -> str:
        return f"left out, {self.reason}: {_examples(self.places)}"


@dataclass(frozen=True)
class ConvertedFile:
    """Summary of a conversion.

    Attributes:
        images: (name, number of images) of each class, in the order of labels.
        value_range: (low, high), the values that became 0 and 255; None: the usual ones of the source's type, such as 0 and 255.
        left_out: the items that were not converted, by reason.
    """

    path: Path
    images: tuple[tuple[str, int], ...]
    left_out: tuple[LeftOut, ...] = ()
    value_range: ValueRange | None = None

    @classmethod
    def of(cls, path: Path, left_out: Sequence[LeftOut] = ()) -> ConvertedFile:
        """Return the summary of an existing data file.

        Raises:
            DataError: see `ImageFile.open`.
        """
        file = ImageFile.open(path)
        counts = np.bincount(file.labels, minlength=len(file.class_names)).tolist()
        return cls(path, tuple(zip(file.class_names, counts, strict=True)), tuple(left_out), file.value_range)

    def __str__(self) -> str:
        least, most = (choose(self.images, key=lambda of: of[1]) for choose in (min, max))
        total = sum(count for _, count in self.images)
        made = f"{counted(total, 'image')} of {counted(len(self.images), 'class')}"
        sides = [f"{count:,} ({escaped(name)})" for name, count in (least, most)]
        share = f"{least[1]:,}" if least[1] == most[1] else " to ".join(sides)
        lines = [f"{escaped(self.path)}: {made}, {share} per class"]
        empty = tuple(name for name, count in self.images if not count)
        if empty:
            lines.append(f"classes without an image: {_examples(empty)}")
        if self.value_range is not None:
            low, high = self.value_range
            lines.append(f"values of more than 8 bits: {low:g} became black and {high:g} white (--range {low:g} {high:g})")
        return "\n".join([*lines, *map(str, self.left_out)])


def _examples(names: Sequence[str]) -> str:
    """Return the number of names and the first ones, such as "3 (a, b, c)"."""
    more = f", and {len(names) - _EXAMPLES:,} more" if len(names) > _EXAMPLES else ""
    return f"{len(names):,} ({', '.join(map(escaped, names[:_EXAMPLES]))}{more})"


_CHUNK_ITEMS = 4096


@dataclass(frozen=True)
class PictureForm:
    """Form of pictures in a data file.

    Attributes:
        size: (H, W) to which pictures are resized; None: all pictures must have one size.
        fit, channels, max_pixels, value_range: see `decoding.decode`.
        keep_files: whether to store the unchanged picture files, which are decoded when they are read, instead of pixels.
    """

    size: tuple[int, int] | None
    fit: Fit
    channels: int
    keep_files: bool = False
    max_pixels: int | None = None
    value_range: ValueRange | None = None

    def picture(self, source: Path | bytes, label: int) -> DecodedPicture:
        """Decode a picture file, and return the picture with its label.

        Raises:
            DataError: the file cannot be read or decoded. The message does not name it.
        """
        content = read_picture(source, self.max_pixels) if isinstance(source, Path) else source
        pixels = decode(content, self.size, self.fit, self.channels, self.max_pixels, self.value_range)
        return DecodedPicture(pixels, label, content if self.keep_files else b"")

    def writer(
        self, out: Path, count: int, shape: tuple[int, int, int], class_names: Sequence[str], source: str | None = None
    ) -> ImageFileWriter:
        """Return a writer for `count` pictures in this form, with shape (H, W, C); see `ImageFileWriter`."""
        fit = None if self.size is None else self.fit
        how = fit, self.value_range, self.keep_files, self.max_pixels
        return ImageFileWriter(out, count, shape, class_names, *how, source)


#: numbers of bits of sensors whose values are often stored in 16 bits
_SENSOR_BITS = (8, 10, 12, 14)


def range_up_to(most: float) -> ValueRange | None:
    """Return the range 0 to 2^bits - 1 of the fewest bits that hold the largest value `most`; None if these are more than 14.

    Only 8, 10, 12 and 14 bits are considered, so that the parts of a data set usually have the same range.
    """
    bits = next((bits for bits in _SENSOR_BITS if most < 1 << bits), None)
    return None if bits is None else (0.0, float((1 << bits) - 1))


def measured_range(
    read: Callable[[Item], Path | bytes], items: Iterable[Item], threads: int, max_pixels: int | None = None
) -> ValueRange | None:
    """Return the range of the values of pictures that declare 16 bits per value, if all use at most 14; None otherwise.

    Raises:
        DataError: there are such pictures, but also some of floating-point numbers or wider integers.
    """
    maxima = list(in_order(lambda item: deep_maximum(read(item), max_pixels), items, threads))
    most = max(maxima, default=0)
    if most > 0 and (bytes_only := maxima.count(0)):
        logging.getLogger(__name__).warning(
            "Pictures of 8 bits among deeper ones are not scaled (%s).", counted(bytes_only, "picture")
        )
    measured = range_up_to(most) if most > 0 else None
    if measured is not None and min(maxima) < 0:
        raise DataError(
            f"Some pictures have floating-point numbers or integers of 32 bits, and others 16 bits with values up to {most}, so "
            f"that their range is unknown; give the values of black and white, such as --range 0 {measured[1]:g}."
        )
    return measured


@dataclass(frozen=True)
class DecodedPicture:
    """Pixels (H, W, C) uint8 of a picture, its label, and the file's content if it is kept."""

    pixels: np.ndarray
    label: int
    content: bytes = b""


def pack(writer: ImageFileWriter, pictures: Iterable[DecodedPicture | str], advance: Advance, *, skip: bool = False) -> list[str]:
    """Append pictures to a data file, and return the names of all undecodable ones, which `pictures` yields as strings.

    Unless `skip` is set, nothing is appended after the first undecodable picture. The remaining pictures are still read, so that
    the error can name all undecodable ones.
    """
    unreadable = list(writer.skipped)
    gathered: list[DecodedPicture] = []

    def flush() -> None:
        if gathered and (skip or not unreadable):
            images, labels = np.stack([picture.pixels for picture in gathered]), np.array([picture.label for picture in gathered])
            contents = [picture.content for picture in gathered]
            writer.append(images, labels, contents, unreadable[len(writer.skipped) :])
        advance(len(gathered))
        gathered.clear()

    for picture in pictures:
        if isinstance(picture, str):
            unreadable.append(picture)
            advance(1)
            continue
        gathered.append(picture)
        full = len(gathered) * (gathered[0].pixels.nbytes + len(gathered[-1].content)) >= _CHUNK_BYTES
        if full or len(gathered) >= _CHUNK_ITEMS:
            flush()
    flush()
    return unreadable
