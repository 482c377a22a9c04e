"""The state of a virtual rank, and where in the program it stands."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import FrameType

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: Folders whose lines say nothing about the program that communicates.
_NOT_THE_PROGRAM = tuple(os.path.join(_PACKAGE, folder, "") for folder in ("virtual", "comm"))


class RankEnded(BaseException):
    """Unwinds a virtual rank because the run is over: another rank has failed. Not to be caught."""


class Status(Enum):
    """The state of a virtual rank."""

    READY = "ready"
    RUNNING = "running"
    PARKED = "parked"  # it only polls, and nothing that it polls has completed
    BLOCKED = "blocked"  # inside an operation that waits
    ENDED = "ended"


@dataclass(frozen=True)
class SourceLine:
    """The innermost line of a call outside the communication code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{_short(self.file, os.getcwd())}:{self.line}"


@cache
def _short(file: str, folder: str) -> str:
    """Return the path relative to a folder, or the whole path outside of it. Cached: each posted message names its line."""
    relative = os.path.relpath(file, folder)
    return file if relative.startswith("..") else relative


def source_line(frame: FrameType | None = None) -> SourceLine:
    """Where the code that uses the communicator stands; of this call, unless the `frame` of another thread is given."""
    if frame is None:
        frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        frame = frame.f_back
    return SourceLine(frame.f_code.co_filename, frame.f_lineno)
