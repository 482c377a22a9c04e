"""One HDF5 file of named tensors and JSON metadata with checksums over all bytes; readers of files and shards.

Each tensor is a contiguous little-endian dataset under its name ("parameters/fc.weight" is in the group "parameters"). Its
attribute `sha256` covers dtype, shape and elements. The dataset `meta` holds JSON as UTF-8 text, also with `sha256`. The root has
the attributes `format`, `format_version`, `hpctrain`, `numpy` (versions of the writer) and `sha256`, over the list of all names
and checksums. The root's checksum is written last, so a file without it is unfinished.

HDF5 itself never writes to the disk. Its structures stay in memory, and `StoreFile` writes arrays directly into the file. There
are two reasons: the HDF5 library has one lock for the whole process, which no thread may hold while it waits for a disk; and the
library cannot handle a full disk.

A checkpoint file is read as one shard with whole tensors (`open_file`). `ShardedTensors` reads tensors of one or more shards on
access, and only the pieces that are needed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.core.errors import CheckpointError
from hpctrain.core.files import open_own, open_regular, write_at
from hpctrain.core.intervals import Box, intersect, relative, shape_of, size_of, whole
from hpctrain.storage.weights_file import SUFFIXES as WEIGHT_SUFFIXES
from hpctrain.version import __version__

#: bytes of a block that is read or written at once, and whose checksum is computed while it is in the cache
_BLOCK = 1 << 22


class StoreFile(io.RawIOBase):
    """New file, passed to HDF5 as a file object that keeps HDF5's writes in memory.

    `place` writes arrays to the disk; `finish` writes the bytes that HDF5 has written.

    Args:
        file: path of the file, which replaces an earlier one; or the descriptor of an open file. This object closes the
            descriptor, and keeps the bytes that HDF5 does not overwrite.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, file: Path | int) -> None:
        if not isinstance(file, int):  # on file systems with one owner for all files, only a new file is known to be the user's
            file.unlink(missing_ok=True)
            file = open_own(file, os.O_RDWR | os.O_CREAT)
        self._descriptor = file
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
        """Read the bytes that HDF5 has written at the current position. Other bytes are zero."""
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
        """Write the elements of a C-contiguous array to the space that HDF5 has reserved for them.

        Args:
            seen: callback for checksums, called with each block of bytes in order.

        Raises:
            OSError: the elements cannot be written.
        """
        view = array.reshape(-1).view(np.uint8).data
        while view:
            count = os.pwrite(self._descriptor, view[:_BLOCK], offset)
            seen(view[:count])
            view, offset = view[count:], offset + count
        self._size = max(self._size, offset)

    def finish(self) -> None:
        """Write the bytes of HDF5 to the file, and wait until the file is on the disk. Call it after HDF5 has closed the file.

        Raises:
            OSError: the file cannot be written.
        """
        os.ftruncate(self._descriptor, self._size)
        for offset, data in self._written:
            write_at(self._descriptor, data, offset)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file, unless it is closed, without waiting for the disk. Without a preceding `finish` it is unreadable."""
        if not self.closed:
            super().close()
            os.close(self._descriptor)


FORMAT = "hpctrain-checkpoint"
FORMAT_VERSION = 1
_META = "meta"
#: from version 1.10 on HDF5 stores checksums of its own structures, so damage to them is detected. Its heap of variable-length
#: values has none: a flipped bit there can cause an endless loop, so texts are stored with a fixed length (`np.bytes_`)
_LIBVER = ("v110", "v110")
#: exceptions that h5py raises on damaged files, depending on the damaged byte
_DAMAGE = (OSError, KeyError, RuntimeError, ValueError, TypeError, AttributeError)


@dataclass(frozen=True)
class TensorPlace:
    """Place of a tensor's elements in a file.

    Attributes:
        offset: position of the first element in the file, in bytes.
        sha256: checksum over dtype, shape and elements.
    """

    offset: int
    sha256: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class StoreIndex:
    """Verified places, checksums and metadata of a file. The elements of its tensors are not verified.

    Attributes:
        sha256: checksum of the root, over the names and checksums of all tensors.
    """

    places: Mapping[str, TensorPlace]
    sha256: str
    meta: Mapping[str, object]


def begun_digest(dtype: np.dtype, shape: tuple[int, ...]) -> hashlib._Hash:
    """Return a sha256 object over dtype and shape of an array, to be updated with the elements."""
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
    """Return a NumPy scalar as a Python number, for `json.dumps(default=plain)`. Raise a TypeError for other values."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be stored in a checkpoint's metadata")


