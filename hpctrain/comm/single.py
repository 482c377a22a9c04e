"""The communicator of a single process: every operation is complete when it returns. A laptop without MPI trains with it."""

from __future__ import annotations

import os
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from hpctrain.comm.base import Array, Handle


class Complete:
    """A handle of an operation that is complete."""

    def test(self) -> bool:
        return True

    def __str__(self) -> str:
        return "of one process"


class _Receive:
    """A receive from oneself: complete once the matching send has filled it."""

    def __init__(self, buffer: Array, tag: int) -> None:
        self.buffer = buffer
        self.tag = tag
        self.filled = False

    def test(self) -> bool:
        return self.filled

    def __str__(self) -> str:
        return f"receive from 0, tag {self.tag}, of {self.buffer.size} elements"

    def fill(self, message: Array) -> None:
        assert (message.size, message.dtype) == (self.buffer.size, self.buffer.dtype), "message and receiver differ"
        _copy(message, self.buffer)
        self.filled = True


_COMPLETE = Complete()


class SingleCommunicator:
    """Rank 0 of 1. Sums are what is there; gathers copy; messages to oneself match by tag, in posting order."""

    rank = 0
    size = 1
    world_ranks: tuple[int, ...] = (0,)

    def __init__(self, name: str = "world") -> None:
        self.name = name
        self._sent: defaultdict[int, deque[Array]] = defaultdict(deque)
        self._expected: defaultdict[int, deque[_Receive]] = defaultdict(deque)

    def iallreduce(self, buffer: Array) -> Handle:
        _check(buffer)
        return _COMPLETE

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        return self._move(send, recv, counts)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        return self._move(recv if send is None else send, recv, counts)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        assert list(send_counts) == list(recv_counts)
        return self._move(send, recv, send_counts)

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        assert root == 0
        _check(buffer)
        return _COMPLETE

    def ibarrier(self) -> Handle:
        return _COMPLETE

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle:
        assert dest == 0
        _check(buffer)
        if self._expected[tag]:
            self._expected[tag].popleft().fill(buffer)
        else:
            self._sent[tag].append(buffer.copy())
        return _COMPLETE

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle:
        assert source == 0
        _check(buffer)
        receive = _Receive(buffer, tag)
        if self._sent[tag]:
            receive.fill(self._sent[tag].popleft())
        else:
            self._expected[tag].append(receive)
        return receive

    def split(self, color: int | None, key: int, name: str) -> SingleCommunicator | None:
        return None if color is None else SingleCommunicator(name)

    def split_shared_memory(self, name: str) -> SingleCommunicator:
        return SingleCommunicator(name)

    def allgather_object(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        assert root == 0
        return value

    def abort(self, code: int) -> None:
        """End this process at once; does not come back."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _move(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        _check(send)
        _check(recv)
        assert list(counts) == [send.size] == [recv.size]
        assert send.dtype == recv.dtype
        if send is not recv:
            _copy(send, recv)
        return _COMPLETE


def _check(array: Array) -> None:
    flags = getattr(array, "flags", None)  # an array of a device has none, and is C-contiguous
    assert flags is None or flags.c_contiguous, "a buffer is C-contiguous"


def _copy(source: Array, target: Array) -> None:
    target.reshape(-1)[...] = source.reshape(-1)
