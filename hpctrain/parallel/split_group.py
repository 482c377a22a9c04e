"""The split group as operators see it: the ranks that exchange activations, and the memory that they do so in."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.backend.arithmetic import Arithmetic, Array
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.posting_queue import Ticket
from hpctrain.comm.single import SingleCommunicator
from hpctrain.comm.transports import StagedCommunicator


class SplitGroup:
    """The Pr ranks that share samples and split layers, on a communicator of their own.

    Exchanges follow each other, so all of them share one buffer: the contents of one are valid until the next one starts. On a
    device the buffer has one mirror on the host, which they share alike.

    Args:
        comm: nobody else posts on it. arithmetic: of the arrays that are exchanged; by default those of the host.

    Attributes:
        rank, size: r and Pr. waited_seconds: all waits for exchanges so far, the time that no computation hid.
    """

    def __init__(self, comm: Communicator, progress: ProgressEngine, arithmetic: Arithmetic | None = None) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._arithmetic = HostArithmetic() if arithmetic is None else arithmetic
        self._mirrors = self._arithmetic.mirrors()
        self._comm = comm if self._mirrors is None else StagedCommunicator(comm, self._mirrors)
        self._progress = progress
        self._queue = progress.queue(self._comm)
        self._buffer = self.memory(0)
        self.waited_seconds = 0.0

    def memory(self, size_bytes: int) -> Array:
        """Memory for the messages of one operator, uint8 zeros."""
        return self._arithmetic.zeros(size_bytes, "uint8")

    def reserve(self, size_bytes: int) -> Array:
        """The shared buffer, uint8, at least so large. It is replaced where it has to grow: ask again for each exchange."""
        if self._buffer.size < size_bytes:
            old, self._buffer = self._buffer, self.memory(size_bytes)
            if self._mirrors is not None:
                self._mirrors.cover(self._buffer, instead_of=old if old.size else None)
        return self._buffer[:size_bytes]

    @property
    def buffer_bytes(self) -> int:
        """Size of the shared buffer."""
        return int(self._buffer.size)

    def alltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int], purpose: str) -> Ticket:
        """Send piece r of `send` to rank r, and receive piece r of `recv` from it. Collective; does not wait."""
        return self._queue.post(lambda: self._comm.ialltoall(send, recv, send_counts, recv_counts), purpose)

    def wait(self, ticket: Ticket) -> None:
        """Wait until the exchange is complete."""
        begin = self._progress.waited_seconds
        self._progress.wait(ticket)
        self.waited_seconds += self._progress.waited_seconds - begin


def unused_group() -> SplitGroup:
    """A group for graphs that are planned and never run."""
    return SplitGroup(SingleCommunicator("split"), ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None))
