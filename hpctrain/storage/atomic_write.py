"""Atomic writes of files: despite interruptions, a file on the disk always has either its old content or the complete new one.

Output files that do not grow go through this module, except for traces, flight records and records of owners. It replaces regular
files only. A link remains a link: its target is replaced, or created if it is missing; `core.files.link_target` raises an error
for links that are not followed. `write_bytes` writes directly into pipes, terminals, other character devices, and files that are
already open (`/dev/stdout`); `replacing` raises an error for these. Both raise an error for directories, sockets and block
devices.
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

from hpctrain.core.errors import CheckpointError, CheckpointRemovedError
from hpctrain.core.files import kind_of, link_target, open_own
from hpctrain.launch import processes
from hpctrain.launch.processes import ProcessMark

PARTIAL = ".partial"
# Maximum length of a file name that its partial file's name repeats unchanged. A name with a process mark has at most 255 bytes.
_LONGEST_NAME_BYTES = 120
# Numbers of partial files: threads of one process may write the same path at once.
_NUMBERS = count(1)
_DESCRIPTORS = re.compile(r"/proc/(\d+)(/task/\d+)?/fd")
_MOST_LINKS = 40  # Linux's limit
# First words of the advice on an error, by its number.
_ADVICE = {errno.ENOSPC: "free disk space or ", errno.EDQUOT: "free disk space or ", errno.EACCES: "grant write permission or "}


def target_of(path: Path) -> Path:
    """Return the regular file that `path` names, or would name once it is created, with links resolved.

    Raises:
        OSError: `path` is a directory, a device, a pipe, a socket or an open file, or its parent is not a directory.
    """
    if _descriptor_of(path) is not None:
        raise OSError(errno.EINVAL, "it is an open file; only regular files with a path can be replaced", os.fspath(path))
    target = Path(os.path.realpath(path))
    mode = _mode_of(target)
    if mode is None or stat.S_ISREG(mode):
        return target
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, f"it is {kind_of(mode)}; only regular files can be replaced", os.fspath(path))


def check_target(path: Path, *, streams: bool = False) -> None:
    """Raise an OSError unless a file can be written at `path`. Call this before spending time on the content.

    Args:
        streams: whether to also accept the targets that `write_bytes` writes into directly.

    Raises:
        OSError: `target_of` raises an error, or the directory is missing or not writable.
    """
    if streams and (_descriptor_of(path) is not None or _is_stream(path)):
        return
    directory = target_of(path).parent
    if not directory.is_dir():
        named = directory if path.is_symlink() else path.parent
        raise NotADirectoryError(errno.ENOTDIR, f"there is no directory {named}", os.fspath(path))
    if not os.access(directory, os.W_OK):
        raise PermissionError(errno.EACCES, f"{directory} is not writable", os.fspath(path))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new, empty file that replaces `path` when the block ends.

    The block must write the file and synchronise it with the disk. After an error the file is deleted. A killed process may leave
    one, whose name identifies the process (`partial_path`); the next write of `path` on the same machine removes it. If several
    processes write `path` at the same time, the last one to finish wins.

    Raises:
        OSError: `path` cannot be replaced, or another user may have made a file with the new file's name.
    """
    target = target_of(path)
    partial = partial_path(target)
    remove_unfinished(target)
    try:
        os.close(open_own(partial, os.O_WRONLY | os.O_CREAT))
        yield partial
        publish(partial, target)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == os.fspath(partial):
            error.filename = os.fspath(path)  # the path that the caller gave
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def partial_path(path: Path, token: str = "") -> Path:
    """Return a new name for this process's unfinished version of `path`, with `token` or a number unique in the process."""
    return path.with_name(f"{_partial_prefix(path)}{token or next(_NUMBERS)}.{processes.own_mark()}{PARTIAL}")


def writer_of(partial: Path) -> ProcessMark | None:
    """Return the process that created a partial file; None if the name has no process."""
    words = partial.name.removesuffix(PARTIAL).split(".")
    marks = (ProcessMark.parse(".".join(words[i:])) for i in range(1, len(words)))  # host names may contain dots
    return next((mark for mark in marks if mark is not None), None)


