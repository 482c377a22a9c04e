"""Files that are not regular, made below the directory of a test, so that no test opens or replaces a device of the machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

#: kind -> device numbers of a device of characters that is written to; none: a pipe
NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "pipe": None}


def make_node(path: Path, kind: str) -> Path:
    """Make a copy of /dev/null, /dev/zero or /dev/full, a pipe, a directory or a link to itself at `path`, and return it.

    Skip the test if this user may not make devices.
    """
    if kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        numbers = NODES[kind]
        assert numbers is not None
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*numbers))
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        except PermissionError:
            pytest.skip("this user may not make devices")
    return path
