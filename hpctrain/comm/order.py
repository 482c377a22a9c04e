"""Order across communicators, defined in one place: operations begin in the order in which they were added to a queue.

Within one communicator, a `PostingQueue` starts operations in the order in which they were queued. But some operations cannot
begin when they are started. The second stage of a collective waits for the first stage, an operation on device arrays waits for
their copies, and a stage within a node waits for stages that other communicators have posted there. If each operation began as
soon as possible, the order would depend on timing and differ between ranks, and collectives would not match. Such operations
therefore wait in an `InOrder`. An operation begins in a `test` of its own handle or of a later one, once it is ready and all
operations added before it have begun. If all operations of a queue go to one communicator, that communicator sees the same order
on every rank.

With NCCL, operations of several communicators would wait for each other on the device, so a run uses one communicator for all
operations of a group (`averaging.averagers`).
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
    """Base of handles with a place in a queue. Subclasses define `ready` and `__str__`.

    Args:
        start: function that posts the operation; called once. None: the function is not known yet, and `ready` must return False.
        finish: callback, called once in the `test` that finds the operation complete.

    Attributes:
        handle: handle of the posted operation; None before it begins.
        complete: whether the operation is complete.
    """

    __slots__ = ("_finish", "_order", "_start", "complete", "handle")

    def __init__(self, order: InOrder, start: Callable[[], Handle] | None, finish: Callable[[], None] = _nothing) -> None:
        self._order, self._start, self._finish = order, start, finish
        self.handle: Handle | None = None
        self.complete = False

    @abstractmethod
    def ready(self) -> bool:
        """Return whether the operation may begin once its turn has come, without driving other operations."""

    def begin(self) -> None:
        """Post the operation. The queue calls this when its turn has come."""
        start, self._start = self._start, None
        assert start is not None, "an operation must begin once"
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
    """Queue of operations that begin in the order in which they were added."""

    def __init__(self) -> None:
        self._waiting: deque[OrderedOperation] = deque()

    def add(self, operation: OrderedOperation) -> None:
        """Append an operation and begin it if possible.

        The operation must become ready at some time; otherwise no operation after it begins.
        """
        self._waiting.append(operation)
        self.advance()

    def advance(self) -> None:
        """Begin operations from the head of the queue while they are ready."""
        while self._waiting and self._waiting[0].ready():
            self._waiting.popleft().begin()

    def second_stage(self, first: Handle, start: Callable[[], Handle], finish: Callable[[], None] = _nothing) -> SecondStage:
        """Add the second stage of an operation, which `start` will post, and return a handle of both stages.

        Args:
            first: handle of the first stage, which has been posted.
            finish: callback, called once when both stages are complete.
        """
        operation = SecondStage(self, first, start, finish)
        self.add(operation)
        return operation

    def reserve(self) -> ReservedOperation:
        """Reserve the next place for an operation that is not known yet."""
        place = ReservedOperation(self, None)
        self.add(place)
        return place


class SecondStage(OrderedOperation):
    """Second stage of a collective, ready once the first stage is complete. Its `test` drives both stages."""

    __slots__ = ("_first",)

    def __init__(self, order: InOrder, first: Handle, start: Callable[[], Handle], finish: Callable[[], None]) -> None:
        super().__init__(order, start, finish)
        self._first: Handle | None = first

    def ready(self) -> bool:
        return self._first is None

    def test(self) -> bool:
        # Only this operation's test drives its first stage; otherwise each test of a later operation would drive it again.
        if self._first is not None and self._first.test():
            self._first = None
        return super().test()

    def __str__(self) -> str:
        if self.handle is not None:
            return f"{self.handle}, the second of two stages"
        return "first of two stages complete" if self._first is None else f"{self._first}, the first of two stages"


class ReservedOperation(OrderedOperation):
    """Place in a queue for an operation that is not known yet, ready once `fill` was called."""

    __slots__ = ()

    def ready(self) -> bool:
        return self._start is not None

    def fill(self, start: Callable[[], Handle]) -> ReservedOperation:
        """Set the operation of this place. It begins once all operations before it have begun."""
        assert self._start is None, "a place is used once"
        assert self.handle is None, "a place is used once"
        self._start = start
        self._order.advance()
        return self

    def __str__(self) -> str:
        return "waiting for its turn after operations within the node" if self.handle is None else str(self.handle)


class Finished:
    """Operation followed by a computation on this rank, which runs once, in the `test` that finds the operation complete."""

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
    """Pool of 1-D buffers for operations in flight. Buffers are reused in later steps.

    Args:
        make: function (elements, an array like them) -> new buffer; default: a NumPy array.
    """

    def __init__(self, make: Callable[[int, Array], Array] | None = None) -> None:
        self._make = make
        self._spare: dict[tuple[int, Any], list[Array]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._spare.values()))

    def take(self, size: int, like: Array) -> Array:
        """Return an uninitialised buffer of `size` elements, of the same kind and dtype as `like`.

        The caller owns it until `give_back`.
        """
        spare = self._spare.setdefault((size, like.dtype), [])
        if spare:
            return spare.pop()
        return np.empty_like(like, shape=(size,)) if self._make is None else self._make(size, like)

    def give_back(self, *buffers: Array) -> None:
        """Return buffers to the pool."""
        for buffer in buffers:
            self._spare[buffer.size, buffer.dtype].append(buffer)
