"""JPEG or PNG files packed into one `.npz` (or `.npz.xz`): `blob` uint8, `offsets` (N + 1,), `labels` (N,)."""

from __future__ import annotations

import lzma
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.core.files import open_regular
from hpctrain.data.convert.arrays import whole_labels
from hpctrain.data.convert.common import (
    Advance,
    DecodedPicture,
    PictureForm,
    default_threads,
    in_order,
    measured_range,
    named_labels,
    no_progress,
    pack,
    require_memory,
)
from hpctrain.data.decoding import Fit
from hpctrain.data.files import require_file, require_new
from hpctrain.data.image_file import digest_of
from hpctrain.data.readers import ValueRange

#: bytes that are unpacked between two checks of the available memory
_CHECKED_BYTES = 1 << 26


@dataclass(frozen=True)
class PackedFiles:
    """Concatenated picture files, read from `path`: blob (bytes,) uint8, offsets (N + 1,) int64, labels (N,) int64."""

    path: Path
    blob: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray

    def content(self, index: int) -> bytes:
        """Return the bytes of a picture file."""
        return self.blob[self.offsets[index] : self.offsets[index + 1]].tobytes()


def load(path: Path) -> PackedFiles:
    """Read all of a .npz file.

    Raises:
        DataError: the file is missing or truncated, an array is missing or of another kind, or the offsets do not increase from 0
            to the blob's end.
    """
    require_file(path, "file", "give the path of an existing .npz or .npz.xz")
    try:
        with _seekable(path) as content, np.load(content, allow_pickle=False) as arrays:
            require_memory(sum(member.file_size for member in arrays.zip.infolist()), path)
            blob, offsets, labels = (np.asarray(arrays[name]) for name in ("blob", "offsets", "labels"))
    except KeyError as error:
        raise DataError(f"{path} lacks an array ({error.args[0]}); it needs blob, offsets and labels.") from error
    except DataError:
        raise
    except Exception as error:  # the readers of zip, xz and npy raise almost anything for damaged files
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from error
        raise DataError(f"{path} is truncated or not an .npz file ({str(error).rstrip('.')}); fetch it again.") from error
    if blob.dtype != np.uint8 or any(array.ndim != 1 or array.dtype.kind not in "iu" for array in (offsets, labels)):
        raise DataError(
            f"In {path} blob is {blob.dtype} of {blob.shape}, offsets are {offsets.dtype} of {offsets.shape}, labels "
            f"{labels.dtype} of {labels.shape}; blob must be uint8, the other two lists of integers."
        )
    blob, offsets, labels = blob.reshape(-1), offsets.astype(np.int64), whole_labels(f"labels in {path}", labels)
    rising = len(offsets) > 0 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())
    if not rising or offsets[-1] != blob.size or len(labels) != len(offsets) - 1:
        raise DataError(
            f"In {path} the offsets do not match {blob.size} bytes and {len(labels)} labels; they must be N + 1 numbers that "
            "increase from 0 to the end."
        )
    return PackedFiles(path, blob, offsets, labels)


def convert(
    source: Path | PackedFiles,
    out: Path,
    class_names: Sequence[str] | None = None,
    *,
    size: tuple[int, int] | None = None,
    fit: Fit = "crop",
    channels: int = 3,
    keep_files: bool = False,
    max_pixels: int | None = None,
    value_range: ValueRange | None = None,
    measures: bool = True,
    threads: int | None = None,
    limit: int | None = None,
    overwrite: bool = False,
    advance: Advance = no_progress,
) -> None:
    """Decode all images, or the first `limit`, and write them as one data file.

    Continues an interrupted conversion of the same files.

    Args:
        size: (H, W) to which images are resized; None: all must have the size of the first.
        fit, channels, keep_files, max_pixels, value_range: see `PictureForm`.
        measures: whether `value_range` is measured if it is None; see `common.measured_range`.

    Raises:
        DataError: see `load`; or an image cannot be decoded or has another size, a label has no class name, or `out` exists.
    """
    require_new(out, overwrite)
    packed = load(source) if isinstance(source, Path) else source
    path = packed.path
    if not packed.labels[:limit].size:
        raise DataError(f"{path} holds no images; at least one is needed.")
    labels, names = named_labels(packed.labels, class_names, path)
    labels = labels[:limit]
    threads = default_threads() if threads is None else threads
    if value_range is None and measures:
        value_range = measured_range(packed.content, range(len(labels)), threads, max_pixels)
    form = PictureForm(size, fit, channels, keep_files, max_pixels, value_range)

    def one(index: int) -> DecodedPicture:
        try:
            return form.picture(packed.content(index), int(labels[index]))
        except DataError as error:
            raise DataError(f"In {path}, image {index}: {error}") from error

    height, width, depth = shape = one(0).pixels.shape

    def of_shape(index: int) -> DecodedPicture:
        picture = one(index)
        if picture.pixels.shape != shape:
            raise DataError(
                f"Image {index} of {path} is {picture.pixels.shape}, the first one {shape}; give --size to resize them all."
            )
        return picture

    items = [digest_of(array) for array in (packed.blob, packed.offsets, labels)]
    with form.writer(out, len(labels), (height, width, depth), names, form.source(items, names)) as writer:
        advance(writer.done)
        rest = range(writer.done, len(labels))
        pack(writer, in_order(of_shape, rest, threads), advance)


@contextmanager
def _seekable(path: Path) -> Iterator[IO[bytes]]:
    """Yield the open file, or a temporary file with the decompressed content, because a zip archive is read from its end."""
    if path.suffix != ".xz":
        with open(open_regular(path), "rb") as plain:
            yield plain
        return
    with tempfile.TemporaryFile() as unpacked:
        with open(open_regular(path), "rb") as file, lzma.open(file) as packed:
            while part := packed.read(_CHECKED_BYTES):
                unpacked.write(part)
                require_memory(unpacked.tell(), path)
        unpacked.seek(0)
        yield unpacked