def write_store(path: Path, tensors: Mapping[str, np.ndarray], meta: Mapping[str, object]) -> str:
    """Write a new file `path`, synchronise it with the disk, and return its root's checksum.

    `tensors` is read once, one tensor at a time, in its own order, so the tensors of a lazy mapping are never all in memory. Each
    name must have a group ("group/name"). Memory holds the current tensor and at most one copy of it. Neither the GIL nor HDF5's
    lock is held while elements are written or added to a checksum.

    Raises:
        OSError, RuntimeError: the file cannot be written.
    """
    digests: dict[str, str] = {}
    with StoreFile(path) as stored:
        with h5py.File(stored, "w", libver=_LIBVER) as file:
            for name in tensors:
                assert "/" in name, f"{name} has no group"
                digests[name] = _write_tensor(file, stored, name, tensors[name])
            text = json.dumps(dict(meta), default=plain, sort_keys=True, indent=1).encode()
            # A dataset, because an attribute holds 64 KiB at most and a plan may be longer.
            dataset = file.create_dataset(_META, data=np.bytes_(text), dtype=h5py.string_dtype("utf-8", len(text)))
            digests[_META] = hashlib.sha256(text).hexdigest()
            dataset.attrs["sha256"] = np.bytes_(digests[_META])
            file.attrs["format"] = np.bytes_(FORMAT)
            file.attrs["format_version"] = FORMAT_VERSION
            file.attrs["hpctrain"] = np.bytes_(__version__)
            file.attrs["numpy"] = np.bytes_(np.__version__)
            root = _list_digest(digests)
            file.attrs["sha256"] = np.bytes_(root)
        stored.finish()
    return root


def _write_tensor(file: h5py.File, stored: StoreFile, name: str, array: np.ndarray) -> str:
    """Reserve a contiguous dataset through HDF5, write the elements into it, and return their checksum."""
    assert array.dtype.kind in "biuf", f"dtype {array.dtype} cannot be stored in a checkpoint"
    array = np.asarray(array, array.dtype.newbyteorder("<"), order="C")
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


def read_store_meta(path: Path) -> dict[str, object]:
    """Return the metadata of `path`, verified by its checksum, without reading tensors.

    Raises:
        CheckpointError: see `index_store`.
    """
    with _opened(path) as file:
        return _meta(path, file)


def _text(item: h5py.Group | h5py.Dataset, attribute: str) -> str:
    """Return an attribute as text; empty if it is missing."""
    value = item.attrs.get(attribute, b"")
    return value.decode() if isinstance(value, bytes) else str(value)


def _check_header(path: Path, file: h5py.File) -> None:
    if _text(file, "format") != FORMAT:
        raise CheckpointError(f"The file {path} is an HDF5 file, but not a checkpoint of hpctrain; give the path of one.")
    version = file.attrs.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint {path} has format version {version}, but hpctrain {__version__} reads version {FORMAT_VERSION}; "
            f"use hpctrain {_text(file, 'hpctrain')}, which wrote it."
        )


def root_digest(path: Path) -> str:
    """Return the stored checksum over the names and checksums of all tensors, without verifying it.

    Raises:
        CheckpointError: the file cannot be read.
    """
    with _damage_in(path), h5py.File(path, "r", locking=False) as file:
        return _text(file, "sha256")


def index_store(path: Path) -> StoreIndex:
    """Return the places of all tensors and the metadata, without reading tensors.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, not a checkpoint, or has another format version. The message
            names the damaged part.
    """
    with _opened(path) as file:
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        digests = {name: _text(file[name], "sha256") for name in names}
        root = _list_digest(digests)
        if _META not in digests or _text(file, "sha256") != root:
            raise CheckpointError(
                f"The list of tensors in checkpoint {path} does not match its checksum; use an older checkpoint."
            )
        size = path.stat().st_size
        places = {name: _place(file[name], digests[name], size) for name in names if name != _META}
        return StoreIndex(places, root, _meta(path, file))


