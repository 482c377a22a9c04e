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
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.core.errors import CheckpointError
from hpctrain.core.intervals import Box, intersect, relative, shape_of, size_of, whole
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


#: by key, of the parts of a shard
ShardPlaces = Mapping[str, TensorPlace]


@dataclass(frozen=True)
class ShardFacts:
    """The facts of a written shard that others have to know.

    name: of the file. size: in bytes. sha256: of its root, over the checksums of all its parts. parts: key -> (shape of the
    tensor, dtype, box).
    """

    name: str
    size: int
    sha256: str
    parts: Mapping[str, tuple[tuple[int, ...], str, Box]]


class ShardReader:
    """Reads parts of one shard, which is opened once.

    A part that is read whole is always compared with its checksum. Of a smaller piece only its own bytes are read once all of the
    shard was compared, here (`verify`) or by the reader from which the places come; until then the whole part is.

    Args:
        places: of all its parts, from a reader that has compared them; None: none has yet.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, or belongs to another checkpoint.
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
        """Read all parts, a block at a time, and compare them; their places, for other readers."""
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
        """Return the elements of a box, which lies in the part of that key, as a new array."""
        _, dtype, held = self._shard.parts[key]
        place = self._places[key]
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
        """Let go of the file."""
        os.close(self._descriptor)

    def _index(self) -> ShardPlaces:
        index = index_store(self._path)
        if index.sha256 != self._shard.sha256 or not index.places.keys() >= self._shard.parts.keys():
            raise CheckpointError(f"The shard {self._path} belongs to another checkpoint, or is damaged; use an older one.")
        return index.places

    def _fill(self, key: str, view: memoryview, offset: int) -> None:
        done = 0
        try:
            while done < len(view) and (count := os.preadv(self._descriptor, [view[done:]], offset + done)):
                done += count
        except OSError as error:
            raise CheckpointError(
                f"Tensor {key} in {self._path} cannot be read ({error.strerror}); use an older checkpoint."
            ) from error
        if done < len(view):
            raise self._damaged(key)

    def _damaged(self, key: str) -> CheckpointError:
        return CheckpointError(f"Tensor {key} in {self._path} does not match its checksum; use an older checkpoint.")


def _open_sized(path: Path, size: int) -> int:
    """Return a descriptor of a file of exactly that size."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise CheckpointError(f"The shard {path} is missing; use an older checkpoint.") from error
    except OSError as error:
        raise CheckpointError(f"The shard {path} cannot be opened ({error.strerror}); allow it, or use an older one.") from error
    actual = os.fstat(descriptor).st_size
    if actual == size:
        return descriptor
    os.close(descriptor)
    raise CheckpointError(f"The shard {path} has {actual} bytes instead of {size}; use an older checkpoint.")


def contiguous_runs(held: Box, box: Box, itemsize: int) -> tuple[int, Iterator[int]]:
    """Return the length of the contiguous runs of a box in a C-contiguous array that holds `held`, and where each begins.

    The runs come in the order of the box's elements. Both boxes are in the same coordinates.
    """
    shape, lengths = shape_of(held), shape_of(box)
    if 0 in lengths:
        return 0, iter(())
    strides = [itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape)  # the dims from here on are whole, so that one run goes through the dim before them
    while inner > 0 and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)
    starts = [start - first for (start, _), (first, _) in zip(box, held, strict=True)]
    begin = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    places = product(*(range(0, lengths[dim] * strides[dim], strides[dim]) for dim in range(outer)))
    return itemsize * math.prod(lengths[outer:]), (begin + sum(place) for place in places)


#: more open files than this a process need not have
_MOST_READERS = 64


class ShardedTensors(Mapping[str, np.ndarray]):
    """Tensors by key, whole (`tensors[key]`) or a piece of them (`part`). Reading opens the shards that have it.

    Several readers of one checkpoint may share its verification: each verifies some of the shards and receives the places of the
    others' (`trust`). Until a shard is verified, its parts are read whole, and compared.

    Args:
        directory: of the shards.

    Raises:
        CheckpointError: on reading: a shard is missing or damaged.
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
        """Return shape and dtype of a tensor; reads nothing."""
        return self._facts[key]

    @property
    def shards(self) -> Sequence[ShardFacts]:
        """The shards, by number."""
        return self._shards

    def part(self, key: str, box: Box) -> np.ndarray:
        """Return the elements of a box of a tensor, in a new array."""
        if [place for _, place in self._places[key]] == [box]:
            return self._reader(self._places[key][0][0]).read(key, box)
        values = np.empty(shape_of(box), self._facts[key][1])
        for number, there in self._places[key]:
            common = intersect(box, there)
            if common is not None:
                values[relative(common, box)] = self._reader(number).read(key, common)
        return values

    def verify(self, numbers: Iterable[int] | None = None) -> dict[int, ShardPlaces]:
        """Read all of the shards of these numbers, or of all shards, one block at a time; the places of their parts."""
        chosen = list(range(len(self._shards)) if numbers is None else numbers)
        self._verified |= {number: self._reader(number).verify() for number in chosen}
        return {number: self._verified[number] for number in chosen}

    def trust(self, verified: Mapping[int, ShardPlaces]) -> None:
        """Take it that these shards were verified, by who gave the places of their parts."""
        self._verified |= verified
        self.close()

    def close(self) -> None:
        """Let go of all files; they are opened again where they are needed."""
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
    """Return the tensors and the metadata of a checkpoint that is one file: one shard with whole tensors.

    Raises:
        CheckpointError: as `index_store`.
    """
    index = index_store(path)
    parts = {name: (place.shape, place.dtype, whole(place.shape)) for name, place in index.places.items()}
    return ShardedTensors(path.parent, [ShardFacts(path.name, path.stat().st_size, index.sha256, parts)]), index.meta


def read_file(path: Path) -> tuple[dict[str, np.ndarray], Mapping[str, object]]:
    """Read all tensors and the metadata of a checkpoint that is one file, and verify every checksum.

    Raises:
        CheckpointError: as `index_store`, or a tensor is damaged.
    """
    tensors, meta = open_file(path)
    with contextlib.closing(tensors):
        return dict(tensors), meta
