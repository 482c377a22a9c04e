"""Sharded checkpoints: a directory with one shard per rank and a manifest, written last, that lists the shards and their parts.

The directory has a temporary name until its manifest is on the disk, so every directory with the name of a checkpoint has once
been complete. A shard holds parts of tensors, each with its box in the tensor (`Part`, `ShardFacts`). `WriteShares` divides
tensors that several ranks hold among these ranks for writing. `hdf5_store.ShardedTensors` reads the shards.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.errors import CheckpointError
from hpctrain.core.files import TEXT_BYTES, read_bytes
from hpctrain.core.intervals import Box, even_interval, replace_dim, shape_of, size_of
from hpctrain.storage.atomic_write import not_written, partial_path, synchronise_directory, write_bytes
from hpctrain.storage.hdf5_store import ShardedTensors, ShardFacts, plain, unreadable, write_store

#: minimum size of a part that is divided among its holders. One holder writes a smaller part, because each piece costs time
_SMALLEST_SHARED_BYTES = 1 << 16


class WriteShares:
    """Division of parts that `holders` ranks hold into one share per rank, for writing. This rank has the index `number`.

    Large parts are divided evenly; a small part is written by the rank with the fewest bytes so far.
    """

    def __init__(self, number: int, holders: int) -> None:
        self._number, self._loads = number, [0] * holders

    def own(self, box: Box, itemsize: int) -> Box | None:
        """Return this rank's share of a box that all holders hold; None if it has none.

        All holders must make the same calls in the same order.
        """
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


@dataclass(frozen=True)
class Part:
    """Part of a tensor.

    Attributes:
        shape: shape of the tensor.
        box: place of the part in the tensor.
        values: elements of the part, C-contiguous, in the box's shape.
    """

    shape: tuple[int, ...]
    box: Box
    values: np.ndarray


def write_shard(directory: Path, rank: int, parts: Mapping[str, Part]) -> ShardFacts:
    """Write a rank's shard into the directory of an unfinished checkpoint, which is created if missing, and synchronise both.

    Raises:
        CheckpointError: the shard cannot be written.
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


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the numbers of the items for each rank: largest first, each to the rank with the smallest sum of sizes so far."""
    loads = [0] * ranks
    numbers: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[number]
        numbers[rank].append(number)
    return numbers


SUFFIX = ".shards"
#: marks the name of a checkpoint that is being replaced by a new one of the same step
BEFORE = "-before"
MANIFEST, _DIGEST = "manifest.json", "manifest.sha256"
_FORMAT, _VERSION = "hpctrain-sharded-checkpoint", 1


def moved_away(path: Path) -> Path:
    """Return the temporary name of a checkpoint while a new one of the same step replaces it.

    The old checkpoint remains readable under this name.
    """
    return path.with_name(f"{path.stem}{BEFORE}{path.suffix}")


def publish(partial: Path, path: Path, shards: Sequence[ShardFacts], meta: Mapping[str, object]) -> None:
    """Turn the directory `partial`, with all shards on the disk, into the checkpoint `path`.

    The checkpoint is either complete or absent at any moment. An existing checkpoint of this name is renamed (`moved_away`), and
    deleted once the new one is in place.

    Raises:
        CheckpointError: the checkpoint cannot be written.
    """
    _check_complete(shards)
    facts = [{"name": s.name, "size": s.size, "sha256": s.sha256, "parts": s.parts} for s in shards if s.parts]
    content = {"format": _FORMAT, "format_version": _VERSION, "meta": dict(meta), "shards": facts}
    text = json.dumps(content, default=plain, sort_keys=True, indent=1).encode()
    try:
        write_bytes(partial / MANIFEST, text)
        write_bytes(partial / _DIGEST, f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode())
        before = moved_away(path)
        if path.exists():  # a checkpoint of the same step; a rename cannot replace a directory that is not empty
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
    """Delete a sharded checkpoint. If interrupted, it leaves only files that `checkpoint.remove_left` removes.

    Raises:
        OSError: the checkpoint cannot be deleted.
    """
    old = partial_path(path, "old")
    shutil.rmtree(old, ignore_errors=True)
    os.replace(path, old)
    shutil.rmtree(old)


def open_sharded(path: Path) -> tuple[ShardedTensors, dict[str, object]]:
    """Return the tensors of a sharded checkpoint, read on access, and its metadata, verified now.

    Raises:
        CheckpointError: the checkpoint is missing, or its manifest is damaged or has another version.
    """
    try:
        text, digest = read_bytes(path / MANIFEST), read_bytes(path / _DIGEST, TEXT_BYTES)
    except OSError as error:
        raise unreadable(f"The manifest of checkpoint {path}", error) from error
    if digest != f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode():
        raise CheckpointError(f"The manifest of the checkpoint {path} does not match its checksum; use an older checkpoint.")
    content = json.loads(text)
    if content["format_version"] != _VERSION:
        raise CheckpointError(
            f"The checkpoint {path} has format version {content['format_version']}, but this hpctrain reads version {_VERSION}; "
            f"use the hpctrain that wrote it."
        )
    return ShardedTensors(path, [_shard(entry) for entry in content["shards"]]), content["meta"]


def manifest_digest(path: Path) -> str:
    """Return the stored checksum of a checkpoint's manifest, which covers the checksums of all shards, without verifying it.

    Raises:
        CheckpointError: the checksum cannot be read.
    """
    try:
        return read_bytes(path / _DIGEST, TEXT_BYTES).decode("ascii", "replace").partition(" ")[0]
    except OSError as error:
        raise unreadable(f"The checksum of the manifest of checkpoint {path}", error) from error


def _shard(entry: Mapping[str, Any]) -> ShardFacts:
    parts = {key: (tuple(shape), dtype, tuple(map(tuple, box))) for key, (shape, dtype, box) in entry["parts"].items()}
    return ShardFacts(entry["name"], entry["size"], entry["sha256"], parts)


def _check_complete(shards: Sequence[ShardFacts]) -> None:
    """Assert that the parts of each tensor together have as many elements as the tensor."""
    sizes: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        for key, (shape, _, box) in shard.parts.items():
            shapes[key] = shape
            sizes[key] = sizes.get(key, 0) + size_of(box)
    wrong = [key for key, shape in shapes.items() if sizes[key] != math.prod(shape)]
    assert not wrong, f"parts of {wrong[0]} have {sizes[wrong[0]]} elements, of {shapes[wrong[0]]}"
