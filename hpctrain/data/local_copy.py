"""Local copy of samples on a disk of the node, written as samples are first read from the data file.

The file is read and written by system calls, never mapped, so a full disk or a truncated file causes an error instead of a
signal. A checksum per sample, in memory shared by the node, detects changed bytes; such samples are read from the data file
again.

A temporary copy is unlinked immediately after its creation, so no other program finds it, and nothing is left if ranks are
killed. A copy that is kept for later runs has a name derived from the data file, and is locked while a job uses it; a second job
on the node uses a temporary copy. At the end of a job, the samples in the copy are recorded in an index file next to it. A copy
without a matching index counts as empty, as does one that another user may have made.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import weakref
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hpctrain.comm.base import Communicator
from hpctrain.comm.shared_memory import SharedMemory, share, shared_descriptor
from hpctrain.core.files import expanded, link_target, open_own, read_at, read_bytes, write_at
from hpctrain.core.text import size_text
from hpctrain.data.image_file import ImageFile
from hpctrain.storage.atomic_write import replacing

_ABSENT, _PRESENT = range(2)
_CHECKSUM_BYTES = 4


def table_bytes(count: int) -> int:
    """Return the bytes of memory for the checksums and states of `count` samples."""
    return count * (_CHECKSUM_BYTES + 1)


class LocalCopy:
    """Local copy of samples `first` .. `first + count - 1`. Any thread of any rank of the node may read and write.

    Args:
        descriptor: descriptor of the file, owned by this object, which closes it.
        table: memory shared by the node's ranks, of `table_bytes(count)` bytes; zero for samples that are not in the file.

    Attributes:
        checksums: (count,) uint32, view of the table.
        states: (count,) uint8, view of the table.
    """

    def __init__(self, descriptor: int, sample_bytes: int, table: SharedMemory, first: int, count: int) -> None:
        self.first, self.count = first, count
        self.checksums = table.array[: count * _CHECKSUM_BYTES].view(np.uint32)
        self.states = table.array[count * _CHECKSUM_BYTES : table_bytes(count)]
        self.sample_bytes = sample_bytes
        self._table, self._descriptor = table, descriptor
        weakref.finalize(self, os.close, descriptor)
        self._logged: set[str] = set()
        self._full = False

    def keeps(self, sample: int) -> bool:
        """Return whether the file has a place for a sample."""
        return self.first <= sample < self.first + self.count

    def read(self, sample: int, out: memoryview) -> bool:
        """Read a sample into `out`, and return whether it is in the copy and unchanged. Otherwise `out` is undefined."""
        if not self.keeps(sample):
            return False
        number = sample - self.first
        if self.states[number] != _PRESENT:
            return False
        self._table.fence()
        why = self._read(out, number * self.sample_bytes)
        if why is None and zlib.crc32(out) != self.checksums[number]:
            why = "bytes have changed"
        if why is None:
            return True
        self.states[number] = _ABSENT
        self._warn_once(
            f"the node's local copy of samples is damaged ({why}); the affected samples are read from the data file again"
        )
        return False

    def write(self, sample: int, stored: memoryview) -> None:
        """Write a sample if the file has a place for it and the disk has space."""
        if self._full or not self.keeps(sample):
            return
        number = sample - self.first
        try:
            write_at(self._descriptor, stored, number * self.sample_bytes)
        except OSError as error:
            self._full = True
            self._warn_once(
                f"the node's local copy of samples cannot grow ({error.strerror}); other samples are read from the data file"
            )
            return
        self.checksums[number] = zlib.crc32(stored)
        self._table.fence()
        self.states[number] = _PRESENT

    def _read(self, out: memoryview, offset: int) -> str | None:
        """Fill `out` from the file, and return the reason for a failure, otherwise None."""
        try:
            return None if read_at(self._descriptor, out, offset) == len(out) else "it is truncated"
        except OSError as error:
            return error.strerror or str(error)

    def _warn_once(self, sentence: str) -> None:
        """Log a warning if it was not logged before."""
        if sentence not in self._logged:
            self._logged.add(sentence)
            logging.getLogger(__name__).warning(sentence)


# Maximum share of a disk's free space for the copy.
_SHARE_OF_DISK = 0.9
_PREFIX = f"hpctrain-{os.getuid()}-"


@dataclass(frozen=True)
class LocalFile:
    """Local copy of a data file, as opened by the ranks of a node.

    Attributes:
        copy: open copy; None if there is none.
        n_bytes: size of the complete copy.
        found: number of samples that earlier runs have left in the copy.
        denied: reason why there is no copy, or a smaller one than requested; empty otherwise.
        index: file to which the first rank of the node writes the index at the end; None: the copy is temporary.
        known_by: facts that identify the data file, for the index.
    """

    copy: LocalCopy | None = None
    n_bytes: int = 0
    found: int = 0
    denied: str = ""
    index: Path | None = None
    known_by: Mapping[str, object] = field(default_factory=dict)

    def keep(self) -> None:
        """Write the index of a kept copy. The first rank of the node calls it after all ranks have finished reading."""
        if self.index is None or self.copy is None:
            return
        tables = self.copy.states.tobytes() + self.copy.checksums.tobytes()
        header = json.dumps({**self.known_by, "count": self.copy.count, "crc32": zlib.crc32(tables)}).encode()
        # Without an index, the next run reads the data file again.
        with contextlib.suppress(OSError), replacing(self.index) as partial, open(partial, "wb") as file:
            file.write(header + b"\n" + tables)
            file.flush()
            os.fsync(file.fileno())


@dataclass(frozen=True)
class LocalRequest:
    """Request for a local copy.

    Attributes:
        directory: directory of the copy, which may contain environment variables.
        limit: maximum size in bytes; None: limited by the disk.
        first: number of the first sample in the copy.
        kept: whether the copy is kept for later runs.
    """

    directory: str
    limit: int | None
    first: int
    kept: bool


@dataclass(frozen=True)
class _Prepared:
    """File that the first rank of a node has created.

    Attributes:
        count: number of samples that it has space for.
        path: path of a kept file; None: a temporary one.
    """

    descriptor: int = -1
    count: int = 0
    path: Path | None = None
    denied: str = ""


def open_local(node: Communicator, file: ImageFile, request: LocalRequest) -> LocalFile:
    """Return the local copy of a file for the ranks of a node, or the reason why there is none.

    Collective over the node, at start-up only.
    """
    known_by = _identity(file)
    mine = _prepare(file, request, known_by) if node.rank == 0 else _Prepared()
    prepared = node.broadcast_object(mine)
    if not prepared.count:
        _close(mine.descriptor)
        return LocalFile(denied=prepared.denied)
    descriptor, refused = shared_descriptor(node, mine.descriptor)
    table = share(node, table_bytes(prepared.count))
    if refused or table.denied:
        _close(descriptor)
        return LocalFile(denied=f"the ranks of a node cannot share it ({refused or table.denied})")
    copy = LocalCopy(descriptor, int(np.prod(file.shape)), table, request.first, prepared.count)
    index = None if prepared.path is None else prepared.path.with_suffix(".index")
    found = _load(copy, index, known_by) if index is not None and node.rank == 0 else 0
    return LocalFile(copy, copy.count * copy.sample_bytes, node.broadcast_object(found), prepared.denied, index, known_by)


def _prepare(file: ImageFile, request: LocalRequest, known_by: Mapping[str, object]) -> _Prepared:
    """Create a file in the directory, and determine the number of samples that it has space for."""
    image_bytes, wanted = int(np.prod(file.shape)), len(file) - request.first
    if wanted <= 0:
        return _Prepared()
    descriptor = -1
    try:
        directory = _directory(request.directory)
        descriptor, path = _make(directory, known_by, kept=request.kept)
        system = os.fstatvfs(descriptor)
        # Most of the free space on the disk, and the space that the file already has.
        room = int(_SHARE_OF_DISK * system.f_bavail * system.f_frsize) + os.fstat(descriptor).st_blocks * 512
    except OSError as error:
        _close(descriptor)
        return _Prepared(denied=f"{request.directory} cannot be used: {error.strerror or error}")
    limit = room if request.limit is None else min(room, request.limit)
    count = min(wanted, limit // image_bytes)
    short = count < wanted and limit == room
    return _Prepared(descriptor, count, path, f"{directory} has room for {size_text(limit)}" if short else "")


def _directory(name: str) -> Path:
    """Return the directory for a name with environment variables, and create it if it is missing.

    Raises:
        OSError: a variable is not set, the directory cannot be created, or it is a link of another user.
    """
    try:
        path = Path(expanded(name))
    except ValueError as error:
        raise OSError(str(error)) from None
    link_target(path)  # raises an error for a link of another user
    path.mkdir(parents=True, exist_ok=True)
    return path


def _make(directory: Path, known_by: Mapping[str, object], *, kept: bool) -> tuple[int, Path | None]:
    """Create or reopen a file for this job, and return its descriptor and path; the path is None if the file is temporary.

    A temporary file is created if `kept` is false, if another job uses the kept file of this data, or if another user may have
    made it.
    """
    if kept:
        name = hashlib.sha256(json.dumps(known_by, sort_keys=True).encode()).hexdigest()[:16]
        path = directory / f"{_PREFIX}{name}.samples"
        with contextlib.suppress(OSError):
            descriptor = open_own(path, os.O_RDWR | os.O_CREAT, 0o600)
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor, path
            os.close(descriptor)
    descriptor, text = tempfile.mkstemp(".samples", _PREFIX, directory)
    os.unlink(text)
    return descriptor, None


def _identity(file: ImageFile) -> dict[str, object]:
    """Return the facts that identify a data file: checksum of its samples, shape of the images, size and time of modification."""
    status = os.stat(file.path)
    return {
        "images": file.stored_digest,
        "bytes": status.st_size,
        "time_ns": status.st_mtime_ns,
        "shape": list(file.images.shape),
    }


def _load(copy: LocalCopy, index: Path, known_by: Mapping[str, object]) -> int:
    """Load the index of a kept copy, and return the number of samples in the copy; 0 without a matching index."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        header, _, tables = read_bytes(index, own=True).partition(b"\n")
        values = json.loads(header)
        count = int(values.pop("count"))
        fits = values.pop("crc32") == zlib.crc32(tables) and len(tables) == table_bytes(count)
        if fits and values == json.loads(json.dumps(known_by)):
            both = min(count, copy.count)
            copy.states[:both] = np.frombuffer(tables, np.uint8, both)
            copy.checksums[:both] = np.frombuffer(tables, np.uint32, both, offset=count)
            return int(np.count_nonzero(copy.states))
    return 0


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
