"""Named tensors and JSON metadata in one HDF5 file, every byte of them under a checksum.

Layout: one contiguous little-endian dataset per tensor at its name ("parameters/fc.weight" is in the group "parameters"), with
the attribute `sha256` over dtype, shape and elements; the dataset `meta`, JSON as UTF-8 text, has one, too; and on the root
the attributes `format`, `format_version`, `hpctrain`, `numpy` (versions of the writer) and `sha256`, over the list of all
names and checksums. The root's checksum is written last: a file without it was never finished.

HDF5 itself writes no byte to the disk: its structures stay in memory, and arrays are written next to it (`StoreFile`). So its
library, whose lock everything that reads HDF5 shares, never waits for a disk, and never learns that one is full.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.core.errors import CheckpointError
from hpctrain.version import __version__

#: bytes that one call writes, right after their checksum was taken
_BLOCK = 1 << 22


class StoreFile(io.RawIOBase):
    """A new file, as HDF5 sees it. `place` brings arrays to the disk, and `finish` what HDF5 has written.

    Args:
        keep: whether bytes of a file of this name stay where they are, if HDF5 puts nothing else there.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, *, keep: bool = False) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | (0 if keep else os.O_TRUNC), 0o666)
        self._written: list[tuple[int, bytes]] = []
        self._at = self._size = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET:
            offset += self._at if whence == os.SEEK_CUR else self._size
        self._at = offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read the bytes that HDF5 has written there; zeros elsewhere."""
        view = memoryview(buffer).cast("B")
        view[:] = bytes(len(view))
        for offset, data in self._written:
            start, stop = max(offset, self._at), min(offset + len(data), self._at + len(view))
            if start < stop:
                view[start - self._at : stop - self._at] = data[start - offset : stop - offset]
        self._at += len(view)
        return len(view)

    def write(self, buffer: Any) -> int:
        data = bytes(memoryview(buffer).cast("B"))
        self._written.append((self._at, data))
        self._at += len(data)
        self._size = max(self._size, self._at)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        self._size = self._at if size is None else size
        return self._size

    def place(self, offset: int, array: np.ndarray, seen: Callable[[memoryview], None]) -> None:
        """Write the elements of a C-contiguous array to a place that HDF5 has reserved for them.

        seen: is given all bytes, in order, a block at a time.

        Raises:
            OSError: they cannot be written.
        """
        view = array.reshape(-1).view(np.uint8).data
        for begin in range(0, len(view), _BLOCK):
            block = view[begin : begin + _BLOCK]
            seen(block)
            self._write_all(offset + begin, block)
        self._size = max(self._size, offset + len(view))

    def finish(self) -> None:
        """Write what HDF5 wrote, once it has closed the file, and wait until all is on the disk.

        Raises:
            OSError: it cannot be written.
        """
        os.ftruncate(self._descriptor, self._size)
        for offset, data in self._written:
            self._write_all(offset, memoryview(data))
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Let go of the file, without waiting for the disk; without `finish`, nothing can read it. May be called twice."""
        if not self.closed:
            super().close()
            os.close(self._descriptor)

    def _write_all(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], offset + done)


FORMAT = "hpctrain-checkpoint"
FORMAT_VERSION = 2
#: 1: the position in an epoch was counted in steps
_READABLE_VERSIONS = (1, 2)
_META = "meta"
#: from this version on HDF5 keeps checksums of its own structures, so that damage to them is found instead of followed; its
#: heap of variable-length values has none even then (a flipped bit there can make it loop without end), hence `np.bytes_` below
_LIBVER = ("v110", "v110")
#: what h5py raises on a damaged file, depending on the byte that is damaged
_DAMAGE = (OSError, KeyError, RuntimeError, ValueError, TypeError, AttributeError, MemoryError)


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor's elements in a file. offset: in bytes. sha256: over dtype, shape and elements."""

    offset: int
    sha256: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class StoreIndex:
    """Index of a file's tensors: all that is stored about them, verified; the tensors themselves are not.

    Attributes:
        places: by name. sha256: of the root, over the names and checksums of all tensors. meta: the metadata.
    """

    places: Mapping[str, TensorPlace]
    sha256: str
    meta: Mapping[str, object]


def _little_endian(array: np.ndarray) -> np.ndarray:
    """Return the array itself, or one copy of it if it is not C-contiguous or of another byte order."""
    assert array.dtype.kind in "biuf", f"dtype {array.dtype} has no place in a checkpoint"
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


def begun_digest(dtype: np.dtype, shape: tuple[int, ...]) -> hashlib._Hash:
    """Return a sha256 over dtype and shape of an array, to be updated with its elements."""
    return hashlib.sha256(f"{dtype.str} {shape}\n".encode())


