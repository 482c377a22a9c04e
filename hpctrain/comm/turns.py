"""Turns: operations that begin in the order in which their places were taken, whatever is ready first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hpctrain.comm.base import Handle


class StageTurn:
    """Implements `Handle`: the place of one operation, which may have to wait until it can begin, and then until it may."""

    __slots__ = ("_handle", "_start", "_turns")

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._start: Callable[[], Handle] | None = None
        self._handle: Handle | None = None

    @property
    def ready(self) -> bool:
        """The operation can begin."""
        return self._start is not None

    def when_ready(self, start: Callable[[], Handle]) -> StageTurn:
        """From now on the operation can begin; it does where all places before have been used."""
        assert self._start is None, "a place is used once"
        self._start = start
        self._turns.advance()
        return self

    def begin(self) -> None:
        """Start the operation. Its turn has come."""
        assert self._start is not None
        self._handle = self._start()

    def test(self) -> bool:
        self._turns.advance()
        return self._handle is not None and self._handle.test()

    def __str__(self) -> str:
        return "waiting for its turn behind operations within the node" if self._handle is None else str(self._handle)


class Turns:
    """Places in one order."""

    def __init__(self) -> None:
        self._waiting: deque[StageTurn] = deque()

    def take(self) -> StageTurn:
        """The next place. It has to be used, or nothing behind it begins."""
        turn = StageTurn(self)
        self._waiting.append(turn)
        return turn

    def advance(self) -> None:
        """Begin the operations whose turn has come."""
        while self._waiting and self._waiting[0].ready:
            self._waiting.popleft().begin()
