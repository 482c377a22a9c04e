"""Operations in two stages: the second stages are posted in the order of the first ones, whatever is complete first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hpctrain.comm.base import Handle


class Finished:
    """An operation after which something is computed on this rank, once, in the `test` that finds it complete."""

    __slots__ = ("_finish", "_handle")

    def __init__(self, handle: Handle, finish: Callable[[], None]) -> None:
        self._handle = handle
        self._finish: Callable[[], None] | None = finish

    def test(self) -> bool:
        if self._finish is None:
            return True
        if not self._handle.test():
            return False
        finish, self._finish = self._finish, None
        finish()
        return True

    def __str__(self) -> str:
        return str(self._handle)


class Staged:
    """An operation of two stages."""

    __slots__ = ("_begin_second", "_finish", "_first", "_second", "_stages", "first_complete")

    def __init__(self, stages: Stages, first: Handle, begin_second: Callable[[], Handle], finish: Callable[[], None]) -> None:
        self.first_complete = False
        self._stages = stages
        self._first: Handle | None = first
        self._begin_second: Callable[[], Handle] | None = begin_second
        self._second: Handle | None = None
        self._finish: Callable[[], None] | None = finish

    def begin_second(self) -> None:
        """Post the second stage. Its turn has come."""
        begin, self._begin_second = self._begin_second, None
        assert begin is not None
        self._second = begin()

    def test(self) -> bool:
        if self._finish is None:
            return True
        if self._first is not None and self._first.test():
            self._first, self.first_complete = None, True
            self._stages.advance()
        if self._second is None or not self._second.test():
            return False
        self._finish()
        self._finish = self._second = None
        return True

    def __str__(self) -> str:
        if self._second is not None:
            return f"{self._second}, the second of two stages"
        return "first of two stages complete" if self._first is None else f"{self._first}, the first of two stages"


class Stages:
    """Operations whose second stage has not begun, in the order in which they were posted.

    A second stage starts in a `test` of its handle, or of a later one's, once its first stage and those of all operations before
    it are complete. Where all second stages go to one communicator, that sees the same order on every rank.
    """

    def __init__(self) -> None:
        self._waiting: deque[Staged] = deque()

    def add(self, first: Handle, begin_second: Callable[[], Handle], finish: Callable[[], None] = lambda: None) -> Staged:
        """An operation whose first stage has just been posted. finish: called once, when both are complete."""
        staged = Staged(self, first, begin_second, finish)
        self._waiting.append(staged)
        return staged

    def advance(self) -> None:
        """Begin the second stages whose turn has come."""
        while self._waiting and self._waiting[0].first_complete:
            self._waiting.popleft().begin_second()
