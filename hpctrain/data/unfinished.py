"""A data file in the making: the block of its samples, and a journal by which an interrupted conversion goes on.

The block lies where the finished file will have it, so that finishing writes HDF5's structures around it and copies nothing.
The journal has a line for each chunk of the block: its bytes, their checksum, and whatever the writer needs to know of them. A
chunk counts when its line is whole and its bytes have their checksum, so it does not matter when a process was killed, or what a
machine lost that went down.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.launch import process_mark
from hpctrain.log import get_logger
from hpctrain.storage.atomic_write import PARTIAL, publish, target_of

#: place of the block in the file: HDF5's first structures fit in front of it
BLOCK_OFFSET = 4096
_JOURNAL = ".journal"
_JOURNAL_VERSION = 1


class UnfinishedFile:
    """The block of a data file that becomes `path`, appended to chunk by chunk. One process at a time.

    Args:
        source: names all that the file is made of and how; a beginning that was made of the same is kept. None: the file is
            begun from nothing, under a name that no other process uses, and an interruption leaves nothing.

    Attributes:
        path: of the file in the making. size: bytes of the block.

    Raises:
        OSError: the file cannot be created.
        DataError: another process is writing the same file, or a file that no conversion has begun has its name.
    """

    def __init__(self, path: Path, source: str | None = None) -> None:
        path = target_of(path)
        self._target, self.keeps = path, source is not None
        self.path = path.with_name(path.name + PARTIAL if self.keeps else f".{path.name}.{process_mark.own()}.tmp")
        self._journal_path = self.path.with_name(self.path.name + _JOURNAL)
        self.size = self._journal_size = 0
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        self._journal: int | None = None
        self._header = _line({"journal": _JOURNAL_VERSION, "source": hashlib.sha256((source or "").encode()).hexdigest()})
        try:
            if self.keeps:
                self._lock()
                self._refuse_foreign()
                self._journal = os.open(self._journal_path, os.O_RDWR | os.O_CREAT, 0o666)
            else:
                os.ftruncate(self._descriptor, 0)
        except BaseException:
            self.close()
            raise

    def kept(self) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
        """The chunks that are there already, in order: what `append` was told of each, and its bytes. To be read to the end.

        Whatever lies behind the last whole one is cut off.
        """
        if self._journal is None:
            return
        lines = os.pread(self._journal, os.fstat(self._journal).st_size, 0).splitlines(keepends=True)
        if lines and lines[0] != self._header:
            get_logger(__name__).warning("%s was begun from other images or options; it is begun again", self.path)
            lines = []
        whole = len(self._header)
        for line in lines[1:]:
            record = _record(line)
            block = None if record is None else self._chunk(record)
            if record is None or block is None:
                break
            whole += len(line)
            self.size += len(block)
            yield record["of"], block
        if not lines:
            os.ftruncate(self._journal, 0)
            _write_all(self._journal, self._header, 0)
        os.ftruncate(self._journal, whole)
        self._journal_size = whole
        os.ftruncate(self._descriptor, BLOCK_OFFSET + self.size)
        _write_all(self._descriptor, bytes(BLOCK_OFFSET), 0)  # an interrupted end may have written there

    def append(self, block: memoryview, of: dict[str, Any]) -> None:
        """Add a chunk; of: what `kept` is to give with it, as JSON can hold it.

        Raises:
            OSError: it cannot be written.
        """
        _write_all(self._descriptor, block, BLOCK_OFFSET + self.size)
        if self._journal is not None:  # behind the bytes, so that a line speaks of bytes that are there
            line = _line({"bytes": len(block), "crc32": zlib.crc32(block), "of": of})
            _write_all(self._journal, line, self._journal_size)
            self._journal_size += len(line)
        self.size += len(block)

    def read(self, start: int, count: int) -> bytes:
        """Bytes of the block.

        Raises:
            OSError: they cannot be read.
        """
        parts = []
        while count and (part := os.pread(self._descriptor, min(count, 1 << 30), BLOCK_OFFSET + start)):
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return b"".join(parts)

    def clear(self) -> None:
        """Empty the file, whose block is to be written elsewhere in it.

        Raises:
            OSError: that is refused.
        """
        os.ftruncate(self._descriptor, 0)

    def publish(self) -> None:
        """Give the file, which is finished and on the disk, its name."""
        publish(self.path, self._target)
        self.close()
        if self.keeps:
            self._journal_path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove all of it; does nothing after `publish`."""
        if self._descriptor < 0:
            return
        self.path.unlink(missing_ok=True)
        if self.keeps:
            self._journal_path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let go of the files, and leave them where they are."""
        for descriptor in (self._descriptor, -1 if self._journal is None else self._journal):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor, self._journal = -1, None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise DataError(
                    f"Another process writes {self.path} at this moment; wait for it, or give another name to write to."
                ) from error
            # A file system without locks: two conversions to one name are the user's own.

    def _refuse_foreign(self) -> None:
        """Raise if another program may have written the unfinished file: a download may have the same name."""
        if os.fstat(self._descriptor).st_size and not self._journal_path.is_file():
            raise DataError(
                f"{self.path} exists already without the journal of a conversion, so another program may have written it; "
                f"move it away, or give another name to write to."
            )

    def _chunk(self, record: dict[str, Any]) -> np.ndarray | None:
        """The bytes of the next chunk; None where they are not those that were written."""
        with contextlib.suppress(OSError):
            block = self.read(self.size, record["bytes"])
            if len(block) == record["bytes"] and zlib.crc32(block) == record["crc32"]:
                return np.frombuffer(block, np.uint8)
        return None


def _line(content: dict[str, Any]) -> bytes:
    """A line of the journal, with its own checksum in front."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _record(line: bytes) -> dict[str, Any] | None:
    """The content of a line; None where it is not whole."""
    if not line.endswith(b"\n") or line[:9] != b"%08x " % zlib.crc32(line[9:-1]):
        return None
    record: dict[str, Any] = json.loads(line[9:])
    return record


def _write_all(descriptor: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while len(view):
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count
