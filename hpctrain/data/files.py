"""Files that users name: what the system refuses becomes one sentence."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.core.errors import DataError
from hpctrain.core.files import kind_of


@contextmanager
def system_errors_as(sentence: str) -> Iterator[None]:
    """Replace an error of the system inside the block by a `DataError`.

    Its message is "SENTENCE: reason."

    Raises:
        DataError: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"{sentence}: {error.strerror or error}.") from error


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor.

    Opens nothing else: opening a pipe waits for a writer, and a device may have side effects or no end.

    Raises:
        OSError: missing, not readable, or no regular file.
    """
    _check_regular(os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor).st_mode)  # another file may have replaced it since
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
        OSError: as `open_regular`; the file is larger, or changes while it is read.
    """
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than the limit of {most_bytes:,}")
        content = file.read(size + 1)
    if len(content) != size:
        raise OSError(errno.EIO, f"it has {size:,} bytes, and another number was read")
    return content


def require_file(path: Path, kind: str, advice: str) -> None:
    """Make sure that `path` is a file that can be read.

    Args:
        kind: such as "data file", for the sentence. advice: how to get one, after a semicolon.

    Raises:
        DataError: missing, a directory or device, or not readable by this user.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            os.close(open_regular(path))
            return
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"There is no {kind} {path}; {advice}.") from error
    except OSError as error:
        raise DataError(f"The {kind} {path} cannot be read: {error.strerror or error}.") from error
    shown = "a directory" if stat.S_ISDIR(mode) else "no regular file"
    article = "an" if kind[0] in "AEIOaeio" else "a"
    raise DataError(f"{path} is {shown}, not {article} {kind}; {advice}.")


def require_new(path: Path, overwrite: bool) -> None:
    """Make sure that nothing is lost where a file is written.

    Raises:
        DataError: there is a file already, and it may not be overwritten.
    """
    if os.path.lexists(path) and not overwrite:
        raise DataError(f"{path} exists already; give another name, or --overwrite to replace it.")


def require_directory(path: Path, advice: str) -> None:
    """Make sure that `path` is a directory whose contents can be listed; see `require_file`.

    Raises:
        DataError: missing, a file, or not readable by this user.
    """
    try:
        os.scandir(path).close()
    except FileNotFoundError as error:
        raise DataError(f"There is no directory {path}; {advice}.") from error
    except NotADirectoryError as error:
        raise DataError(f"{path} is a file, not a directory; {advice}.") from error
    except OSError as error:
        raise DataError(f"The directory {path} cannot be read: {error.strerror or error}.") from error
