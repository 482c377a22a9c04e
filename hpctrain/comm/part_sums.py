"""Sums whose parts travel as they are: each goes to the rank that owns it, where kernels add them up.

For transports that move arrays of a device and do not sum them. A reduce-scatter becomes an all-to-all and a local sum, an
allreduce that and an allgather: the bytes of both are those of a ring. Parts are added in rank order, from 0 on, so the bits do
not depend on what arrives first, and all ranks have the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.core.intervals import even
from hpctrain.comm.base import Array, Communicator, Handle
from hpctrain.comm.mpi_buffers import piece
from hpctrain.comm.spare_buffers import SpareBuffers
from hpctrain.comm.order import Finished, Stages


class PartSums:
    """Implements `GradientSums` for 1-D arrays of a device.

    A sum on its way has a buffer of the parts that arrive, made when so many are first on their way at once and kept.

    Args:
        comm: moves arrays of the device; other operations may be posted on it in between. gathers: the same ranks in the same
            order, for the second stage of allreduces alone. arithmetic: of the device.
    """

    def __init__(self, comm: Communicator, gathers: Communicator, arithmetic: Arithmetic) -> None:
        self._comm, self._gathers, self._arithmetic = comm, gathers, arithmetic
        self._allreduces = Stages()
        self._spare = SpareBuffers(lambda size, like: arithmetic.zeros(size, like.dtype))

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        received = self._received(send, counts)
        handle = self._send_parts(send, received, counts)
        return Finished(handle, lambda: self._add(received, recv))

    def iallreduce(self, buffer: Array) -> Handle:
        counts = even(buffer.size, self._comm.size)
        received = self._received(buffer, counts)
        handle = self._send_parts(buffer, received, counts)

        def gather() -> Handle:
            self._add(received, piece(buffer, counts, self._comm.rank))
            return self._gathers.iallgather(None, buffer, counts)

        return self._allreduces.add(handle, gather)

    def _received(self, like: Array, counts: Sequence[int]) -> Array:
        """A buffer for this rank's part from everyone."""
        return self._spare.take(counts[self._comm.rank] * self._comm.size, like)

    def _send_parts(self, send: Array, received: Array, counts: Sequence[int]) -> Handle:
        return self._comm.ialltoall(send, received, counts, [counts[self._comm.rank]] * self._comm.size)

    def _add(self, received: Array, total: Array) -> None:
        """Enqueue total := the sum of all ranks' parts, and let the next operation have the buffer, behind that."""
        if total.size:
            parts = [received[begin : begin + total.size] for begin in range(0, received.size, total.size)]
            self._arithmetic.copy(total, parts[0])
            for part in parts[1:]:
                self._arithmetic.add(total, part)
        self._spare.give_back(received)
