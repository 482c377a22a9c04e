"""Exact counts of the operations and bytes passed to a communicator, per communicator name and operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.comm.base import Array, Communicator, ForwardingCommunicator, Handle
from hpctrain.core.intervals import even_interval


@dataclass(frozen=True)
class Count:
    """The totals of one rank, as integers.

    Attributes:
        operations: number of posted operations.
        payload_bytes: bytes n of the cost formulas: the whole buffer, including this rank's own part.
        exchanged_bytes: bytes that this rank exchanges with others under a bandwidth-optimal algorithm. Uneven parts are counted
            exactly; the mean over the P ranks is (P-1)/P n, for an allreduce 2 (P-1)/P n.
    """

    operations: int = 0
    payload_bytes: int = 0
    exchanged_bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            self.operations + other.operations,
            self.payload_bytes + other.payload_bytes,
            self.exchanged_bytes + other.exchanged_bytes,
        )

    def __sub__(self, other: Count) -> Count:
        return Count(
            self.operations - other.operations,
            self.payload_bytes - other.payload_bytes,
            self.exchanged_bytes - other.exchanged_bytes,
        )


class Counters:
    """The counts of one rank by (communicator name, operation), such as ("data", "ireduce_scatter")."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Count] = {}

    def add(self, communicator: str, operation: str, payload_bytes: int = 0, exchanged_bytes: int = 0) -> None:
        """Count one posted operation."""
        key = (communicator, operation)
        self._counts[key] = self._counts.get(key, Count()) + Count(1, payload_bytes, exchanged_bytes)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(sorted(self._counts))

    def __getitem__(self, key: tuple[str, str]) -> Count:
        """Return the count of one (communicator name, operation); zeros if nothing was posted."""
        return self._counts.get(key, Count())

    def total(self, communicator: str | None = None, operation: str | None = None) -> Count:
        """Return the sum of the counts that match; None matches all."""
        total = Count()
        for (name, kind), count in self._counts.items():
            if communicator in (None, name) and operation in (None, kind):
                total += count
        return total

    def snapshot(self) -> Counters:
        """Return an independent copy."""
        copy = Counters()
        copy._counts.update(self._counts)
        return copy

    def since(self, earlier: Counters) -> Counters:
        """Return the counts since `earlier`, a snapshot of these counters. Unchanged counts are omitted."""
        difference = Counters()
        for key, count in self._counts.items():
            if count != earlier[key]:
                difference._counts[key] = count - earlier[key]
        return difference


class CountingCommunicator(ForwardingCommunicator):
    """Communicator that counts operations and forwards them to `inner`. Its splits use the same counters.

    Operations are counted at posting. Object operations, barriers, and receives of messages (their bytes are counted at the
    sender) are counted without bytes.
    """

    def __init__(self, inner: Communicator, counters: Counters) -> None:
        super().__init__(inner)
        self.counters = counters

    def iallreduce(self, buffer: Array) -> Handle:
        shares = self._even_share(buffer.size) * buffer.itemsize
        self.counters.add(self.name, "iallreduce", buffer.nbytes, 2 * (buffer.nbytes - shares))
        return self.inner.iallreduce(buffer)

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        self._count("ireduce_scatter", counts, send.itemsize)
        return self.inner.ireduce_scatter(send, recv, counts)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        self._count("iallgather", counts, recv.itemsize)
        return self.inner.iallgather(send, recv, counts)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        self._count("ialltoall", send_counts, send.itemsize)
        return self.inner.ialltoall(send, recv, send_counts, recv_counts)

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        self.counters.add(self.name, "ibroadcast", buffer.nbytes, 0 if self.rank == root else buffer.nbytes)
        return self.inner.ibroadcast(buffer, root)

    def ibarrier(self) -> Handle:
        self.counters.add(self.name, "ibarrier")
        return self.inner.ibarrier()

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle:
        self.counters.add(self.name, "isend", buffer.nbytes, 0 if dest == self.rank else buffer.nbytes)
        return self.inner.isend(buffer, dest, tag)

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle:
        self.counters.add(self.name, "irecv")
        return self.inner.irecv(buffer, source, tag)

    def wrap(self, part: Communicator) -> CountingCommunicator:
        return CountingCommunicator(part, self.counters)

    def allgather_object(self, value: Any) -> list[Any]:
        self.counters.add(self.name, "allgather_object")
        return self.inner.allgather_object(value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        self.counters.add(self.name, "broadcast_object")
        return self.inner.broadcast_object(value, root)

    def _even_share(self, elements: int) -> int:
        """Return this rank's part of an even split whose first parts have one more element, as in a ring allreduce."""
        start, stop = even_interval(elements, self.size, self.rank)
        return stop - start

    def _count(self, operation: str, counts: Sequence[int], itemsize: int) -> None:
        """Count an operation with parts of `counts` elements, one of which stays on this rank."""
        elements = sum(int(count) for count in counts)
        others = elements - int(counts[self.rank])
        self.counters.add(self.name, operation, elements * itemsize, others * itemsize)
