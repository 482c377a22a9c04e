"""Binary versions of CIFAR-10 and CIFAR-100 (Krizhevsky 2009): records of label bytes and 3 x 32 x 32 pixels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.core.files import open_regular
from hpctrain.data.convert.common import Advance, no_progress, read_names
from hpctrain.data.files import require_directory, require_file, require_new, system_errors_as
from hpctrain.data.writer import write_data_file

Split = Literal["train", "test"]

_SHAPE = (32, 32, 3)
_PIXELS = 3 * 32 * 32
_RECORDS_AT_ONCE = 10_000


@dataclass(frozen=True)
class _RecordFormat:
    """Record format of one of the data sets: files, number of bytes before the pixels, and index of the label in these bytes."""

    files: tuple[str, ...]
    label_bytes: int
    label: int
    names: str  # file of the class names
    classes: int


def convert(
    directory: Path, split: Split, out: Path, *, coarse: bool = False, overwrite: bool = False, advance: Advance = no_progress
) -> None:
    """Write one split of the binary version in `directory` as a data file.

    Args:
        directory: directory with data_batch_1.bin ... and test_batch.bin (CIFAR-10) or train.bin and test.bin (CIFAR-100).
        coarse: whether to use CIFAR-100's 20 superclasses instead of its 100 classes.

    Raises:
        DataError: a file is missing, a size is not a whole number of records, a label is out of range, or `out` exists.
    """
    require_new(out, overwrite)
    require_directory(directory, "give the directory with the binary version of CIFAR-10 or CIFAR-100")
    layout = _layout(directory, split, coarse)
    paths = [directory / name for name in layout.files]
    names_file = directory / layout.names
    names = read_names(names_file) if os.path.lexists(names_file) else [str(label) for label in range(layout.classes)]
    if len(names) != layout.classes:
        raise DataError(f"{names_file} names {len(names)} classes, but the data set has {layout.classes}; fetch it again.")
    record = layout.label_bytes + _PIXELS
    write_data_file(out, sum(_records(path, record) for path in paths), _SHAPE, names, _read(paths, layout, advance))


def parse(content: np.ndarray, label_bytes: int = 1, label: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return images (N, 32, 32, 3) uint8 and labels (N,) int64 of whole records.

    Args:
        content: records, uint8.
        label_bytes: number of bytes of a record before its pixels; default: that of CIFAR-10.
        label: index of the label among these bytes.
    """
    records = content.reshape(-1, label_bytes + _PIXELS)
    planes = records[:, label_bytes:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, label].astype(np.int64)


def _layout(directory: Path, split: Split, coarse: bool) -> _RecordFormat:
    batches = _training_batches(directory) if split == "train" else ["test_batch.bin"]
    if batches and (directory / batches[0]).is_file():
        if coarse:
            raise DataError(f"{directory} holds CIFAR-10, which has no coarse labels; leave out --coarse.")
        return _RecordFormat(tuple(batches), 1, 0, "batches.meta.txt", 10)
    if (directory / f"{split}.bin").is_file():
        kind, position, classes = ("coarse", 0, 20) if coarse else ("fine", 1, 100)
        return _RecordFormat((f"{split}.bin",), 2, position, f"{kind}_label_names.txt", classes)
    raise DataError(
        f"There are no CIFAR batches of the {split} split in {directory}: the binary version of CIFAR-10 has data_batch_1.bin "
        "and test_batch.bin, that of CIFAR-100 train.bin and test.bin."
    )


def _training_batches(directory: Path) -> list[str]:
    """Return the names of CIFAR-10's training batches, which are numbered from 1.

    Raises:
        DataError: a batch between two others is missing.
    """
    with system_errors_as(f"The directory {directory} cannot be read"):
        present = {name for name in os.listdir(directory) if name.startswith("data_batch_") and name.endswith(".bin")}
    names = [f"data_batch_{number}.bin" for number in range(1, len(present) + 1)]
    missing = sorted(set(names) - present)
    if missing:
        raise DataError(
            f"{directory} holds {', '.join(sorted(present))}, but not {', '.join(missing)}; fetch the data set again."
        )
    return names


def _records(path: Path, record: int) -> int:
    require_file(path, "CIFAR batch", "fetch the data set again")
    size = path.stat().st_size
    if size == 0 or size % record:
        raise DataError(
            f"{path} has {size} bytes, not a multiple of a record's {record}: it is truncated or not CIFAR; fetch it again."
        )
    return size // record


def _read(paths: list[Path], layout: _RecordFormat, advance: Advance) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for path in paths:
        record = layout.label_bytes + _PIXELS
        left = _records(path, record)
        with system_errors_as(f"The CIFAR batch {path} cannot be read"), open(open_regular(path), "rb") as file:
            while left:
                content = np.fromfile(file, np.uint8, record * min(left, _RECORDS_AT_ONCE))
                if content.size == 0 or content.size % record:
                    raise DataError(f"{path} changed while it was read; convert it again.")
                images, labels = parse(content, layout.label_bytes, layout.label)
                yield images, labels
                advance(len(labels))
                left -= len(labels)
