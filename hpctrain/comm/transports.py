"""Transports of device arrays; a run uses one of them. Arrays on the host need no transport.

- "staged": uses a communicator for host arrays and works with every MPI. An operation has three phases: its arrays are copied to
  mirrors on the host, the operation is posted there, and its results are copied back. It is posted in a `test` of its handle or
  of a later one, once the copies to the host are done and all operations before it have been posted. The communicator therefore
  sees the order in which operations were started, the same on every rank, in whichever order the devices finish the copies. An
  operation is complete once the copies back are enqueued: later kernels run after them, and the host continues.
- "mpi": uses an MPI library that reads and writes a device's memory; nothing is copied to the host. An operation is posted once
  the kernels before it are done, in the order in which operations were started. It is complete when MPI reports it; kernels
  launched later run after it. The library only moves arrays, and kernels sum them (`PartSums`), because nonblocking sums of
  device memory crash some libraries and are computed on the host by others.
- "nccl": uses NCCL, which moves and sums arrays on the device, in the order of a stream. An operation is enqueued when it is
  started; the stream waits for the kernels before it, but the host does not. All ranks therefore enqueue in the order in which
  operations were started. An operation is complete when the host observes that the device has finished it; kernels launched later
  run after it. Kernels never wait for a rank: only the host does, with its deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic, DeviceLinks, DeviceMessages, HostMirrors, WorkMark
from hpctrain.comm.base import Array, Communicator, ForwardingCommunicator, GradientSums, Handle, piece
from hpctrain.comm.groups import TwoLevel
from hpctrain.comm.order import InOrder, OrderedOperation
from hpctrain.comm.sums import PartSums
from hpctrain.core.errors import BackendError

_Intervals = list[tuple[int, int]]
_Post = Callable[[], Handle]


class StagedOperation(OrderedOperation):
    """`LateHandle` of an operation on device arrays, posted once the device has finished the work before it.

    Args:
        ready: function that returns whether the device has finished the work before it.
        post: function that posts the operation.
        finish: callback, called when the operation is complete.
        text: name of the operation, for messages before it is posted.
        finished: description of the state of the complete operation, for messages.

    Attributes:
        operation: the posted operation, for the flight record; "" before it is posted.
    """

    __slots__ = ("_finished", "_is_ready", "_text", "operation")

    def __init__(
        self, order: InOrder, ready: Callable[[], bool], post: _Post, finish: Callable[[], None], text: str, finished: str
    ) -> None:
        super().__init__(order, post, finish)
        self.operation = ""
        self._is_ready, self._text, self._finished = ready, text, finished
        order.add(self)

    def ready(self) -> bool:
        return self._is_ready()

    def begin(self) -> None:
        super().begin()
        self.operation = str(self.handle)

    def __str__(self) -> str:
        if self.complete:
            return f"{self._text}, {self._finished}"
        if self.handle is not None:
            return str(self.handle)
        waits_for = "its turn after operations that wait for the device" if self._is_ready() else "the device"
        return f"{self._text}, waiting for {waits_for}"


def _all_elements(array: Array) -> _Intervals:
    return [(0, array.size)]


class StagedSums:
    """`GradientSums` for device arrays, computed on mirrors by sums of host arrays.

    Args:
        order: queue of the communicator, shared with its other operations.
    """

    def __init__(self, sums: GradientSums, mirrors: HostMirrors, order: InOrder) -> None:
        self._sums, self._mirrors, self._order = sums, mirrors, order

    def iallreduce(self, buffer: Array) -> Handle:
        every = _all_elements(buffer)
        return self._start(self._sums.iallreduce, f"allreduce of {buffer.size} elements", (buffer, every, every))

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        post, text = partial(self._sums.ireduce_scatter, counts=counts), f"reduce-scatter of {send.size} elements"
        return self._start(post, text, (send, _all_elements(send), ()), (recv, (), _all_elements(recv)))

    def _start(
        self, post: Callable[..., Handle], text: str, *arrays: tuple[Array, _Intervals | tuple[()], _Intervals | tuple[()]]
    ) -> Handle:
        """Enqueue copies to the host, and start an operation that waits for them and then copies its results back.

        Args:
            post: function of the mirrors that posts the operation. An array on the host is its own mirror.
            arrays: each array, the intervals of elements to copy to its mirror before the operation, and those to copy back
                after it. At most one array has intervals to copy back.
        """
        mirrors: list[Array] = []
        leaving: list[tuple[np.ndarray, Array]] = []
        arriving: tuple[Array, _Intervals] = (None, [])
        for array, leaves, arrives in arrays:
            if isinstance(array, np.ndarray):
                mirrors.append(array)
                continue
            flat, mirror = array.reshape(-1), self._mirrors.mirror(array)
            mirrors.append(mirror)
            leaving += [(mirror[begin:end], flat[begin:end]) for begin, end in leaves if begin < end]
            if arrives:
                assert arriving[0] is None, "at most one array of an operation may receive"
                arriving = array, [(begin, end) for begin, end in arrives if begin < end]
        transit = self._mirrors.leave(leaving)
        copy_back = partial(self._mirrors.arrive, transit, *arriving)
        return StagedOperation(self._order, transit.on_host, partial(post, *mirrors), copy_back, text, "on its way to the device")


class StagedCommunicator(StagedSums, ForwardingCommunicator):
    """`Communicator` for arrays on a device or on the host. Creation is not collective.

    Args:
        inner: communicator of the messages; only this communicator posts on it.
    """

    def __init__(self, inner: Communicator, mirrors: HostMirrors) -> None:
        ForwardingCommunicator.__init__(self, inner)
        StagedSums.__init__(self, inner, mirrors, InOrder())

    def sums_of(self, sums: GradientSums) -> GradientSums:
        """Return `sums`, which are over the same ranks, for device arrays. Operations share the order of this communicator."""
        return StagedSums(sums, self._mirrors, self._order)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        text = f"allgather of {recv.size} elements"
        if send is None:
            begin, total = sum(counts[: self.rank]), sum(counts)
            end = begin + counts[self.rank]
            mine, others = [(begin, end)], [(0, begin), (end, total)]
            return self._start(lambda received: self.inner.iallgather(None, received, counts), text, (recv, mine, others))
        arrays = (send, _all_elements(send), ()), (recv, (), _all_elements(recv))
        return self._start(partial(self.inner.iallgather, counts=counts), text, *arrays)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        post = partial(self.inner.ialltoall, send_counts=send_counts, recv_counts=recv_counts)
        arrays = (send, _all_elements(send), ()), (recv, (), _all_elements(recv))
        return self._start(post, f"all-to-all of {send.size} elements", *arrays)

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        leaves, arrives = (_all_elements(buffer), ()) if self.rank == root else ((), _all_elements(buffer))
        text = f"broadcast of {buffer.size} elements"
        return self._start(partial(self.inner.ibroadcast, root=root), text, (buffer, leaves, arrives))

    def ibarrier(self) -> Handle:
        return self._start(self.inner.ibarrier, "barrier")

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle:
        post = partial(self.inner.isend, dest=dest, tag=tag)
        return self._start(post, f"message of {buffer.size} elements to {dest}", (buffer, _all_elements(buffer), ()))

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle:
        post = partial(self.inner.irecv, source=source, tag=tag)
        return self._start(post, f"message of {buffer.size} elements from {source}", (buffer, (), _all_elements(buffer)))

    def wrap(self, part: Communicator) -> Communicator:
        return StagedCommunicator(part, self._mirrors)


class DeviceMpiCommunicator(ForwardingCommunicator):
    """`Communicator` for arrays on a device or on the host. Creation is not collective; see `over_mpi`.

    Args:
        inner: communicator of the messages, which accesses the device's memory; only this communicator posts on it.
        gathers: communicator of the same ranks in the same order, for the second stage of allreduces; None: device arrays are not
            summed.
    """

    def __init__(self, inner: Communicator, arithmetic: Arithmetic, gathers: Communicator | None = None) -> None:
        messages = arithmetic.messages()
        assert messages is not None, "the arrays lie on a device"
        super().__init__(inner)
        self._arithmetic, self._messages, self._order = arithmetic, messages, InOrder()
        self._sums = None if gathers is None else PartSums(self, gathers, arithmetic)

    def iallreduce(self, buffer: Array) -> Handle:
        if not isinstance(buffer, np.ndarray):
            return self._device_sums().iallreduce(buffer)
        return self._start(lambda: self.inner.iallreduce(buffer), "allreduce", buffer)

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        if not isinstance(send, np.ndarray):
            return self._device_sums().ireduce_scatter(send, recv, counts)
        return self._start(lambda: self.inner.ireduce_scatter(send, recv, counts), "reduce-scatter", send)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        if send is not None and not isinstance(recv, np.ndarray):
            self._arithmetic.copy(piece(recv, counts, self.rank), send.reshape(-1))
            send = None  # in place after the copy on the device
        return self._start(lambda: self.inner.iallgather(send, recv, counts), "allgather", recv)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        if not isinstance(recv, np.ndarray):
            self._arithmetic.copy(piece(recv, recv_counts, self.rank), piece(send, send_counts, self.rank))
        return self._start(lambda: self.inner.ialltoall(send, recv, send_counts, recv_counts), "all-to-all", send)

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        return self._start(lambda: self.inner.ibroadcast(buffer, root), "broadcast", buffer)

    def ibarrier(self) -> Handle:
        return self._start(self.inner.ibarrier, "barrier")

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle:
        return self._start(lambda: self.inner.isend(buffer, dest, tag), f"message to {dest}", buffer)

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle:
        return self._start(lambda: self.inner.irecv(buffer, source, tag), f"message from {source}", buffer)

    def wrap(self, part: Communicator) -> Communicator:
        return over_mpi(part, self._arithmetic)

    def _device_sums(self) -> PartSums:
        assert self._sums is not None, f"{self.name} does not sum device arrays"
        return self._sums

    def _start(self, post: _Post, operation: str, array: Array | None = None) -> Handle:
        """Start an operation, which `post` posts in its turn, once the kernels launched so far are done.

        Args:
            array: array of the operation. If it is None or on the host, the operation does not wait for kernels.
        """
        mark = None if array is None or isinstance(array, np.ndarray) else self._messages.mark()  # after the kernels before it
        text = operation if array is None else f"{operation} of {array.size} elements"
        return StagedOperation(self._order, lambda: mark is None or mark.done, post, lambda: None, text, "complete")


def over_mpi(inner: Communicator, arithmetic: Arithmetic) -> DeviceMpiCommunicator:
    """Return a communicator that moves arrays on the host or the device over `inner`, and sums them. Collective; at set-up only.

    The MPI library must support device memory.
    """
    gathers = inner.split(0, inner.rank, f"{inner.name} sums")
    assert gathers is not None
    return DeviceMpiCommunicator(inner, arithmetic, DeviceMpiCommunicator(gathers, arithmetic))


class NcclHandle:
    """Handle that is complete once the device has finished the operation.

    `test` raises a BackendError if NCCL has failed in the background, for example because a rank is lost.
    """

    __slots__ = ("_links", "_mark", "_text")

    def __init__(self, links: DeviceLinks, mark: WorkMark, text: str) -> None:
        self._links, self._text = links, text
        self._mark: WorkMark | None = mark

    def test(self) -> bool:
        if self._mark is None:
            return True
        if self._mark.done:
            self._mark = None
            return True
        fault = self._links.fault()
        if fault is not None:
            raise BackendError(f"NCCL failed in {self._text}: {fault}; start again with --resume, or set transport to staged.")
        return False

    def __str__(self) -> str:
        return f"{self._text}, {'complete' if self._mark is None else 'enqueued, waiting for the device or its peers'}"


class NcclCommunicator(ForwardingCommunicator):
    """`Communicator` that uses NCCL for device arrays and another communicator for host arrays.

    Operations on host arrays, messages, barriers, objects and splits use the other communicator and have a separate order. (An
    NCCL message blocks the stream until it is received: two ranks that send before they receive would wait for each other.)
    Operations of several NCCL communicators must be enqueued in one order on all ranks, so a run uses one communicator for all
    operations of a group.

    Args:
        inner: communicator of the same ranks that copies device arrays through the host.
        links: links to the devices of these ranks.
    """

    def __init__(self, inner: Communicator, arithmetic: Arithmetic, messages: DeviceMessages, links: DeviceLinks) -> None:
        super().__init__(inner)
        self._arithmetic, self._messages, self._links = arithmetic, messages, links

    def iallreduce(self, buffer: Array) -> Handle:
        if isinstance(buffer, np.ndarray):
            return self.inner.iallreduce(buffer)
        self._messages.wait_for_kernels()
        if buffer.size:
            self._links.sum_to_all(buffer)
        return self._enqueued("allreduce", buffer)

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        """Enqueue one reduction to each rank, all of them at once. NCCL's own reduce-scatter requires pieces of equal sizes."""
        if isinstance(send, np.ndarray):
            return self.inner.ireduce_scatter(send, recv, counts)
        assert (send.size, recv.size) == (sum(counts), counts[self.rank])
        self._messages.wait_for_kernels()
        with self._links.together():
            for root, count in enumerate(counts):
                if count:
                    self._links.sum_to_one(piece(send, counts, root), recv, root)
        return self._enqueued("reduce-scatter", send)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        """Enqueue one broadcast from each rank, all of them at once."""
        if isinstance(recv, np.ndarray):
            return self.inner.iallgather(send, recv, counts)
        assert recv.size == sum(counts)
        if send is not None:
            self._arithmetic.copy(piece(recv, counts, self.rank), send.reshape(-1))
        self._messages.wait_for_kernels()
        with self._links.together():
            for root, count in enumerate(counts):
                if count:
                    self._links.broadcast(piece(recv, counts, root), root)
        return self._enqueued("allgather", recv)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        if isinstance(send, np.ndarray):
            return self.inner.ialltoall(send, recv, send_counts, recv_counts)
        self._arithmetic.copy(piece(recv, recv_counts, self.rank), piece(send, send_counts, self.rank))
        self._messages.wait_for_kernels()
        with self._links.together():
            for other in range(self.size):
                if other != self.rank and send_counts[other]:
                    self._links.send(piece(send, send_counts, other), other)
                if other != self.rank and recv_counts[other]:
                    self._links.receive(piece(recv, recv_counts, other), other)
        return self._enqueued("all-to-all", send)

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        if isinstance(buffer, np.ndarray):
            return self.inner.ibroadcast(buffer, root)
        self._messages.wait_for_kernels()
        if buffer.size:
            self._links.broadcast(buffer, root)
        return self._enqueued("broadcast", buffer)

    def wrap(self, part: Communicator) -> Communicator:
        return joined(part, self._arithmetic)

    def abort(self, code: int) -> None:
        self._links.abort()
        self.inner.abort(code)

    def _enqueued(self, operation: str, array: Array) -> Handle:
        return NcclHandle(self._links, self._messages.mark_links(), f"{operation} of {array.size} elements")


