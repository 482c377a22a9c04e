"""One rank's file of a sharded checkpoint: parts of tensors, each with its place in the tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from hpctrain.core.intervals import Box, relative, shape_of, size_of
from hpctrain.core.errors import CheckpointError
from hpctrain.storage.atomic_write import not_written, synchronise_directory
from hpctrain.storage.hdf5_store import TensorPlace, begun_digest, digest_of, index_store, write_store

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
    shard was compared, here (`verify`) or by somebody who told the places; until then the whole part is.

    Args:
        places: of all its parts, from a reader that has compared them; None: nobody has yet.

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
        """The elements of a box, which lies in the part of that key, as a new array."""
        _, dtype, held = self._shard.parts[key]
        place = self._places[key]
        if box != held and not self._verified:
            return self.read(key, held)[relative(box, held)]
        values = np.empty(shape_of(box), dtype)
        view = values.reshape(-1).view(np.uint8).data
        run, offsets = runs(held, box, values.itemsize)
        for number, offset in enumerate(offsets):
            self._fill(key, view[number * run : (number + 1) * run], place.offset + offset)
        if box == held and digest_of(values) != place.sha256:
            raise self._damaged(key)
        return values

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def _index(self) -> ShardPlaces:
        places, root = index_store(self._path)
        if root != self._shard.sha256 or not places.keys() >= self._shard.parts.keys():
            raise CheckpointError(f"The shard {self._path} belongs to another checkpoint, or is damaged; use an older one.")
        return places

    def _fill(self, key: str, view: memoryview, offset: int) -> None:
        done = 0
        try:
            while done < len(view) and (count := os.preadv(self._descriptor, [view[done:]], offset + done)):
                done += count
        except OSError as error:
            raise CheckpointError(
                f"Tensor {key} in the shard {self._path} cannot be read ({error.strerror}); use an older checkpoint."
            ) from error
        if done < len(view):
            raise self._damaged(key)

    def _damaged(self, key: str) -> CheckpointError:
        return CheckpointError(f"Tensor {key} in the shard {self._path} does not match its checksum; use an older checkpoint.")


def _open(path: Path, size: int) -> int:
    """A descriptor of a file of exactly that size."""
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


def runs(held: Box, box: Box, itemsize: int) -> tuple[int, Iterator[int]]:
    """The bytes of a box in a C-contiguous array that holds `held`: the length of a run of them, and where each run begins.

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
