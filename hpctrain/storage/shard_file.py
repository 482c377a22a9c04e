"""One rank's file of a sharded checkpoint: parts of tensors, each with its place in the tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from hpctrain.boxes import Box, shape_of
from hpctrain.errors import CheckpointError
from hpctrain.storage.atomic_write import synchronise_directory
from hpctrain.storage.hdf5_store import digest_of, open_store, write_store


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
        reason = " ".join(str(error).split())
        raise CheckpointError(f"The shard {path} cannot be written ({reason}); make room or choose another output.") from error
    facts = {key: (part.shape, part.values.dtype.newbyteorder("<").str, part.box) for key, part in parts.items()}
    return ShardFacts(path.name, size, sha256, facts)


class ShardReader:
    """Reads parts of one shard, which is opened once; every checksum is compared.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, or belongs to another checkpoint.
    """

    def __init__(self, path: Path, shard: ShardFacts) -> None:
        self._path = path
        size = path.stat().st_size if path.is_file() else None
        if size != shard.size:
            has = "is missing" if size is None else f"has {size} bytes instead of {shard.size}"
            raise CheckpointError(f"The shard {path} {has}; use an older checkpoint.")
        self._file, self._digests, root = open_store(path)
        if root != shard.sha256:
            self.close()
            raise CheckpointError(f"The shard {path} belongs to another checkpoint, or is damaged; use an older one.")

    def read(self, key: str, box: Box) -> np.ndarray:
        """The part of that key, verified."""
        values, digest = _read(self._path, self._file, key)
        if values.shape != shape_of(box) or digest != self._digests[key]:
            raise CheckpointError(f"Tensor {key} in the shard {self._path} does not match its checksum; use an older checkpoint.")
        return values

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _read(path: Path, file: h5py.File, key: str) -> tuple[np.ndarray, str]:
    try:
        values = np.asarray(file[key][()])
    except (OSError, KeyError, RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"The shard {path} is damaged, HDF5 cannot read it ({reason}); use an older checkpoint.") from error
    return values, digest_of(values)
