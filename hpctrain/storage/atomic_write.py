"""Files that at every moment are either what they were before or complete, on the disk, whatever interrupts their writing.

Every output goes through this module, and it replaces regular files alone. A link stays a link, and the file that it leads to is
replaced, or made where the link leads to nothing. Bytes go straight into a pipe, a terminal and other devices of characters, and
into what is open already (`/dev/stdout`). A directory, a socket and a disk are refused, and so is each of these by `replacing`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from hpctrain.errors import CheckpointError, CheckpointRemovedError
from hpctrain.input_file import kind_of
from hpctrain.launch import process_mark
from hpctrain.launch.process_mark import ProcessMark

PARTIAL = ".partial"
# Of a file's name in that of its partial file, which has 255 bytes with the mark of a process.
_LONGEST_NAME_BYTES = 120
# Of partial files: threads of one process may write the same path at once.
_NUMBERS = count(1)
_DESCRIPTORS = re.compile(r"/proc/(\d+)(/task/\d+)?/fd")
_MOST_LINKS = 40  # as Linux


def target_of(path: Path) -> Path:
    """Return the regular file that `path` names, or the one that would be made, without links.

    Raises:
        OSError: it is a directory, a device, a pipe, a socket, an open file, or below something that is no directory.
    """
    if _descriptor_of(path) is not None:
        raise OSError(errno.EINVAL, "it is an open file, and only a file with a name of its own is replaced", os.fspath(path))
    target = Path(os.path.realpath(path))
    mode = _mode_of(target)
    if mode is None or stat.S_ISREG(mode):
        return target
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, and only a regular file is replaced", os.fspath(path))


def check_target(path: Path, *, streams: bool = False) -> None:
    """Raise unless a file can be written at `path`, before time is spent on what it is to hold.

    Args:
        streams: what `write_bytes` writes straight into passes, too.

    Raises:
        OSError: as `target_of`; or its directory is missing, or may not be written to.
    """
    if streams and (_descriptor_of(path) is not None or _is_stream(path)):
        return
    directory = target_of(path).parent
    if not directory.is_dir():
        named = directory if path.is_symlink() else path.parent
        raise NotADirectoryError(errno.ENOTDIR, f"there is no directory {named}", os.fspath(path))
    if not os.access(directory, os.W_OK):
        raise PermissionError(errno.EACCES, f"{directory} may not be written to", os.fspath(path))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The path of a new file that becomes `path` when the block ends; the block writes it and brings its bytes to the disk.

    An error in the block, or at the end, leaves no new file; a kill may leave one, which names its process (`partial_path`) and
    is removed by the next write on the same machine. Of several processes that write `path` at once, the last one to end wins.

    Raises:
        OSError: `path` is no regular file that could be replaced, or something else has the new file's name.
    """
    target = target_of(path)
    partial = partial_path(target)
    mode = _mode_of(partial)
    if mode is not None and not stat.S_ISREG(mode):
        words = "a link" if stat.S_ISLNK(mode) else kind_of(mode)
        raise OSError(errno.EINVAL, f"it is {words} in the place of an unfinished file; delete it", os.fspath(partial))
    remove_unfinished(target)
    try:
        yield partial
        publish(partial, target)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == os.fspath(partial):
            error.filename = os.fspath(path)  # the name that people know
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def partial_path(path: Path, token: str = "") -> Path:
    """Return a new name under which this process writes what becomes `path`. token: of the attempt; by default a number."""
    return path.with_name(f"{_begin_of_partial(path)}{token or next(_NUMBERS)}.{process_mark.own()}{PARTIAL}")


def writer_of(partial: Path) -> ProcessMark | None:
    """Return the process that has begun a partial file; None for one of an earlier version, which does not name it."""
    words = partial.name.removesuffix(PARTIAL).split(".")
    marks = (ProcessMark.parse(".".join(words[i:])) for i in range(1, len(words)))  # a host's name may have dots
    return next((mark for mark in marks if mark is not None), None)


def _begin_of_partial(path: Path) -> str:
    name = path.name.encode()
    if len(name) <= _LONGEST_NAME_BYTES:
        return f"{path.name}."
    return f"{hashlib.sha256(name).hexdigest()[:16]}{path.suffix[:16]}."


def remove_unfinished(path: Path) -> None:
    """Remove partial files of `path` whose processes are known to have ended."""
    begin = _begin_of_partial(path)
    with contextlib.suppress(OSError):
        for name in os.listdir(path.parent):
            if name.startswith(begin) and name.endswith(PARTIAL):
                partial = path.with_name(name)
                writer = writer_of(partial)
                if writer is not None and writer.lives is False:
                    partial.unlink(missing_ok=True)


def publish(partial: Path, path: Path) -> None:
    """Rename a complete file, whose bytes are on the disk, to `path`, and bring the new name to the disk.

    It gets the permissions of the file that it replaces.

    Raises:
        OSError: `path` is no regular file, or a link.
    """
    mode = _mode_of(path)
    if mode is not None:
        if not stat.S_ISREG(mode):
            words = "a link" if stat.S_ISLNK(mode) else kind_of(mode)
            raise OSError(errno.EINVAL, f"it is {words}, and only a regular file is replaced", os.fspath(path))
        partial.chmod(mode & 0o777)
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
    """Write a file whole, or straight into a pipe, a terminal or another device of characters.

    Raises:
        OSError: it cannot be written, and is what it was before; or no process reads the pipe.
    """
    number = _descriptor_of(path)
    if number is not None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _write_all(os.dup(number), content, path)
    elif _is_stream(path):
        _write_all(_opened_stream(path), content, path)
    else:
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


def _mode_of(path: Path) -> int | None:
    """The mode of what has this name, a link among others; None where nothing has."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return None


def _is_stream(path: Path) -> bool:
    mode = _mode_of(Path(os.path.realpath(path)))
    return mode is not None and (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode))


def _opened_stream(path: Path) -> int:
    """A descriptor of a pipe or device; a pipe that no process reads would keep the opening waiting."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.ENXIO, "it is a pipe that no process reads", os.fspath(path)) from None
    os.set_blocking(descriptor, True)
    return descriptor


def _descriptor_of(path: Path) -> int | None:
    """The number of the open file that a path such as /dev/stdout names; None where it names none.

    Raises:
        OSError: it names an open file of another process.
    """
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(path.parent)
        descriptors = _DESCRIPTORS.fullmatch(folder)
        if descriptors is not None:
            if int(descriptors[1]) != os.getpid() or not path.name.isdecimal():
                raise OSError(errno.EINVAL, "it is an open file of another process", os.fspath(path))
            return int(path.name)
        try:
            path = Path(folder) / os.readlink(path)
        except OSError:  # no link
            return None
    return None


def _write_all(descriptor: int, content: bytes, path: Path) -> None:
    """Write to a descriptor and close it."""
    view = memoryview(content)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        os.close(descriptor)
