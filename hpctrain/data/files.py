"""Files named by users: system errors become error messages."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.core.errors import DataError
from hpctrain.core.files import kind_of, nearest_file


@contextmanager
def system_errors_as(sentence: str) -> Iterator[None]:
    """Replace an OSError inside the block by a `DataError`.

    The message is "SENTENCE: reason."

    Raises:
        DataError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"{sentence}: {error.strerror or error}.") from error


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor.

    Other kinds of files are not opened, because opening a pipe waits for a writer, and a device may have side effects or no end.

    Raises:
        OSError: the file is missing, unreadable, or not a regular file.
    """
    _check_regular(os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor).st_mode)  # another file may have replaced it in between
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file of at most `most_bytes`.

    Raises:
        OSError: see `open_regular`; or the file is too large, or changes while it is read.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than the limit of {most_bytes:,}")
        content = file.read(size + 1)
    if len(content) != size:
        raise OSError(errno.EIO, f"its size changed while it was read, from {size:,} bytes")
    return content


def require_file(path: Path, kind: str, advice: str) -> None:
    """Raise unless `path` is a readable file.

    Args:
        kind: kind of file for the message, such as "data file".
        advice: how to get one, for the end of the message.

    Raises:
        DataError: the path is missing, unreadable, a directory or a device.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            os.close(open_regular(path))
            return
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"There is no {kind} {path}{nearest_file(path) or f'; {advice}'}.") from error
    except OSError as error:
        raise DataError(f"The {kind} {path} cannot be read: {error.strerror or error}.") from error
    article = "an" if kind[0] in "AEIOaeio" else "a"
    raise DataError(f"{path} is {kind_of(mode)}, not {article} {kind}; {advice}.")


def require_new(path: Path, overwrite: bool) -> None:
    """Raise if a file exists at `path` and must not be overwritten.

    Raises:
        DataError: a file exists, and `overwrite` is false.
    """
    if os.path.lexists(path) and not overwrite:
        raise DataError(f"{path} already exists; give another name, or --overwrite to replace it.")


def require_directory(path: Path, advice: str) -> None:
    """Raise unless `path` is a directory with readable entries; see `require_file`.

    Raises:
        DataError: the path is missing, unreadable, or a file.
    """
    try:
        os.scandir(path).close()
    except FileNotFoundError as error:
        raise DataError(f"There is no directory {path}; {advice}.") from error
    except NotADirectoryError as error:
        raise DataError(f"{path} is a file, not a directory; {advice}.") from error
    except OSError as error:
        raise DataError(f"The directory {path} cannot be read: {error.strerror or error}.") from error
