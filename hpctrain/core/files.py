"""Files that other users may have made, reads that neither block nor fill the memory, and expansion of paths.

`open_regular` opens a regular file of any owner. Use it for files that the user names and for files of runs. `open_own` opens no
file that another user may have made. Use it for names that hpctrain derives in directories such as /tmp, where another user may
have made a file or a link with this name.
"""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import stat
from collections.abc import Callable, Mapping
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
_KINDS = ((stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISLNK, "a link"))
# Opening a file neither waits for the other end of a pipe nor makes a terminal that of the process.
_NO_WAIT = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def read_at(descriptor: int, out: memoryview, at: int) -> int:
    """Fill `out` with the bytes of a file from offset `at`; return their number, which is smaller only if the file ends."""
    done = 0
    while done < len(out) and (count := os.preadv(descriptor, [out[done:]], at + done)):
        done += count
    return done


def write_at(descriptor: int, data: bytes | memoryview, at: int) -> None:
    """Write all of `data` to a file, from offset `at`."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count


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
    if not (pipes and stat.S_ISFIFO(mode) and not os.path.lexists(os.path.realpath(path))):
        _require_kind(mode, path)


def _require_kind(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file", os.fspath(path))


def is_private(directory: str | Path) -> bool:
    """Return whether a path is a real directory of this user or root to which no other user may write."""
    with suppress(OSError):
        status = os.lstat(directory)
        return stat.S_ISDIR(status.st_mode) and _is_of_user(status) and not status.st_mode & 0o022
    return False


def _is_of_user(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0)


def link_target(path: Path) -> Path | None:
    """Return the path to which a link leads; None if `path` is not a link.

    Raises:
        OSError: another user made the link, and its directory is not private (see `is_private`).
    """
    try:
        target = os.readlink(path)
        mine = _is_of_user(os.lstat(path))
    except OSError:  # no link
        return None
    if not mine and not is_private(os.path.realpath(path.parent)):
        raise OSError(errno.EPERM, "it is a link of another user", os.fspath(path))
    return path.parent / target


def open_regular(path: str | Path, flags: int = os.O_RDONLY, *, pipes: bool = False) -> int:
    """Open a regular file without waiting for other processes, and return its descriptor.

    Other kinds of files are not opened, because opening a pipe waits for a writer, and a device may have side effects or no end.
    A file is written through a link only if `link_target` permits it.

    Args:
        flags: O_RDONLY, or flags for writing without O_TRUNC.
        pipes: see `require_regular`.

    Raises:
        OSError: the file is missing or inaccessible, or not a regular file.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    with suppress(FileNotFoundError):
        require_regular(path, pipes=pipes)
    if writes and (target := link_target(Path(path))) is not None:
        return open_regular(target, flags)

    def check(status: os.stat_result) -> None:  # another file may have replaced it in between
        if not (pipes and stat.S_ISFIFO(status.st_mode)):
            _require_kind(status.st_mode, path)

    return _checked(path, flags | (os.O_NOFOLLOW if writes else 0), check)


def open_own(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o664) -> int:
    """Open a regular file whose name hpctrain derives, and return its descriptor. Another user's file is not opened.

    The path must not be a link. In a directory that is not private (see `is_private`), the file must belong to this user or root,
    must not be writable for everyone, and must have no second name. A file that is only appended to may belong to another user.

    Args:
        flags: flags without O_TRUNC. O_CREAT creates a missing file.
        mode: permissions of a new file, without those in the umask.

    Raises:
        OSError: the file is missing or inaccessible, or another user may have made it.
    """
    if flags & os.O_CREAT:
        with suppress(FileExistsError):
            return os.open(path, flags | _NO_WAIT | os.O_EXCL, mode)

    def check(status: os.stat_result) -> None:
        _require_kind(status.st_mode, path)
        own = flags & os.O_APPEND or (_is_of_user(status) and not status.st_mode & stat.S_IWOTH)
        if not (own and status.st_nlink < 2) and not is_private(os.path.realpath(os.path.dirname(path))):
            raise OSError(errno.EPERM, "another user may have made it", os.fspath(path))

    check(os.lstat(path))
    return _checked(path, (flags & ~os.O_CREAT) | os.O_NOFOLLOW, check)


def _checked(path: str | Path, flags: int, check: Callable[[os.stat_result], None]) -> int:
    """Open a file and return its descriptor. If `check` raises an error, close the file and raise the error."""
    descriptor = os.open(path, flags | _NO_WAIT, 0o666)
    try:
        check(os.fstat(descriptor))
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_bytes(path: str | Path, most: int = RECORD_BYTES, *, pipes: bool = False, own: bool = False) -> bytes:
    """Return the content of a file.

    Args:
        most: maximum size in bytes.
        pipes: see `require_regular`.
        own: whether hpctrain derives the name; see `open_own`.

    Raises:
        OSError: the file cannot be opened (see `open_regular` and `open_own`), cannot be read, or is too large.
    """
    descriptor = open_own(path) if own else open_regular(path, pipes=pipes)
    try:
        content = bytearray()
        larger = os.fstat(descriptor).st_size > most  # a pipe has no size
        while not larger and (block := os.read(descriptor, min(_BLOCK, most + 1))):
            content += block
            larger = len(content) > most
    finally:
        os.close(descriptor)
    if larger:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes, the maximum for such a file", os.fspath(path))
    return bytes(content)


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
        ValueError: a variable is not set or empty, or a home directory is unknown. The message is a clause that follows "x is
            $NAME/y, but".
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2] or ""
        found = environ.get(name, "")
        if not found:  # an empty value would turn $SCRATCH/runs into /runs
            state = "empty" if name in environ else "not set"
            raise ValueError(f"the variable {name} is {state} here; set it, or write the path out")
        return found

    path = _VARIABLE.sub(value, text)
    if not path.startswith("~"):
        return path
    user, slash, rest = path[1:].partition("/")
    try:
        directory = Path(pwd.getpwnam(user).pw_dir) if user else home(environ)
    except (KeyError, ValueError):
        raise ValueError(f"there is no user {user} here; write ./{path} for a file of that name") from None
    if directory is None:
        raise ValueError("HOME is not set, and this user has no entry in passwd; set HOME, or write the path out")
    return f"{str(directory).rstrip('/')}{slash}{rest}" or "/"


def path_of(path: str | os.PathLike[str]) -> Path:
    """Return `expanded(path)` as a `Path`, for paths that a program passes.

    Raises:
        ConfigError: a variable is not set or empty, or a home directory is unknown.
    """
    try:
        return Path(expanded(os.fspath(path)))
    except ValueError as error:
        raise ConfigError(f"The path is {os.fspath(path)}, but {error}.") from None


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