def over_nccl(inner: Communicator, arithmetic: Arithmetic) -> NcclCommunicator:
    """Return an NCCL communicator of the ranks of `inner`. Collective; at set-up only, if `group_fault` returned None."""
    return joined(staged(inner, arithmetic), arithmetic)


def joined(inner: Communicator, arithmetic: Arithmetic) -> NcclCommunicator:
    """Return an NCCL communicator of the ranks of `inner`, whose devices it joins in a group. Collective; at set-up only.

    Args:
        inner: communicator that copies device arrays through the host.
    """
    messages, peers = arithmetic.messages(), inner.split(0, inner.rank, f"{inner.name} devices")
    assert messages is not None, "the arrays lie on a device"
    assert peers is not None
    return NcclCommunicator(inner, arithmetic, messages, messages.join(peers))


def group_fault(world: Communicator, messages: DeviceMessages) -> str | None:
    """Return the reason why NCCL cannot join the devices of these ranks; None if it can. Collective; the same on every rank.

    The reason is a clause for a message.
    """
    facts: list[tuple[str, str | None]] = world.allgather_object((messages.identity, messages.group_fault()))
    ranks_of: dict[str, list[int]] = {}
    for rank, (identity, fault) in enumerate(facts):
        if fault is not None:
            return f"on rank {rank} {fault}"
        ranks_of.setdefault(identity, []).append(rank)
    shared = next((ranks for ranks in ranks_of.values() if len(ranks) > 1), None)
    return None if shared is None else f"ranks {shared[0]} and {shared[1]} share a GPU, but NCCL allows one rank per GPU"


