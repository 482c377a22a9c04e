"""Operations on arrays that lie on a device, over a communicator that knows those of the host: it works with every MPI.

An operation has three phases: its arrays are copied to mirrors on the host, then it is posted there, and what it brought is
copied back. The second begins in a `test` of its handle, or of a later one's, once the copies to the host are done and all
operations before it have been posted; so the communicator sees the order in which operations were started, the same on every
rank, whichever device is done first. An operation is complete once the copies back are enqueued: later work of kernels comes
after them, and the host goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpctrain.backend.mirrors import HostMirrors, Transit
from hpctrain.comm.base import Array, Communicator, GradientSums, Handle

_Pieces = list[tuple[int, int]]


class StagedOperation:
    """Implements `LateHandle`: an operation in three phases.

    Args:
        order: of the communicator. transit: of its arrays. post: begins the second phase. finish: begins the third.
        text: the operation, for messages before it is posted. finished: what messages say of it in the end.
    """

    __slots__ = ("_finish", "_finished", "_handle", "_order", "_post", "_text", "operation", "transit")

    def __init__(
        self,
        order: PostingOrder,
        transit: Transit,
        post: Callable[[], Handle],
        finish: Callable[[], None],
        text: str,
        finished: str = "on its way to the device",
    ) -> None:
        self.transit, self.operation = transit, ""
        self._order, self._text, self._finished = order, text, finished
        self._post: Callable[[], Handle] | None = post
        self._handle: Handle | None = None
        self._finish: Callable[[], None] | None = finish

    def post(self) -> None:
        """Begin the second phase. Its turn has come."""
        post, self._post = self._post, None
        assert post is not None, "an operation is posted once"
        self._handle = post()
        self.operation = str(self._handle)

    def test(self) -> bool:
        if self._finish is None:
            return True
        self._order.advance()
        if self._handle is None or not self._handle.test():
            return False
        finish, self._finish = self._finish, None
        finish()
        return True

    def __str__(self) -> str:
        if self._finish is None:
            return f"{self._text}, {self._finished}"
        if self._handle is not None:
            return str(self._handle)
        waits_for = "its turn behind operations that wait for the device" if self.transit.on_host() else "the device"
        return f"{self._text}, waiting for {waits_for}"


class PostingOrder:
    """Operations that have not been posted, in the order in which they were started."""

    def __init__(self) -> None:
        self._waiting: deque[StagedOperation] = deque()

    def add(self, operation: StagedOperation) -> None:
        """The next one: it is posted at once where that may be."""
        self._waiting.append(operation)
        self.advance()

    def advance(self) -> None:
        """Post the operations whose turn has come."""
        while self._waiting and self._waiting[0].transit.on_host():
            self._waiting.popleft().post()


class _Passage:
    """The mirrors of one operation's arrays; an array of the host is its own mirror."""

    def __init__(self, mirrors: HostMirrors) -> None:
        self._mirrors = mirrors
        self._leaving: list[tuple[np.ndarray, Array]] = []
        self._arriving: tuple[Array, _Pieces] = (None, [])

    def mirror(self, array: Array, *, leaves: _Pieces | None = None, arrives: _Pieces | None = None) -> np.ndarray:
        """The array's mirror.

        Args:
            leaves: the intervals of its elements that are copied to the mirror before the operation. arrives: those that are
                copied back, of one array of an operation. None: no element is.
        """
        if isinstance(array, np.ndarray):
            return array
        flat = array.reshape(-1)
        mirror = self._mirrors.mirror(array)
        self._leaving += [(mirror[begin:end], flat[begin:end]) for begin, end in leaves or () if begin < end]
        if arrives is not None:
            assert self._arriving[0] is None, "one array of an operation receives"
            self._arriving = array, [(begin, end) for begin, end in arrives if begin < end]
        return mirror

    def begin(self) -> Transit:
        """Enqueue the copies to the host."""
        return self._mirrors.leave(self._leaving)

    def end(self, transit: Transit) -> None:
        """Enqueue the copies back."""
        self._mirrors.arrive(transit, *self._arriving)


def _whole(array: Array) -> _Pieces:
    return [(0, array.size)]


def _own_and_others(counts: Sequence[int], rank: int) -> tuple[_Pieces, _Pieces]:
    """The interval of a rank's piece of a buffer, and those of all other pieces."""
    begin, total = sum(counts[:rank]), sum(counts)
    end = begin + counts[rank]
    return [(begin, end)], [(0, begin), (end, total)]


