"""Files named by users: system errors become error messages."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpctrain.core.errors import DataError
from hpctrain.core.files import kind_of, nearest_file, open_regular


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


def require_file(path: Path, kind: str, advice: str) -> None:
    """Raise an error unless `path` is a readable file.

    Args:
        kind: kind of file for the message, such as "data file".
        advice: end of the message, a clause on how to get such a file.

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
    """Raise an error if a file exists at `path` and must not be overwritten.

    Raises:
        DataError: a file exists, and `overwrite` is false.
    """
    if os.path.lexists(path) and not overwrite:
        raise DataError(f"{path} already exists; give another name, or --overwrite to replace it.")


def require_directory(path: Path, advice: str) -> None:
    """Raise an error unless `path` is a directory with readable entries; see `require_file`.

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
