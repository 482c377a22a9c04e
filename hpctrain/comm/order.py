"""Order across communicators, in one place and by one law: operations begin in the order in which they were added to a queue.

Within one communicator a `PostingQueue` starts operations in the order in which they were queued. But some cannot begin when
they are started: the second stage of a collective waits for its first one, an operation on arrays of a device for their
copies, a stage within a node for those that other communicators have posted there before. If each began as soon as it could,
the order would depend on timing and differ between ranks, and collectives would not match. So they wait in an `InOrder`: an
operation begins in a `test` of its own handle, or of a later one's, once it is ready and everything added before it has begun,
whatever is ready first. If all operations of a queue go to one communicator, that sees the same order on every rank.

By NCCL operations of several communicators would wait for each other on the device, so a run puts all of a group on one
(`averaging.averagers`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hpctrain.comm.base import Array, Handle


def _nothing() -> None:
    """No-op callback."""


class OrderedOperation(ABC):
    """Implements `Handle`: one operation with a place in a queue. Subclasses define when it is ready, and its text.

    Args:
        start: posts the operation; called once. None: `ready` has to say that it is still unknown.
        finish: called once, in the `test` that finds the operation complete.
    """

    __slots__ = ("_finish", "_order", "_start", "complete", "handle")

    def __init__(self, order: InOrder, start: Callable[[], Handle] | None, finish: Callable[[], None] = _nothing) -> None:
        self._order, self._start, self._finish = order, start, finish
        self.handle: Handle | None = None
        self.complete = False

    @abstractmethod
    def ready(self) -> bool:
        """Return whether the operation may begin once its turn has come. Must not drive anything."""

    def begin(self) -> None:
        """Post the operation. Its turn has come."""
        start, self._start = self._start, None
        assert start is not None, "an operation begins once"
        self.handle = start()

    def test(self) -> bool:
        if self.complete:
            return True
        self._order.advance()
        if self.handle is None or not self.handle.test():
            return False
        self.complete = True
        self._finish()
        return True


class InOrder:
    """A queue of operations that have not begun."""

    def __init__(self) -> None:
        self._waiting: deque[OrderedOperation] = deque()

    def add(self, operation: OrderedOperation) -> None:
        """Append an operation; it begins at once if it may. It has to become ready, or nothing after it begins."""
        self._waiting.append(operation)
        self.advance()

    def advance(self) -> None:
        """Begin the operations whose turn has come."""
        while self._waiting and self._waiting[0].ready():
            self._waiting.popleft().begin()

    def second_stage(self, first: Handle, start: Callable[[], Handle], finish: Callable[[], None] = _nothing) -> SecondStage:
        """Return an operation of two stages, of which the first has just been posted.

        Args:
            start: posts the second stage. finish: called once, when both are complete.
        """
        operation = SecondStage(self, first, start, finish)
        self.add(operation)
        return operation

    def reserve(self) -> ReservedOperation:
        """Return the next place, for an operation that is known later."""
        place = ReservedOperation(self, None)
        self.add(place)
        return place


class SecondStage(OrderedOperation):
    """The second stage of a collective, ready once the first stage is complete. Its `test` drives both."""

    __slots__ = ("_first",)

    def __init__(self, order: InOrder, first: Handle, start: Callable[[], Handle], finish: Callable[[], None]) -> None:
        super().__init__(order, start, finish)
        self._first: Handle | None = first

    def ready(self) -> bool:
        return self._first is None

    def test(self) -> bool:
        # Only this operation's test drives its first stage: the owner of the handle counts each test of it.
        if self._first is not None and self._first.test():
            self._first = None
        return super().test()

    def __str__(self) -> str:
        if self.handle is not None:
            return f"{self.handle}, the second of two stages"
        return "first of two stages complete" if self._first is None else f"{self._first}, the first of two stages"


class ReservedOperation(OrderedOperation):
    """A place that was taken before its operation is known; it is ready once `fill` was called."""

    __slots__ = ()

    def ready(self) -> bool:
        return self._start is not None

    def fill(self, start: Callable[[], Handle]) -> ReservedOperation:
        """Set the operation of this place, which begins once everything before it has begun."""
        assert self._start is None, "a place is used once"
        assert self.handle is None, "a place is used once"
        self._start = start
        self._order.advance()
        return self

    def __str__(self) -> str:
        return "waiting for its turn after operations within the node" if self.handle is None else str(self.handle)


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


class SpareBuffers:
    """1-D buffers of operations on their way: as many as are used at once, used again step after step.

    Args:
        make: (elements, an array like them) -> a new buffer; by default one of NumPy's.
    """

    def __init__(self, make: Callable[[int, Array], Array] | None = None) -> None:
        self._make = make
        self._spare: dict[tuple[int, Any], list[Array]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._spare.values()))

    def take(self, size: int, like: Array) -> Array:
        """Return a buffer of `size` elements of any values, of the kind and dtype of `like`; the caller's until given back."""
        spare = self._spare.setdefault((size, like.dtype), [])
        if spare:
            return spare.pop()
        return np.empty_like(like, shape=(size,)) if self._make is None else self._make(size, like)

    def give_back(self, *buffers: Array) -> None:
        """Make these buffers available to later operations."""
        for buffer in buffers:
            self._spare[buffer.size, buffer.dtype].append(buffer)