class StagedSums:
    """Implements `GradientSums`: those of `sums`, for arrays of a device.

    Args:
        sums: on arrays of the host. order: of the communicator that they share with other operations.
    """

    def __init__(self, sums: GradientSums, mirrors: HostMirrors, order: PostingOrder) -> None:
        self._sums, self._mirrors, self._order = sums, mirrors, order

    def iallreduce(self, buffer: Array) -> Handle:
        passage = _Passage(self._mirrors)
        mirror = passage.mirror(buffer, leaves=_whole(buffer), arrives=_whole(buffer))
        return _start(self._order, passage, lambda: self._sums.iallreduce(mirror), f"allreduce of {buffer.size} elements")

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        passage = _Passage(self._mirrors)
        sent, received = passage.mirror(send, leaves=_whole(send)), passage.mirror(recv, arrives=_whole(recv))
        text = f"reduce-scatter of {send.size} elements"
        return _start(self._order, passage, lambda: self._sums.ireduce_scatter(sent, received, counts), text)


class StagedCommunicator:
    """Implements `Communicator` for arrays of a device and of the host alike. Making it is not collective.

    Args:
        inner: carries the messages; nobody else posts on it. mirrors: of the device.

    Attributes:
        rank, size, name, world_ranks: of `inner`.
    """

    def __init__(self, inner: Communicator, mirrors: HostMirrors) -> None:
        self.rank, self.size, self.name, self.world_ranks = inner.rank, inner.size, inner.name, inner.world_ranks
        self._inner, self._mirrors, self._order = inner, mirrors, PostingOrder()
        self._sums = StagedSums(inner, mirrors, self._order)

    def sums_of(self, sums: GradientSums) -> GradientSums:
        """Sums over the same ranks, whose operations keep the order of this communicator's."""
        return StagedSums(sums, self._mirrors, self._order)

    def iallreduce(self, buffer: Array) -> Handle:
        return self._sums.iallreduce(buffer)

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        return self._sums.ireduce_scatter(send, recv, counts)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        passage, text = _Passage(self._mirrors), f"allgather of {recv.size} elements"
        mine, others = _own_and_others(counts, self.rank)
        if send is None:
            received = passage.mirror(recv, leaves=mine, arrives=others)
            return _start(self._order, passage, lambda: self._inner.iallgather(None, received, counts), text)
        sent, received = passage.mirror(send, leaves=_whole(send)), passage.mirror(recv, arrives=_whole(recv))
        return _start(self._order, passage, lambda: self._inner.iallgather(sent, received, counts), text)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        passage = _Passage(self._mirrors)
        sent, received = passage.mirror(send, leaves=_whole(send)), passage.mirror(recv, arrives=_whole(recv))
        text = f"all-to-all of {send.size} elements"
        return _start(self._order, passage, lambda: self._inner.ialltoall(sent, received, send_counts, recv_counts), text)

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        passage = _Passage(self._mirrors)
        leaves, arrives = (_whole(buffer), None) if self.rank == root else (None, _whole(buffer))
        mirror = passage.mirror(buffer, leaves=leaves, arrives=arrives)
        text = f"broadcast of {buffer.size} elements"
        return _start(self._order, passage, lambda: self._inner.ibroadcast(mirror, root), text)

    def ibarrier(self) -> Handle:
        return _start(self._order, _Passage(self._mirrors), self._inner.ibarrier, "barrier")

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle:
        passage = _Passage(self._mirrors)
        mirror = passage.mirror(buffer, leaves=_whole(buffer))
        text = f"message of {buffer.size} elements to {dest}"
        return _start(self._order, passage, lambda: self._inner.isend(mirror, dest, tag), text)

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle:
        passage = _Passage(self._mirrors)
        mirror = passage.mirror(buffer, arrives=_whole(buffer))
        text = f"message of {buffer.size} elements from {source}"
        return _start(self._order, passage, lambda: self._inner.irecv(mirror, source, tag), text)

    def split(self, color: int | None, key: int, name: str) -> Communicator | None:
        inner = self._inner.split(color, key, name)
        return None if inner is None else StagedCommunicator(inner, self._mirrors)

    def split_shared_memory(self, name: str) -> Communicator:
        return StagedCommunicator(self._inner.split_shared_memory(name), self._mirrors)

    def allgather_object(self, value: Any) -> list[Any]:
        return self._inner.allgather_object(value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self._inner.broadcast_object(value, root)

    def abort(self, code: int) -> None:
        self._inner.abort(code)


def _start(order: PostingOrder, passage: _Passage, post: Callable[[], Handle], text: str) -> Handle:
    """Begin the first phase of an operation."""
    transit = passage.begin()
    operation = StagedOperation(order, transit, post, lambda: passage.end(transit), text)
    order.add(operation)
    return operation
