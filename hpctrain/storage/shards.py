"""Sharded checkpoints: a directory with a shard of each rank, and a manifest that is written last and lists what belongs to it.

The directory has another name until its manifest is on the disk: what has the name of a checkpoint was once complete. A shard
holds parts of tensors, each with its place in the tensor (`Part`, `ShardFacts`); `WriteShares` is the rule by which holders of
the same tensors share what is written. `ShardedTensors` reads the tensors of a checkpoint when they are asked for, and no more
than the pieces that are needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.errors import CheckpointError
from hpctrain.core.files import TEXT_BYTES, read_bytes
from hpctrain.core.intervals import Box, even_interval, intersect, relative, replace_dim, shape_of, size_of, whole
from hpctrain.storage.atomic_write import not_written, partial_path, synchronise_directory, write_bytes
from hpctrain.storage.hdf5_store import TensorPlace, begun_digest, digest_of, index_store, plain, write_store

#: a smaller part is written by one of those that hold it, for each part of a file costs some time of its own
_SMALLEST_SHARED_BYTES = 1 << 16


class WriteShares:
    """Shares parts out over holders of the same: large ones evenly, small ones to those that have least so far.

    Args:
        number: of this holder. holders: of all.
    """

    def __init__(self, number: int, holders: int) -> None:
        self._number, self._loads = number, [0] * holders

    def own(self, box: Box, itemsize: int) -> Box | None:
        """Return this holder's box within one that all of them hold; None if it has none. Every holder must ask alike."""
        size, holders = size_of(box) * itemsize, len(self._loads)
        lengths = shape_of(box)
        dim = int(np.argmax(lengths)) if lengths else 0
        if size >= _SMALLEST_SHARED_BYTES and lengths[dim] >= holders:
            begin = box[dim][0]
            start, stop = even_interval(lengths[dim], holders, self._number)
            return replace_dim(box, dim, (begin + start, begin + stop))
        owner = self._loads.index(min(self._loads))
        self._loads[owner] += size
        return box if owner == self._number else None


#: by key, of the parts of a shard
ShardPlaces = Mapping[str, TensorPlace]

#: bytes that are read at once where elements are only compared
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Part:
    """A part of a tensor. shape: of the tensor; box: the part's place in it; values: C-contiguous, of the box's shape."""

    shape: tuple[int, ...]
    box: Box
    values: np.ndarray


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


def write_shard(directory: Path, rank: int, parts: Mapping[str, Part]) -> ShardFacts:
    """Write a rank's shard into the directory of an unfinished checkpoint, which may have to be made, and synchronise both.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = directory / f"shard-{rank:05d}.h5"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        sha256 = write_store(path, {key: part.values for key, part in parts.items()}, {"shard": rank})
        synchronise_directory(directory)
        size = path.stat().st_size
    except (OSError, RuntimeError) as error:
        raise not_written(f"The shard {path}", error) from error
    facts = {key: (part.shape, part.values.dtype.newbyteorder("<").str, part.box) for key, part in parts.items()}
    return ShardFacts(path.name, size, sha256, facts)


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
        self._descriptor = _open(path, shard.size)
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


def _open(path: Path, size: int) -> int:
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


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return numbers of things of these sizes for each rank: the largest first, each to the rank with the least so far."""
    loads = [0] * ranks
    numbers: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[number]
        numbers[rank].append(number)
    return numbers


SUFFIX = ".shards"
#: in the name of a checkpoint that is replaced by another one of its step
BEFORE = "-before"
MANIFEST, _DIGEST = "manifest.json", "manifest.sha256"
_FORMAT, _VERSION = "hpctrain-sharded-checkpoint", 1


def unfinished(path: Path, token: str) -> Path:
    """Return the directory for the unfinished checkpoint `path`. It names the calling process. token: of this attempt."""
    return partial_path(path, token)


def moved_away(path: Path) -> Path:
    """Return the name under which a checkpoint waits until another one of its step has taken its place; it can be read there."""
    return path.with_name(f"{path.stem}{BEFORE}{path.suffix}")


def publish(partial: Path, path: Path, shards: Sequence[ShardFacts], meta: Mapping[str, object]) -> None:
    """Make the checkpoint `path` of the shards in `partial`: all of them are on the disk. Whole or not there, at any moment.

    A checkpoint of the same name stays until this one is there; for a moment it has another name.

    Raises:
        CheckpointError: it cannot be written.
    """
    _check_complete(shards)
    facts = [{"name": s.name, "size": s.size, "sha256": s.sha256, "parts": s.parts} for s in shards if s.parts]
    content = {"format": _FORMAT, "format_version": _VERSION, "meta": dict(meta), "shards": facts}
    text = json.dumps(content, default=plain, sort_keys=True, indent=1).encode()
    try:
        write_bytes(partial / MANIFEST, text)
        write_bytes(partial / _DIGEST, f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode())
        before = moved_away(path)
        if path.exists():  # the same step once more: a directory that is not empty cannot be replaced
            if before.exists():
                delete(before)
            os.replace(path, before)
        os.replace(partial, path)
        synchronise_directory(path.parent)
        if before.exists():
            delete(before)
    except OSError as error:
        raise not_written(f"The checkpoint {path}", error) from error


def delete(path: Path) -> None:
    """Delete a sharded checkpoint. Interrupted, it leaves only what `leftovers.remove_left` removes.

    Raises:
        OSError: it cannot be deleted.
    """
    old = unfinished(path, "old")
    shutil.rmtree(old, ignore_errors=True)
    os.replace(path, old)
    shutil.rmtree(old)


def open_sharded(path: Path) -> tuple[ShardedTensors, dict[str, object]]:
    """Return tensors, which are read on access, and metadata, which are verified now.

    Raises:
        CheckpointError: there is none, or its manifest is damaged or of another version.
    """
    try:
        text, digest = read_bytes(path / MANIFEST), read_bytes(path / _DIGEST, TEXT_BYTES)
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} has no manifest ({error.strerror}); use an older one.") from error
    if digest != f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode():
        raise CheckpointError(f"The manifest of the checkpoint {path} does not match its checksum; use an older one.")
    content = json.loads(text)
    if content["format_version"] != _VERSION:
        raise CheckpointError(
            f"The checkpoint {path} has the sharded format version {content['format_version']}; this hpctrain reads {_VERSION}."
        )
    return ShardedTensors(path, [_shard(entry) for entry in content["shards"]]), content["meta"]


def manifest_digest(path: Path) -> str:
    """Return the stored checksum of a checkpoint's manifest, which covers those of all shards. Does not read the manifest.

    Raises:
        CheckpointError: the checksum is missing.
    """
    try:
        return read_bytes(path / _DIGEST, TEXT_BYTES).decode("ascii", "replace").partition(" ")[0]
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} has no manifest ({error.strerror}); use an older one.") from error


def _shard(entry: Mapping[str, Any]) -> ShardFacts:
    parts = {key: (tuple(shape), dtype, tuple(map(tuple, box))) for key, (shape, dtype, box) in entry["parts"].items()}
    return ShardFacts(entry["name"], entry["size"], entry["sha256"], parts)


def _check_complete(shards: Sequence[ShardFacts]) -> None:
    """Assert that all elements of all tensors are there, each once."""
    sizes: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        for key, (shape, _, box) in shard.parts.items():
            shapes[key] = shape
            sizes[key] = sizes.get(key, 0) + size_of(box)
    wrong = [key for key, shape in shapes.items() if sizes[key] != math.prod(shape)]
    assert not wrong, f"parts of {wrong[0]} have {sizes[wrong[0]]} elements, of {shapes[wrong[0]]}"