def _partial_prefix(path: Path) -> str:
    name = path.name.encode()
    if len(name) <= _LONGEST_NAME_BYTES:
        return f"{path.name}."
    return f"{hashlib.sha256(name).hexdigest()[:16]}{path.suffix[:16]}."


def remove_unfinished(path: Path) -> None:
    """Remove partial files of `path` whose processes are known to have ended."""
    begin = _partial_prefix(path)
    with contextlib.suppress(OSError):
        for name in os.listdir(path.parent):
            if name.startswith(begin) and name.endswith(PARTIAL):
                partial = path.with_name(name)
                writer = writer_of(partial)
                if writer is not None and writer.lives is False:
                    partial.unlink(missing_ok=True)


def publish(partial: Path, path: Path) -> None:
    """Rename a complete, synchronised file to `path`, and synchronise the directory.

    The file receives the permissions of the file that it replaces. If that file is another user's, it does not become writable
    for everyone.

    Raises:
        OSError: `path` is a link or another file that is not regular, or the file cannot be renamed.
    """
    with contextlib.suppress(FileNotFoundError):
        replaced = os.lstat(path)
        if not stat.S_ISREG(replaced.st_mode):
            raise OSError(errno.EINVAL, f"it is {kind_of(replaced.st_mode)}; only regular files can be replaced", os.fspath(path))
        partial.chmod(replaced.st_mode & (0o777 if replaced.st_uid == os.geteuid() else 0o775))
    os.replace(partial, path)
    synchronise_directory(path.parent)


def not_written(what: str, error: Exception) -> CheckpointError:
    """Return the error for a checkpoint, or a part of one, that cannot be written. `what` is the subject of the message."""
    if isinstance(error, FileNotFoundError):  # its directory was created just before
        return CheckpointRemovedError(f"{what} was removed by another process while it was written; end that process.")
    reason = " ".join(str(getattr(error, "strerror", None) or error).split())
    advice = _ADVICE.get(getattr(error, "errno", None) or 0, "")
    return CheckpointError(f"{what} cannot be written ({reason}); {advice}choose another output.")


def synchronise_directory(directory: Path) -> None:
    """Wait until the directory's entries, including new names, are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically, or write directly into a pipe, a terminal or another character device.

    Raises:
        OSError: the file cannot be written, or no process reads the pipe. A regular file has its old content or all of the new.
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
    """Write a text file atomically, in UTF-8; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_json(path: Path, content: object) -> None:
    """Write an indented JSON file atomically; see `write_bytes`."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def _mode_of(path: Path) -> int | None:
    """Return the mode of a path without following links; None if the path does not exist."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return None


def _is_stream(path: Path) -> bool:
    mode = _mode_of(Path(os.path.realpath(path)))
    return mode is not None and (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode))


def _opened_stream(path: Path) -> int:
    """Open a pipe or device without waiting for a reader of the pipe, and return its descriptor.

    Raises:
        OSError: the path cannot be opened, or no process reads the pipe.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.ENXIO, "it is a pipe that no process reads", os.fspath(path)) from None
    os.set_blocking(descriptor, True)
    return descriptor


def _descriptor_of(path: Path) -> int | None:
    """Return the descriptor of the open file that a path such as /dev/stdout names; None if it names none.

    Raises:
        OSError: the path names an open file of another process, or leads through a link of another user (see `link_target`).
    """
    for _ in range(_MOST_LINKS):
        folder = os.path.realpath(path.parent)
        descriptors = _DESCRIPTORS.fullmatch(folder)
        if descriptors is not None:
            if int(descriptors[1]) != os.getpid() or not path.name.isdecimal():
                raise OSError(errno.EINVAL, "it is an open file of another process", os.fspath(path))
            return int(path.name)
        target = link_target(Path(folder) / path.name)
        if target is None:
            return None
        path = target
    return None


def _write_all(descriptor: int, content: bytes, path: Path) -> None:
    """Write all of `content` to a descriptor, and close it. Errors name `path`."""
    view = memoryview(content)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        os.close(descriptor)
