"""The split group as operators see it: the ranks that exchange activations, and the memory that they do so in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine, Ticket
from hpctrain.comm.single import SingleCommunicator


class SplitGroup:
    """The Pr ranks that share samples and split layers, on a communicator of their own.

    Exchanges follow each other, so all of them share one buffer: the contents of one are valid until the next one starts.

    Attributes:
        rank, size: r and Pr. waited_seconds: all waits for exchanges so far, the time that no computation hid.
    """

    def __init__(self, comm: Communicator, progress: ProgressEngine) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm, self._progress = comm, progress
        self._queue = progress.queue(comm)
        self._buffer = np.zeros(0, np.uint8)
        self.waited_seconds = 0.0

    def reserve(self, size_bytes: int) -> np.ndarray:
        """The shared buffer, uint8, at least so large. Operators that were bound to a smaller one keep that."""
        if self._buffer.size < size_bytes:
            self._buffer = np.zeros(size_bytes, np.uint8)
        return self._buffer[:size_bytes]

    @property
    def buffer_bytes(self) -> int:
        """Size of the shared buffer."""
        return self._buffer.size

    def alltoall(
        self, send: np.ndarray, recv: np.ndarray, send_counts: Sequence[int], recv_counts: Sequence[int], purpose: str
    ) -> Ticket:
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
