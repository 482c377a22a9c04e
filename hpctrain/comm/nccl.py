"""Operations on arrays of a device by NCCL, which moves and sums them on the device, in the order of a stream.

An operation is enqueued when it is started, behind the kernels before it: the stream waits for them, the host does not. So all
ranks enqueue in the order in which operations were started, whichever device is done first. It is complete when the host has seen
that the device is done with it, and what kernels are given from then on comes behind it. Kernels never wait for a rank: only the
host does, with its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.device_messages import DeviceGroup, DeviceMessages, WorkMark
from hpctrain.comm.base import Array, Communicator, Handle
from hpctrain.comm.mpi_buffers import piece
from hpctrain.comm.transports import StagedCommunicator
from hpctrain.core.errors import BackendError


class NcclHandle:
    """Implements `Handle`: complete when the device is done with it.

    Raises in `test`:
        BackendError: NCCL has failed in the background, as where a rank is lost.
    """

    __slots__ = ("_group", "_mark", "_text")

    def __init__(self, group: DeviceGroup, text: str) -> None:
        self._group, self._text = group, text
        self._mark: WorkMark | None = group.mark()

    def test(self) -> bool:
        if self._mark is None:
            return True
        if self._mark.done:
            self._mark = None
            return True
        fault = self._group.links.fault()
        if fault is not None:
            raise BackendError(f"NCCL failed in an {self._text}: {fault}; start again with --resume, or set transport to staged.")
        return False

    def __str__(self) -> str:
        return f"{self._text}, {'complete' if self._mark is None else 'enqueued, waiting for the device or its peers'}"


class NcclCommunicator:
    """Implements `Communicator` for arrays of a device, by NCCL, and of the host, by another communicator.

    Operations on arrays of the host, messages, barriers, objects and splits go to that one, and have an order of their own. (With
    NCCL a message holds up the stream until it is received: two ranks that send before they receive would wait for each other.)
    Operations of several communicators must be enqueued in one order on all ranks, so a run puts all of a group on one.

    Args:
        inner: of the same ranks, by way of the host. arithmetic: of the device. group: of the devices of the same ranks.

    Attributes:
        rank, size, name, world_ranks: of `inner`.
    """

    def __init__(self, inner: Communicator, arithmetic: Arithmetic, group: DeviceGroup) -> None:
        self.rank, self.size, self.name, self.world_ranks = inner.rank, inner.size, inner.name, inner.world_ranks
        self._inner, self._arithmetic, self._group, self._links = inner, arithmetic, group, group.links

    def iallreduce(self, buffer: Array) -> Handle:
        if isinstance(buffer, np.ndarray):
            return self._inner.iallreduce(buffer)
        self._group.wait_for_kernels()
        if buffer.size:
            self._links.sum_to_all(buffer)
        return self._enqueued("allreduce", buffer)

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        """As a sum to each rank, all of them at once: pieces may have unlike sizes."""
        if isinstance(send, np.ndarray):
            return self._inner.ireduce_scatter(send, recv, counts)
        assert (send.size, recv.size) == (sum(counts), counts[self.rank])
        self._group.wait_for_kernels()
        with self._links.together():
            for root, count in enumerate(counts):
                if count:
                    self._links.sum_to_one(piece(send, counts, root), recv, root)
        return self._enqueued("reduce-scatter", send)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        """As a broadcast from each rank, all of them at once."""
        if isinstance(recv, np.ndarray):
            return self._inner.iallgather(send, recv, counts)
        assert recv.size == sum(counts)
        if send is not None:
            self._arithmetic.copy(piece(recv, counts, self.rank), send.reshape(-1))
        self._group.wait_for_kernels()
        with self._links.together():
            for root, count in enumerate(counts):
                if count:
                    self._links.broadcast(piece(recv, counts, root), root)
        return self._enqueued("allgather", recv)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        if isinstance(send, np.ndarray):
            return self._inner.ialltoall(send, recv, send_counts, recv_counts)
        self._arithmetic.copy(piece(recv, recv_counts, self.rank), piece(send, send_counts, self.rank))
        self._group.wait_for_kernels()
        with self._links.together():
            for other in range(self.size):
                if other != self.rank and send_counts[other]:
                    self._links.send(piece(send, send_counts, other), other)
                if other != self.rank and recv_counts[other]:
                    self._links.receive(piece(recv, recv_counts, other), other)
        return self._enqueued("all-to-all", send)

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        if isinstance(buffer, np.ndarray):
            return self._inner.ibroadcast(buffer, root)
        self._group.wait_for_kernels()
        if buffer.size:
            self._links.broadcast(buffer, root)
        return self._enqueued("broadcast", buffer)

    def ibarrier(self) -> Handle:
        return self._inner.ibarrier()

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle:
        return self._inner.isend(buffer, dest, tag)

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle:
        return self._inner.irecv(buffer, source, tag)

    def split(self, color: int | None, key: int, name: str) -> Communicator | None:
        inner = self._inner.split(color, key, name)
        return None if inner is None else joined(inner, self._arithmetic)

    def split_shared_memory(self, name: str) -> Communicator:
        return joined(self._inner.split_shared_memory(name), self._arithmetic)

    def allgather_object(self, value: Any) -> list[Any]:
        return self._inner.allgather_object(value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self._inner.broadcast_object(value, root)

    def abort(self, code: int) -> None:
        self._links.abort()
        self._inner.abort(code)

    def _enqueued(self, operation: str, array: Array) -> Handle:
        return NcclHandle(self._group, f"{operation} of {array.size} elements")


def over_nccl(inner: Communicator, arithmetic: Arithmetic) -> NcclCommunicator:
    """The ranks of `inner`, with their devices joined. Collective; set-up only, once `group_fault` has found nothing wrong."""
    mirrors = arithmetic.mirrors()
    assert mirrors is not None, "the arrays lie on a device"
    return joined(StagedCommunicator(inner, mirrors), arithmetic)


def joined(inner: Communicator, arithmetic: Arithmetic) -> NcclCommunicator:
    """The same, where `inner` takes arrays of the device by way of the host. Collective; set-up only."""
    messages, peers = arithmetic.messages(), inner.split(0, inner.rank, f"{inner.name} devices")
    assert messages is not None, "the arrays lie on a device"
    assert peers is not None
    return NcclCommunicator(inner, arithmetic, messages.join(peers))


def group_fault(world: Communicator, messages: DeviceMessages) -> str | None:
    """Why the devices of these ranks cannot be joined, in one clause, the same on every rank; None where they can. Collective."""
    facts: list[tuple[str, str | None]] = world.allgather_object((messages.identity, messages.group_fault()))
    ranks_of: dict[str, list[int]] = {}
    for rank, (identity, fault) in enumerate(facts):
        if fault is not None:
            return f"on rank {rank} {fault}"
        ranks_of.setdefault(identity, []).append(rank)
    shared = next((ranks for ranks in ranks_of.values() if len(ranks) > 1), None)
    return None if shared is None else f"ranks {shared[0]} and {shared[1]} share a GPU, and NCCL takes one rank on each"
