"""IDX files (MNIST and its relatives), plain or gzipped."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.core.files import open_regular
from hpctrain.data.convert.common import Advance, named_labels, no_progress, require_memory, slices
from hpctrain.data.files import require_file, require_new, system_errors_as
from hpctrain.data.writer import write_data_file

_UINT8 = 8
_MOST_DIMS = 4
_HEADER_BYTES = 4 + 4 * _MOST_DIMS
_GZIP = b"\x1f\x8b"
_BYTES_AT_ONCE = 1 << 24


def read_bytes(path: Path) -> bytes:
    """Return a file's content, decompressed if it begins with gzip's signature; see `unpack`.

    Raises:
        DataError: the file is missing or unreadable; or see `unpack`.
    """
    require_file(path, "IDX file", "give the path of an existing one, plain or .gz")
    with system_errors_as(f"The IDX file {path} cannot be read"), open(open_regular(path), "rb") as file:
        return unpack(file, str(path))


def unpack(file: BinaryIO, name: str) -> bytes:
    """Return the content of an IDX file, decompressed if it begins with gzip's signature.

    The header is read first, then at most a few bytes more than it declares.

    Raises:
        DataError: the content is not IDX, of another type, truncated, too long, too large for memory, or a damaged gzip stream.
    """
    start = file.read(len(_GZIP))
    file.seek(0)
    packed = start == _GZIP
    stream: BinaryIO = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]
    content = bytearray()
    try:
        content += stream.read(_HEADER_BYTES)
        _, needed = _header(content, name)
        require_memory(needed, name)
        while len(content) <= needed and (part := stream.read(min(_BYTES_AT_ONCE, needed + 1 - len(content)))):
            content += part
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"The file {name} is a truncated or damaged gzip file ({error}); fetch it again.") from error
    return bytes(content)


def parse(content: bytes, name: str) -> np.ndarray:
    """Return the read-only array of an IDX file of unsigned bytes.

    The format is: two zero bytes, type, number of dims, sizes as big-endian int32, elements.

    Raises:
        DataError: the content is not IDX, of another type, truncated, or too long.
    """
    shape, needed = _header(content, name)
    if len(content) != needed:
        size = f"{len(content)} bytes{' or more' if len(content) > needed else ''}"
        raise DataError(f"{name} has {size}, but its header {shape} declares {needed}.")
    return np.frombuffer(content, np.uint8, offset=needed - math.prod(shape)).reshape(shape)


def _header(content: bytes | bytearray, name: str) -> tuple[tuple[int, ...], int]:
    """Return (shape, size of the whole file in bytes) from the header of an IDX file.

    Raises:
        DataError: the content is not IDX, of another type, or truncated.
    """
    if len(content) < 4 or content[:2] != b"\0\0" or content[3] == 0:
        raise DataError(f"{name} is not an IDX file: it must start with two zero bytes, the type and the number of dims.")
    if content[2] != _UINT8:
        raise DataError(f"{name} holds IDX type 0x{content[2]:02x}; only unsigned bytes, 0x08, are images or labels.")
    if content[3] > _MOST_DIMS:
        raise DataError(f"{name} holds an array of {content[3]} dims; images must have 3 or 4, labels 1.")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{name} is truncated within its header of {start} bytes; fetch it again.")
    shape = tuple(np.frombuffer(content, ">i4", content[3], 4).tolist())
    if min(shape) < 0:
        raise DataError(f"{name} is not an IDX file: its header declares an array of shape {shape}; fetch it again.")
    return shape, start + math.prod(shape)


def convert(
    images: Path,
    labels: Path,
    out: Path,
    class_names: Sequence[str] | None = None,
    *,
    overwrite: bool = False,
    advance: Advance = no_progress,
) -> None:
    """Write images (N, H, W) or (N, H, W, C) and labels (N,) from two IDX files as one data file.

    Raises:
        DataError: see `parse`; or the numbers of labels and images differ, a label has no class name, or `out` exists.
    """
    require_new(out, overwrite)
    pixels, targets = parse(read_bytes(images), str(images)), parse(read_bytes(labels), str(labels))
    write(pixels, targets, out, class_names, advance, f"{images} and {labels}")


def write(
    pixels: np.ndarray, targets: np.ndarray, out: Path, class_names: Sequence[str] | None, advance: Advance, origin: str
) -> None:
    """Write parsed IDX arrays as one data file.

    Args:
        origin: origin of the arrays, for messages.
    """
    if pixels.ndim not in (3, 4) or targets.ndim != 1:
        raise DataError(f"{origin} hold arrays of {pixels.shape} and {targets.shape}; images must have 3 or 4 dims, labels 1.")
    if len(pixels) != len(targets):
        raise DataError(f"{origin} hold {len(pixels):,} images and {len(targets):,} labels; the numbers must be equal.")
    pixels = pixels if pixels.ndim == 4 else pixels[..., None]
    classes, names = named_labels(targets.astype(np.int64), class_names, origin)
    height, width, channels = pixels.shape[1:4]
    write_data_file(out, len(pixels), (height, width, channels), names, slices(pixels, classes, advance))
