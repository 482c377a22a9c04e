"""Order of operations that have several stages, and the buffers that they use on their way.

Where a stage begins only after another one is complete, the order in which stages could begin depends on timing. They begin in
the order in which the operations were posted instead, whatever is complete first, so that each communicator sees the same
order on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hpctrain.comm.base import Array, Handle


class SpareBuffers:
    """1-D buffers that nobody uses.

    Args:
        make: (elements, an array like them) -> a new buffer; by default one of NumPy's.
    """

    def __init__(self, make: Callable[[int, Array], Array] | None = None) -> None:
        self._make = _new_host_buffer if make is None else make
        self._spare: dict[tuple[int, Any], list[Array]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._spare.values()))

    def take(self, size: int, like: Array) -> Array:
        """A buffer of `size` elements, of the kind and dtype of `like`, whatever they hold; the caller's until given back."""
        spare = self._spare.setdefault((size, like.dtype), [])
        return spare.pop() if spare else self._make(size, like)

    def give_back(self, *buffers: Array) -> None:
        """Let the next ones have these."""
        for buffer in buffers:
            self._spare[buffer.size, buffer.dtype].append(buffer)


def _new_host_buffer(size: int, like: Array) -> Array:
    return np.empty_like(like, shape=(size,))


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
