"""Files that at every moment are either what they were before or complete, on the disk, whatever interrupts their writing."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from hpctrain.errors import CheckpointError, CheckpointRemovedError

PARTIAL = ".partial"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a new file that becomes `path` when the block ends; the block writes it and brings its bytes to the disk.

    An error in the block, or at the end, leaves no new file; a kill may leave one, of the name `path` and PARTIAL. One process
    writes `path` at a time.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        publish(partial, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == os.fspath(partial):
            error.filename = os.fspath(path)  # the name that people know
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def publish(partial: Path, path: Path) -> None:
    """Rename a complete file, whose bytes are on the disk, to `path`, and bring the new name to the disk."""
    os.replace(partial, path)
    synchronise_directory(path.parent)


def not_written(what: str, error: Exception) -> CheckpointError:
    """Return the error for a part of a checkpoint that cannot be written. what: "The shard PATH"."""
    reason = " ".join(str(error).split())
    if isinstance(error, FileNotFoundError):  # its directory was made just before
        return CheckpointRemovedError(f"{what} was removed by another process while it was written ({reason}); end that process.")
    return CheckpointError(f"{what} cannot be written ({reason}); make room or choose another output.")


def synchronise_directory(directory: Path) -> None:
    """Wait until the directory's entries, a new name among them, are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole. A link stays a link, and what is no file (a terminal, /dev/null) is written to as it is.

    Raises:
        OSError: it cannot be written; it is what it was before.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    with replacing(path) as partial, open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a text file whole, in UTF-8; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_json(path: Path, content: object) -> None:
    """Write a JSON file whole, indented for people; see `write_bytes`."""
    write_text(path, json.dumps(content, indent=1) + "\n")
