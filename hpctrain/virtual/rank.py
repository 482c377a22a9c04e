"""One virtual rank as the scheduler sees it: whether it may run, its clock, and what it waits for."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.virtual.operations import Posting

_HERE = os.path.dirname(os.path.abspath(__file__))
#: Files whose lines say nothing about the program: this package, and the waiting loop that tests use.
_NOT_THE_PROGRAM = (_HERE + os.sep, os.path.join(os.path.dirname(_HERE), "testing", "virtual.py"))


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
        relative = os.path.relpath(self.file)
        return f"{self.file if relative.startswith('..') else relative}:{self.line}"


def source_line(frame: FrameType | None = None) -> SourceLine:
    """Where the code that uses the communicator stands; of this call, unless the `frame` of another thread is given."""
    if frame is None:
        frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        frame = frame.f_back
    return SourceLine(frame.f_code.co_filename, frame.f_lineno)


@dataclass(slots=True, eq=False)
class RankState:
    """Attributes:
    baton: released by the thread that hands over to this rank; the rank itself acquires it.
    clock_seconds: this rank's virtual time. wake_seconds: heap of completion times that it may be waiting for.
    polled: what it has tested in vain in this pass over its handles. stuck_on: the same of the last whole pass.
    passes: how many whole passes were in vain since something last happened to this rank.
    line: where it stood when it stopped. thread: identity of its thread.
    """

    rank: int
    status: Status = Status.READY
    baton: threading.Lock = field(default_factory=threading.Lock)
    clock_seconds: float = 0.0
    wake_seconds: list[float] = field(default_factory=list)
    polled: dict[Posting, None] = field(default_factory=dict)
    stuck_on: tuple[Posting, ...] = ()
    passes: int = 0
    line: SourceLine | None = None
    thread: int | None = None

    def polls_in_vain(self, posting: Posting) -> None:
        """Count a test that found nothing."""
        if posting in self.polled:
            self.passes += 1
            self.stuck_on = tuple(self.polled)
            self.polled = {}
        self.polled[posting] = None

    def moves_on(self) -> None:
        """Something happened to this rank: what it polls is worth polling again."""
        self.passes = 0
        self.polled.clear()
