"""Operations on arrays of a device over an MPI library that reads and writes such memory: nothing is copied to the host.

An operation is posted once the kernels before it are done, in the order in which operations were started, the same on every rank,
whichever device is done first; it is complete when MPI says so, and what kernels are given from then on comes behind it. The
library moves arrays and sums none: nonblocking sums of a device's memory crash some libraries, and go by way of the host in
others, so kernels add (see `part_sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.device_messages import WorkMark
from hpctrain.comm.base import Array, Communicator, Handle
from hpctrain.comm.mpi_buffers import piece
from hpctrain.comm.part_sums import PartSums
from hpctrain.comm.transports import PostingOrder, StagedOperation


class _BehindKernels:
    """Implements `Transit` for arrays that stay where they are. mark: of the kernels before; None: there are none."""

    def __init__(self, mark: WorkMark | None) -> None:
        self._mark = mark

    def on_host(self) -> bool:
        return self._mark is None or self._mark.done


class DeviceMpiCommunicator:
    """Implements `Communicator` for arrays of a device and of the host alike. Making it is not collective, see `over_mpi`.

    Args:
        inner: carries the messages, and reads the device's memory; nobody else posts on it. arithmetic: of the device.
        gathers: the same ranks in the same order, for the second stage of allreduces; None: arrays of the device are not summed.

    Attributes:
        rank, size, name, world_ranks: of `inner`.
    """

    def __init__(self, inner: Communicator, arithmetic: Arithmetic, gathers: Communicator | None = None) -> None:
        messages = arithmetic.messages()
        assert messages is not None, "the arrays lie on a device"
        self.rank, self.size, self.name, self.world_ranks = inner.rank, inner.size, inner.name, inner.world_ranks
        self._inner, self._arithmetic, self._messages = inner, arithmetic, messages
        self._order = PostingOrder()
        self._sums = None if gathers is None else PartSums(self, gathers, arithmetic)

    def iallreduce(self, buffer: Array) -> Handle:
        if not isinstance(buffer, np.ndarray):
            return self._device_sums().iallreduce(buffer)
        return self._start(lambda: self._inner.iallreduce(buffer), "allreduce", buffer)

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        if not isinstance(send, np.ndarray):
            return self._device_sums().ireduce_scatter(send, recv, counts)
        return self._start(lambda: self._inner.ireduce_scatter(send, recv, counts), "reduce-scatter", send)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        if send is not None and not isinstance(recv, np.ndarray):
            self._arithmetic.copy(piece(recv, counts, self.rank), send.reshape(-1))
            send = None  # in place now, by the device's own copy
        return self._start(lambda: self._inner.iallgather(send, recv, counts), "allgather", recv)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        if not isinstance(recv, np.ndarray):
            self._arithmetic.copy(piece(recv, recv_counts, self.rank), piece(send, send_counts, self.rank))
        return self._start(lambda: self._inner.ialltoall(send, recv, send_counts, recv_counts), "all-to-all", send)

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        return self._start(lambda: self._inner.ibroadcast(buffer, root), "broadcast", buffer)

    def ibarrier(self) -> Handle:
        return self._start(self._inner.ibarrier, "barrier")

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle:
        return self._start(lambda: self._inner.isend(buffer, dest, tag), f"message to {dest}", buffer)

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle:
        return self._start(lambda: self._inner.irecv(buffer, source, tag), f"message from {source}", buffer)

    def split(self, color: int | None, key: int, name: str) -> Communicator | None:
        inner = self._inner.split(color, key, name)
        return None if inner is None else over_mpi(inner, self._arithmetic)

    def split_shared_memory(self, name: str) -> Communicator:
        return over_mpi(self._inner.split_shared_memory(name), self._arithmetic)

    def allgather_object(self, value: Any) -> list[Any]:
        return self._inner.allgather_object(value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self._inner.broadcast_object(value, root)

    def abort(self, code: int) -> None:
        self._inner.abort(code)

    def _device_sums(self) -> PartSums:
        assert self._sums is not None, f"{self.name} moves arrays of the device, and sums none"
        return self._sums

    def _start(self, post: Callable[[], Handle], operation: str, array: Array | None = None) -> Handle:
        """The next operation; `array` says how large it is, and where."""
        mark = None if array is None or isinstance(array, np.ndarray) else self._messages.mark()
        text = operation if array is None else f"{operation} of {array.size} elements"
        started = StagedOperation(self._order, _BehindKernels(mark), post, lambda: None, text, "complete")
        self._order.add(started)
        return started


def over_mpi(inner: Communicator, arithmetic: Arithmetic) -> DeviceMpiCommunicator:
    """The ranks of `inner` by an MPI library that reads the device's memory, with sums. Collective; set-up only."""
    gathers = inner.split(0, inner.rank, f"{inner.name} sums")
    assert gathers is not None
    return DeviceMpiCommunicator(inner, arithmetic, DeviceMpiCommunicator(gathers, arithmetic))
