"""Local copy of samples on a disk of the node, written as samples are first read from the data file.

The file is read and written by system calls, never mapped, so a full disk or a truncated file causes an error instead of a
signal. A checksum per sample, in memory shared by the node, detects changed bytes; such samples are read from the data file
again.

The file is unlinked immediately after its creation, so no other program finds it, and nothing is left if ranks are killed.
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.comm.base import Communicator
from hpctrain.comm.shared_memory import SharedMemory, share, shared_descriptor
from hpctrain.core.files import expanded, link_target, read_at, write_at
from hpctrain.core.text import size_text
from hpctrain.data.image_file import ImageFile

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
        """Write the stored bytes of a sample if the file has a place for it and the disk has space."""
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
        """Fill `out` from `offset` of the file, and return the reason for a failure, otherwise None."""
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
        denied: reason why the directory, its disk or shared memory prevents a copy or limits it; empty otherwise, also if no
            sample is left or `limit` is below one image.
    """

    copy: LocalCopy | None = None
    denied: str = ""


def open_local(node: Communicator, file: ImageFile, directory: str, limit: int | None = None, first: int = 0) -> LocalFile:
    """Return the local copy of a file for the ranks of a node; it may be smaller than requested, or missing.

    Collective over the node, at start-up only.

    Args:
        directory: directory of the copy, which may contain environment variables.
        limit: maximum size in bytes; None: limited by the disk.
        first: number of the first sample in the copy.
    """
    created, *made = _create(file, directory, limit, first) if node.rank == 0 else (-1, 0, "")
    count, denied = node.broadcast_object(made)
    if not count:
        _close(created)
        return LocalFile(denied=denied)
    descriptor, refused = shared_descriptor(node, created)
    table = share(node, table_bytes(count))
    if refused or table.denied:
        _close(descriptor)
        return LocalFile(denied=f"the ranks of a node cannot share it ({refused or table.denied})")
    return LocalFile(LocalCopy(descriptor, int(np.prod(file.shape)), table, first, count), denied)


def _create(file: ImageFile, directory: str, limit: int | None, first: int) -> tuple[int, int, str]:
    """Create a file without a name in the directory.

    Returns:
        Its descriptor, the number of samples that it has space for, and why it has space for fewer than requested.
    """
    image_bytes, wanted = int(np.prod(file.shape)), len(file) - first
    if wanted <= 0:
        return -1, 0, ""
    descriptor = -1
    try:
        place = _directory(directory)
        descriptor, text = tempfile.mkstemp(".samples", _PREFIX, place)
        os.unlink(text)
        system = os.fstatvfs(descriptor)
    except OSError as error:
        _close(descriptor)
        return -1, 0, f"{directory} cannot be used: {error.strerror or error}"
    room = int(_SHARE_OF_DISK * system.f_bavail * system.f_frsize)
    most = room if limit is None else min(room, limit)
    count = min(wanted, most // image_bytes)
    return descriptor, count, f"{place} has room for {size_text(most)}" if count < wanted and most == room else ""


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


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