def digest_of(array: np.ndarray) -> str:
    """Return the sha256 over dtype, shape and elements of a C-contiguous array."""
    state = begun_digest(array.dtype, array.shape)
    state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def _list_digest(digests: Mapping[str, str]) -> str:
    lines = "".join(f"{digests[name]} {name}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def plain(value: Any) -> Any:
    """Return a number of NumPy as JSON's; json calls it for types that it does not know."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no place in a checkpoint's metadata")


def write_store(path: Path, tensors: Mapping[str, np.ndarray], meta: Mapping[str, object]) -> str:
    """Write a new file `path` and synchronise it with the disk; return its root's checksum.

    `tensors` is read once, one at a time, in its own order: a lazy mapping never needs them together.
    Names have a group ("group/name"). Takes no memory beyond the current tensor and at most one copy of it. Neither Python's lock
    nor that of HDF5 is held while elements are written or added to a checksum.

    Raises:
        OSError, RuntimeError: the file cannot be written.
    """
    digests: dict[str, str] = {}
    with StoreFile(path) as stored:
        with h5py.File(stored, "w", libver=_LIBVER) as file:
            for name in tensors:
                assert "/" in name, f"{name} has no group"
                digests[name] = _write_tensor(file, stored, name, _little_endian(tensors[name]))
            digests[_META] = _write_meta(file, meta)
            file.attrs["format"] = np.bytes_(FORMAT)
            file.attrs["format_version"] = FORMAT_VERSION
            file.attrs["hpctrain"] = np.bytes_(__version__)
            file.attrs["numpy"] = np.bytes_(np.__version__)
            root = _list_digest(digests)
            file.attrs["sha256"] = np.bytes_(root)
        stored.finish()
    return root


def _write_tensor(file: h5py.File, stored: StoreFile, name: str, array: np.ndarray) -> str:
    """Have HDF5 reserve the place of a contiguous dataset, and write its elements there."""
    creation, linking = h5py.h5p.create(h5py.h5p.DATASET_CREATE), h5py.h5p.create(h5py.h5p.LINK_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    linking.set_create_intermediate_group(True)
    kind, space = h5py.h5t.py_create(array.dtype, logical=True), h5py.h5s.create_simple(array.shape)
    dataset = h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, space, creation, linking))
    state = begun_digest(array.dtype, array.shape)
    if array.size:
        stored.place(dataset.id.get_offset(), array, state.update)
    digest = state.hexdigest()
    dataset.attrs["sha256"] = np.bytes_(digest)
    return digest


def _write_meta(file: h5py.File, meta: Mapping[str, object]) -> str:
    text = json.dumps(dict(meta), default=plain, sort_keys=True, indent=1).encode()
    # A dataset, because an attribute holds 64 KiB at most and a plan may be longer.
    dataset = file.create_dataset(_META, data=np.bytes_(text), dtype=h5py.string_dtype("utf-8", len(text)))
    digest = hashlib.sha256(text).hexdigest()
    dataset.attrs["sha256"] = np.bytes_(digest)
    return digest


def read_store_meta(path: Path) -> dict[str, object]:
    """Return the metadata of `path`, verified by their checksum. Reads nothing about tensors.

    Raises:
        CheckpointError: as `index_store`.
    """
    with _opened(path) as file:
        return _meta(path, file)


def _text(item: h5py.Group | h5py.Dataset, attribute: str) -> str:
    """Return an attribute's text; empty if there is none."""
    value = item.attrs.get(attribute, b"")
    return value.decode() if isinstance(value, bytes) else str(value)


def _check_header(path: Path, file: h5py.File) -> None:
    if _text(file, "format") != FORMAT:
        raise CheckpointError(f"The file {path} is HDF5 but no checkpoint of hpctrain.")
    version = file.attrs.get("format_version")
    if version not in _READABLE_VERSIONS:
        raise CheckpointError(
            f"The checkpoint {path} has format version {version}, written by hpctrain {_text(file, 'hpctrain')}; "
            f"hpctrain {__version__} reads versions up to {FORMAT_VERSION}."
        )


def root_digest(path: Path) -> str:
    """Return the stored checksum over the names and checksums of all tensors, without verifying it.

    Raises:
        CheckpointError: HDF5 cannot read the file.
    """
    with _damage_in(path), h5py.File(path, "r", locking=False) as file:
        return _text(file, "sha256")


def index_store(path: Path) -> StoreIndex:
    """Return the places of all tensors, and the metadata. Reads no element of a tensor.

    Raises:
        CheckpointError: missing, truncated, not a checkpoint, of another format version, or damaged (the message names what).
    """
    with _opened(path) as file:
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        digests = {name: _text(file[name], "sha256") for name in names}
        root = _list_digest(digests)
        if _META not in digests or _text(file, "sha256") != root:
            raise CheckpointError(f"The list of tensors in checkpoint {path} does not match its checksum; use an older one.")
        size = path.stat().st_size
        places = {name: _place(file[name], digests[name], size) for name in names if name != _META}
        return StoreIndex(places, root, _meta(path, file))


def _place(tensor: h5py.Dataset, sha256: str, file_size: int) -> TensorPlace:
    offset = tensor.id.get_offset()  # None if there are no elements
    # Sparse or compressed tensors, which `write_store` never writes, may claim any number of bytes.
    if tensor.nbytes and (offset is None or offset + tensor.nbytes > file_size):
        raise ValueError(f"{tensor.name[1:]} has more bytes than the file")
    return TensorPlace(offset or 0, sha256, tensor.shape, tensor.dtype.str)


def _meta(path: Path, file: h5py.File) -> dict[str, object]:
    dataset = file[_META]
    if dataset.nbytes > path.stat().st_size:
        raise ValueError("the metadata have more bytes than the file")
    text = dataset[()]
    if hashlib.sha256(text).hexdigest() != _text(dataset, "sha256"):
        raise CheckpointError(f"The metadata in checkpoint {path} does not match its checksum; use an older one.")
    return dict(json.loads(text))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """Yield an open checkpoint file of a readable version."""
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {path}.")
    # Many parallel file systems have no locks, and a finished checkpoint is never written again.
    with _damage_in(path), h5py.File(path, "r", locking=False) as file:
        _check_header(path, file)
        yield file


@contextlib.contextmanager
def _damage_in(path: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"The checkpoint {path} is truncated or damaged, HDF5 cannot read it ({reason}); use an older one."
        ) from error