def _place(tensor: h5py.Dataset, sha256: str, file_size: int) -> TensorPlace:
    offset = tensor.id.get_offset()  # None if there are no elements
    # Sparse, compressed, external and virtual tensors, which `write_store` never writes, may claim any number of bytes.
    if tensor.is_virtual or (tensor.nbytes and (offset is None or offset + tensor.nbytes > file_size)):
        raise ValueError(f"{tensor.name[1:]} has more bytes than the file")
    return TensorPlace(offset or 0, sha256, tensor.shape, tensor.dtype.str)


def _meta(path: Path, file: h5py.File) -> dict[str, object]:
    require_stored(file, _META)
    dataset = file[_META]
    if dataset.nbytes > path.stat().st_size:
        raise ValueError("the metadata have more bytes than the file")
    text = dataset[()]
    if hashlib.sha256(text).hexdigest() != _text(dataset, "sha256"):
        raise CheckpointError(f"The metadata in checkpoint {path} does not match its checksum; use an older checkpoint.")
    return dict(json.loads(text))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """Yield an open checkpoint file of this version."""
    with _damage_in(path):
        if not path.is_file():
            raise CheckpointError(f"There is no checkpoint {path.absolute()}; give the path of an existing one.")
        if path.suffix in WEIGHT_SUFFIXES and not h5py.is_hdf5(path):
            raise CheckpointError(
                f"{path} has weights only, but must be a checkpoint; give a run directory, or a checkpoint of it."
            )
        # Many parallel file systems have no locks, and a finished checkpoint is never written again.
        with h5py.File(path, "r", locking=False) as file:
            _check_header(path, file)
            yield file


@contextlib.contextmanager
def _damage_in(path: Path) -> Iterator[None]:
    """Replace errors of a block that reads a checkpoint by a CheckpointError that blames the system or the file."""
    try:
        yield
    except MemoryError as error:
        raise CheckpointError(
            f"The checkpoint {path} is damaged, or needs more memory; use an older one or free memory."
        ) from error
    except _DAMAGE as error:
        if isinstance(error, OSError) and system_reason(error) is not None:
            raise unreadable(f"The checkpoint {path}", error) from error
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"The checkpoint {path} is truncated or damaged: HDF5 cannot read it ({reason}); use an older checkpoint."
        ) from error


def system_reason(error: BaseException) -> str | None:
    """Return the operating system's message in an error, also one of HDF5, such as "Input/output error"; None if it has none."""
    if not isinstance(error, OSError):
        return None
    found = re.search(r"error message = '([^']*)'", str(error))
    if found is not None and found[1] != "Success":
        return found[1]
    # h5py's errors have long texts, and error numbers that are not reliable.
    known = error.strerror is not None and error.errno is not None and error.errno in errno.errorcode
    return error.strerror if known and "(" not in str(error.strerror) else None


def unreadable(what: str, error: OSError) -> CheckpointError:
    """Return the error for a part of a checkpoint, `what`, that the system does not let this process read."""
    advice = "grant read permission" if isinstance(error, PermissionError) else "remove the cause"
    return CheckpointError(f"{what} cannot be read ({system_reason(error) or error}); {advice}, or use an older checkpoint.")


