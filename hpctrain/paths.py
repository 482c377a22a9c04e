"""Expansion of paths that users write, and the user's own directories, which may not exist."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path

from hpctrain.core.errors import ConfigError

_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z_0-9]*)|\{([^}]*)\})")


def expanded(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a path with `~`, `~user`, `$VARIABLE` and `${VARIABLE}` expanded; a `$` without a name is kept.

    Applied to all paths of configurations and of the command line.

    Raises:
        ValueError: a variable is not set, or a home directory is unknown. The message is to follow "x is $NAME/y, but".
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2] or ""
        found = environ.get(name, "")
        if not found:  # an empty value would turn $SCRATCH/runs into /runs
            raise ValueError(f"the variable {name} in it is not set here; set it, or write the path out")
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
        raise ConfigError(f"A path is {os.fspath(path)}, but {error}.") from None


def _home_of(user: str) -> Path | None:
    try:
        return Path(pwd.getpwnam(user).pw_dir)
    except (KeyError, ValueError):
        return None


def home(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the user's home directory: `$HOME`, else that of the user's entry in passwd. None if neither exists."""
    named = environ.get("HOME", "")
    if os.path.isabs(named):
        return Path(named)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def user_directory(variable: str, below_home: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return hpctrain's directory below `$variable`, else below `below_home` in the user's home. None if neither exists.

    Args:
        variable: of the XDG base directory specification, by which relative paths are ignored.
    """
    base = environ.get(variable, "")
    if os.path.isabs(base):
        return Path(base) / "hpctrain"
    directory = home(environ)
    return None if directory is None else directory / below_home / "hpctrain"
