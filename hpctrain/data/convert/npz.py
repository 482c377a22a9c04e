"""JPEG or PNG files packed into one `.npz` (or `.npz.xz`): `blob` uint8, `offsets` (N + 1,), `labels` (N,)."""

from __future__ import annotations

import itertools
import lzma
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.core.files import open_regular
from hpctrain.data.convert.arrays import whole_labels
from hpctrain.data.convert.common import named_labels, require_memory
from hpctrain.data.convert.folder import PackedPicture, Tree
from hpctrain.data.files import require_file

#: bytes that are unpacked between two checks of the available memory
_CHECKED_BYTES = 1 << 26


def scan(path: Path, class_names: Sequence[str] | None = None) -> Tree:
    """Read all of a .npz file, and return its classes and pictures.

    Raises:
        DataError: the file is missing, truncated or without images, an array is missing or of another kind, the offsets do not
            increase from 0 to the blob's end, or a label has no class name.
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
    if not labels.size:
        raise DataError(f"{path} holds no images; at least one is needed.")
    labels, names = named_labels(labels, class_names, path)
    pictures = (
        PackedPicture(f"image {number} of {path}", blob[start:stop])
        for number, (start, stop) in enumerate(itertools.pairwise(offsets.tolist()))
    )
    return Tree(tuple(names), tuple(zip(pictures, labels.tolist(), strict=True)), named=True)


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