#: "staged": through the host's memory; "mpi": by an MPI library that accesses device memory; "nccl": by NCCL
Transport = Literal["staged", "mpi", "nccl"]


def staged(comm: Communicator, arithmetic: Arithmetic) -> StagedCommunicator:
    """Return a communicator of the same ranks that also handles device arrays, through mirrors on the host. Not collective."""
    mirrors = arithmetic.mirrors()
    assert mirrors is not None, "the arrays lie on a device"
    return StagedCommunicator(comm, mirrors)


def reaching(transport: Transport, comm: Communicator, arithmetic: Arithmetic) -> Communicator:
    """Return a communicator of the same ranks that also handles arrays on the device of `arithmetic`. Collective; at set-up only.

    With two levels, "mpi" accesses device memory in both levels. "nccl" does so within nodes; between nodes, arrays are copied
    through the host.
    """
    match transport:
        case "staged":
            return staged(comm, arithmetic)
        case "mpi" if isinstance(comm, TwoLevel):
            return TwoLevel(over_mpi(comm.flat, arithmetic), comm.levels, partial(_buffer, arithmetic))
        case "mpi":
            return over_mpi(comm, arithmetic)
        case "nccl" if isinstance(comm, TwoLevel):
            by_host, within = staged(comm.flat, arithmetic), partial(joined, arithmetic=arithmetic)
            return TwoLevel(by_host, comm.levels, partial(_buffer, arithmetic), within)
        case "nccl":
            return over_nccl(comm, arithmetic)


def _buffer(arithmetic: Arithmetic, size: int, like: Array) -> Array:
    return arithmetic.zeros(size, like.dtype)
