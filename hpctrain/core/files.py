"""Files that users name: expansion of paths, the user's own directories, and reads that neither block nor fill the memory."""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.core.errors import ConfigError
from hpctrain.core.text import nearest

#: maximum size of a text written by people, such as a configuration, in bytes
TEXT_BYTES = 1 << 20
#: maximum size of a record written by programs, such as metrics, in bytes
RECORD_BYTES = 1 << 31
_BLOCK = 1 << 20
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISLNK, "a link that points to itself"),
)


def kind_of(mode: int) -> str:
    """Return the kind of a file that is not regular, in words, from its mode."""
    return next((words for matches, words in _KINDS if matches(mode)), "a device")


def require_regular(path: str | Path, *, pipes: bool = False) -> None:
    """Raise unless the path is a regular file or a link to one.

    Args:
        pipes: whether an unnamed pipe, such as `<(command)` or `/dev/stdin`, is also accepted.

    Raises:
        OSError: the path does not exist, or is another kind of file.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode) and not os.path.lexists(os.path.realpath(path))):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file", os.fspath(path))


def read_bytes(path: str | Path, most: int = RECORD_BYTES, *, pipes: bool = False) -> bytes:
    """Return the content of a file.

    Args:
        most: maximum size in bytes.
        pipes: see `require_regular`.

    Raises:
        OSError: the file cannot be read, is not regular, or is too large.
    """
    require_regular(path, pipes=pipes)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        blocks, count = [], 0
        while block := os.read(descriptor, min(_BLOCK, most + 1 - count)):
            count += len(block)
            if count > most:
                raise OSError(errno.EFBIG, f"it has more than {most:,} bytes, the maximum for such a file", os.fspath(path))
            blocks.append(block)
    finally:
        os.close(descriptor)
    return b"".join(blocks)


def read_text(path: str | Path, most: int = RECORD_BYTES, *, pipes: bool = False) -> str:
    """Return the text of a file in UTF-8, with all line ends converted to newlines; see `read_bytes`.

    Raises:
        OSError: as for `read_bytes`.
        UnicodeDecodeError: the file is not UTF-8.
    """
    return read_bytes(path, most, pipes=pipes).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def json_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a text; None if the text is not a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def nearest_file(path: Path) -> str:
    """Return "; the nearest file is PATH" for a missing file; empty if no file of the same suffix has a similar path.

    The file is in the same directory, or has the same name in a similar directory next to it.
    """
    with suppress(OSError):
        if path.parent.is_dir():
            names = [entry.stem for entry in path.parent.iterdir() if entry.suffix == path.suffix and entry.is_file()]
            near = nearest(path.stem, names)
            return "" if near is None else f"; the nearest file is {path.with_name(near + path.suffix)}"
        above = path.parent.parent
        names = [entry.name for entry in above.iterdir() if (entry / path.name).is_file()] if above.is_dir() else []
        near = nearest(path.parent.name, names)
        return "" if near is None else f"; the nearest file is {above / near / path.name}"
    return ""


_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z_0-9]*)|\{([^}]*)\})")


def expanded(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a path with `~`, `~user`, `$VARIABLE` and `${VARIABLE}` expanded; a `$` without a name is kept.

    All paths of configurations and of the command line are expanded in this way.

    Raises:
        ValueError: a variable is not set, or a home directory is unknown. The message is a clause that follows "x is $NAME/y,
            but".
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2] or ""
        found = environ.get(name, "")
        if not found:  # an empty value would turn $SCRATCH/runs into /runs
            raise ValueError(f"the variable {name} is not set here; set it, or write the path out")
        return found

    path = _VARIABLE.sub(value, text)
    if not path.startswith("~"):
        return path
    user, slash, rest = path[1:].partition("/")
    directory = _home_of(user) if user else home(environ)
    if directory is None and user:
        raise ValueError(f"there is no user {user} here; write ./{path} for a file of that name")
    if directory is None:
        raise ValueError("HOME is not set, and this user has no entry in passwd; set HOME, or write the path out")
    return f"{str(directory).rstrip('/')}{slash}{rest}" or "/"


def path_of(path: str | os.PathLike[str]) -> Path:
    """Return `expanded(path)` as a `Path`, for paths that a program passes.

    Raises:
        ConfigError: a variable is not set, or a home directory is unknown.
    """
    try:
        return Path(expanded(os.fspath(path)))
    except ValueError as error:
        raise ConfigError(f"The path is {os.fspath(path)}, but {error}.") from None


def _home_of(user: str) -> Path | None:
    try:
        return Path(pwd.getpwnam(user).pw_dir)
    except (KeyError, ValueError):
        return None


def home(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the user's home directory: `$HOME`, else the directory of the user's entry in passwd; None if neither exists."""
    named = environ.get("HOME", "")
    if os.path.isabs(named):
        return Path(named)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def user_directory(variable: str, below_home: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return hpctrain's directory below `$variable`, else below `below_home` in the user's home; None if neither exists.

    Args:
        variable: variable of the XDG base directory specification; a relative path in it is ignored.
        below_home: path relative to the home directory.
    """
    base = environ.get(variable, "")
    if os.path.isabs(base):
        return Path(base) / "hpctrain"
    directory = home(environ)
    return None if directory is None else directory / below_home / "hpctrain"