def require_stored(file: h5py.File, name: str) -> None:
    """Raise a ValueError unless the file itself stores all values of a dataset.

    HDF5 replaces missing values by a fill value without an error, waits for pipes, and reads any file that a link, an external
    storage or a virtual dataset names. Call this before the first access to the dataset, since its name may be that of a link.
    Values that were never written to an allocated block or chunk look like stored ones.

    Raises:
        ValueError: values are missing or elsewhere; the message is a clause with the reason.
        KeyError: the file has no such object.
    """
    item = file
    for word in filter(None, name.split("/")):
        link = item.get(word, getlink=True) if isinstance(item, h5py.Group) else None
        if link is None:
            raise KeyError(name)
        if not isinstance(link, h5py.HardLink):
            raise ValueError("it is a link")
        item = item[word]
    if not isinstance(item, h5py.Dataset) or not item.size:
        return
    if item.is_virtual or item.id.get_create_plist().get_external_count():
        raise ValueError("its values are in other files")
    if item.chunks is not None:
        chunks = math.prod(-(-length // each) for length, each in zip(item.shape, item.chunks, strict=True))
        if item.id.get_num_chunks() != chunks:
            raise ValueError(f"{item.id.get_num_chunks()} of its {chunks} chunks were written")
    elif item.id.get_storage_size() == 0:
        raise ValueError("no values were written")


#: places of a shard's parts, by key
ShardPlaces = Mapping[str, TensorPlace]


@dataclass(frozen=True)
class ShardFacts:
    """Facts about a written shard that other ranks need.

    Attributes:
        name, size: name of the file in the checkpoint's directory, and its size in bytes.
        sha256: checksum of the root, over the checksums of all parts.
        parts: (shape of the tensor, dtype, box of the part in the tensor), by key.
    """

    name: str
    size: int
    sha256: str
    parts: Mapping[str, tuple[tuple[int, ...], str, Box]]


class ShardReader:
    """Reader of the parts of one shard, whose file stays open.

    A part that is read whole is always compared with its checksum. Once the whole shard is verified, by `verify` or by the reader
    that supplied `places`, a smaller piece is read without the rest of its part. Before that the whole part is read and verified.

    Args:
        places: places of all parts, from a reader that verified them; None: the parts are not verified yet.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, or belongs to another checkpoint. Also raised by `verify` and
            `read`.
    """

    def __init__(self, path: Path, shard: ShardFacts, places: ShardPlaces | None = None) -> None:
        self._path, self._shard = path, shard
        self._descriptor = _open_sized(path, shard.size)
        self._verified = places is not None
        try:
            self._places = self._index() if places is None else places
        except BaseException:
            os.close(self._descriptor)
            raise

    def verify(self) -> ShardPlaces:
        """Read and verify all parts, one block at a time, and return their places for other readers."""
        block = np.empty(_BLOCK, np.uint8)
        for key, (_, dtype, box) in self._shard.parts.items():
            place, end = self._places[key], size_of(box) * np.dtype(dtype).itemsize
            state = begun_digest(np.dtype(dtype), shape_of(box))
            for begin in range(0, end, _BLOCK):
                view = block[: min(_BLOCK, end - begin)]
                self._fill(key, view.data, place.offset + begin)
                state.update(view.data)
            if state.hexdigest() != place.sha256:
                raise self._damaged(key)
        self._verified = True
        return self._places

    def read(self, key: str, box: Box) -> np.ndarray:
        """Return the elements of a box as a new array. The box must lie within the part of this key."""
        (_, dtype, held), place = self._shard.parts[key], self._places[key]
        if box != held and not self._verified:
            return self.read(key, held)[relative(box, held)]
        values = np.empty(shape_of(box), dtype)
        view = values.reshape(-1).view(np.uint8).data
        run, offsets = contiguous_runs(held, box, values.itemsize)
        for number, offset in enumerate(offsets):
            self._fill(key, view[number * run : (number + 1) * run], place.offset + offset)
        if box == held and digest_of(values) != place.sha256:
            raise self._damaged(key)
        return values

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _index(self) -> ShardPlaces:
        index = index_store(self._path)
        if index.sha256 != self._shard.sha256 or not index.places.keys() >= self._shard.parts.keys():
            raise CheckpointError(f"The shard {self._path} is damaged or belongs to another checkpoint; use an older checkpoint.")
        return index.places

    def _fill(self, key: str, view: memoryview, offset: int) -> None:
        try:
            while view:
                if not (count := os.preadv(self._descriptor, [view], offset)):  # the file has ended
                    raise self._damaged(key)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise unreadable(f"Tensor {key} in {self._path}", error) from error

    def _damaged(self, key: str) -> CheckpointError:
        return CheckpointError(f"Tensor {key} in {self._path} does not match its checksum; use an older checkpoint.")


def _open_sized(path: Path, size: int) -> int:
    """Open a file for reading and return its descriptor. Raise a CheckpointError unless it has exactly `size` bytes."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"The shard {path} is missing; use an older checkpoint.") from error
    except OSError as error:
        raise unreadable(f"The shard {path}", error) from error
    actual = os.fstat(descriptor).st_size
    if actual == size:
        return descriptor
    os.close(descriptor)
    raise CheckpointError(f"The shard {path} has {actual} bytes instead of {size}; use an older checkpoint.")


def contiguous_runs(held: Box, box: Box, itemsize: int) -> tuple[int, Iterator[int]]:
    """Return the length of the contiguous runs of `box` in a C-contiguous array that holds `held`, and the offset of each run.

    Lengths and offsets are in bytes. The runs are in the order of the box's elements. Both boxes use the same coordinates.
    """
    shape, lengths = shape_of(held), shape_of(box)
    if 0 in lengths:
        return 0, iter(())
    strides = [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape)  # dims from `inner` on are whole, so a run extends over the dim before them
    while inner > 0 and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)
    starts = [start - first for (start, _), (first, _) in zip(box, held, strict=True)]
    begin = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    places = product(*(range(0, lengths[dim] * strides[dim], strides[dim]) for dim in range(outer)))
    return itemsize * math.prod(lengths[outer:]), (begin + sum(place) for place in places)


#: maximum number of open shards
_MOST_READERS = 64


class ShardedTensors(Mapping[str, np.ndarray]):
    """Tensors of shards by key, read whole (`tensors[key]`) or in part (`part`). Reading opens the shards that hold the tensor.

    Several readers of one checkpoint may share the verification: each verifies some of the shards, and receives the places of the
    parts of the others (`trust`). Parts of an unverified shard are read whole and verified.

    Raises:
        CheckpointError: on reading, if a shard is missing or damaged.
    """

    def __init__(self, directory: Path, shards: Sequence[ShardFacts]) -> None:
        self._directory, self._shards = directory, shards
        self._verified: dict[int, ShardPlaces] = {}
        self._readers: dict[int, ShardReader] = {}
        self._facts: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        self._places: dict[str, list[tuple[int, Box]]] = {}
        for number, shard in enumerate(shards):
            for key, (shape, dtype, box) in shard.parts.items():
                self._facts[key] = shape, np.dtype(dtype)
                self._places.setdefault(key, []).append((number, box))

    def __getitem__(self, key: str) -> np.ndarray:
        return self.part(key, whole(self._facts[key][0]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def __contains__(self, key: object) -> bool:
        return key in self._facts

    def facts(self, key: str) -> tuple[tuple[int, ...], np.dtype]:
        """Return shape and dtype of a tensor, without reading."""
        return self._facts[key]

    @property
    def shards(self) -> Sequence[ShardFacts]:
        """Facts about the shards, by shard number."""
        return self._shards

    def part(self, key: str, box: Box) -> np.ndarray:
        """Return the elements of a box of a tensor as a new array."""
        if [place for _, place in self._places[key]] == [box]:
            return self._reader(self._places[key][0][0]).read(key, box)
        values = np.empty(shape_of(box), self._facts[key][1])
        for number, place in self._places[key]:
            common = intersect(box, place)
            if common is not None:
                values[relative(common, box)] = self._reader(number).read(key, common)
        return values

    def verify(self, numbers: Iterable[int] | None = None) -> dict[int, ShardPlaces]:
        """Read and verify the given shards, or all, one block at a time, and return the places of their parts by shard number."""
        chosen = list(range(len(self._shards)) if numbers is None else numbers)
        self._verified |= {number: self._reader(number).verify() for number in chosen}
        return {number: self._verified[number] for number in chosen}

    def trust(self, verified: Mapping[int, ShardPlaces]) -> None:
        """Treat these shards as verified. `verified` holds the places of their parts, from the reader that verified them."""
        self._verified |= verified
        self.close()

    def close(self) -> None:
        """Close all files. Each is reopened at its next use."""
        while self._readers:
            self._readers.popitem()[1].close()

    def _reader(self, number: int) -> ShardReader:
        if number not in self._readers:
            if len(self._readers) >= _MOST_READERS:
                self._readers.pop(next(iter(self._readers))).close()
            shard = self._shards[number]
            self._readers[number] = ShardReader(self._directory / shard.name, shard, self._verified.get(number))
        return self._readers[number]


def open_file(path: Path) -> tuple[ShardedTensors, Mapping[str, object]]:
    """Return the tensors and the metadata of a checkpoint that is one file, as one shard with whole tensors.

    Raises:
        CheckpointError: see `index_store`.
    """
    index = index_store(path)
    parts = {name: (place.shape, place.dtype, whole(place.shape)) for name, place in index.places.items()}
    return ShardedTensors(path.parent, [ShardFacts(path.name, path.stat().st_size, index.sha256, parts)]), index.meta
