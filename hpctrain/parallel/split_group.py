"""The ROW axis as operators see it: a group that exchanges activations, and the memory that it does so in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine, Ticket


class SplitGroup:
    """The ranks that share samples, on a communicator of its own.

    Exchanges follow each other, so all of them share one buffer: what one leaves in it is valid until the next one starts.

    Attributes:
        rank, size: r and Pr. waited_seconds: all waits for exchanges so far: what nothing hid.
    """

    def __init__(self, comm: Communicator, progress: ProgressEngine) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm, self._progress = comm, progress
        self._queue = progress.queue(comm)
        self._buffer = np.zeros(0, np.uint8)
        self.waited_seconds = 0.0

    def reserve(self, size_bytes: int) -> np.ndarray:
        """The shared buffer, uint8, at least so large; a larger one is made where needed, who has the smaller one keeps it."""
        if self._buffer.size < size_bytes:
            self._buffer = np.zeros(size_bytes, np.uint8)
        return self._buffer[:size_bytes]

    @property
    def buffer_bytes(self) -> int:
        """Size of the shared buffer."""
        return self._buffer.size

    def alltoall(
        self, send: np.ndarray, recv: np.ndarray, send_counts: Sequence[int], recv_counts: Sequence[int], what: str
    ) -> Ticket:
        """Part r of `send` goes to rank r, part r of `recv` comes from it. Collective; does not wait."""
        return self._queue.post(lambda: self._comm.ialltoall(send, recv, send_counts, recv_counts), what)

    def wait(self, ticket: Ticket) -> None:
        """Until the exchange is complete."""
        begin = self._progress.waited_seconds
        self._progress.wait(ticket)
        self.waited_seconds += self._progress.waited_seconds - begin
