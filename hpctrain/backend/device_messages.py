"""The service of an arithmetic for transports that reach a device's memory themselves, without mirrors on the host.

Two kinds of them: MPI libraries that read such memory, for which the host looks whether the work of kernels is done, and groups
of devices that move arrays between each other in the order of a stream, as NCCL does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

Array = Any  # DeviceArray


class WorkMark(Protocol):
    """A place in a device's work."""

    @property
    def done(self) -> bool:
        """All work before it is done, and stays so. Never waits."""
        ...


class Peers(Protocol):
    """The processes whose devices form a group, in order: a communicator on which nobody else posts.

    Where devices cannot reach each other by themselves, as emulated ones, arrays of the host go through it.
    """

    rank: int
    size: int

    def broadcast_object(self, value: Any, root: int = 0) -> Any: ...

    def iallgather(self, send: Any, recv: Any, counts: Any) -> Any: ...

    def isend(self, buffer: Any, dest: int, tag: int) -> Any: ...

    def irecv(self, buffer: Any, source: int, tag: int) -> Any: ...


class DeviceLinks(Protocol):
    """The links of one device to the others of a group. What is called is enqueued, on the stream that they were made with.

    All devices of a group enqueue the same collectives in the same order, and a receive for each send. Arrays of collectives have
    the same size and dtype everywhere. Sums are of float32 or float64; all else moves bytes.
    """

    def together(self) -> AbstractContextManager[None]:
        """Inside: calls that are enqueued at once at the end, and may need each other."""
        ...

    def send(self, array: Array, to: int) -> None: ...

    def receive(self, array: Array, source: int) -> None: ...

    def broadcast(self, array: Array, root: int) -> None:
        """`root`'s array to all."""
        ...

    def sum_to_all(self, array: Array) -> None:
        """The sum of all devices' arrays, in place."""
        ...

    def sum_to_one(self, send: Array, recv: Array, root: int) -> None:
        """`root`'s `recv` := the sum of all devices' `send`; elsewhere `recv` is left alone."""
        ...

    def fault(self) -> str | None:
        """A failure in the background, in one clause; None while all is well."""
        ...

    def abort(self) -> None:
        """Give up what is on its way. Nothing is called after it."""
        ...


class DeviceGroup(Protocol):
    """A device's place in a group. links: to all of the group, itself among them, on a stream of the groups of this process."""

    links: DeviceLinks

    def wait_for_kernels(self) -> None:
        """All that the links are given from here on comes behind the work of kernels so far; the host goes on."""
        ...

    def mark(self) -> WorkMark:
        """All that the links were given so far."""
        ...


class DeviceMessages(Protocol):
    """Marks of a device's work, and its groups.

    Attributes:
        identity: of the device; no other one has it, on any node.
    """

    identity: str

    def mark(self) -> WorkMark:
        """All work of kernels so far."""
        ...

    def group_fault(self) -> str | None:
        """Why this device cannot join a group, in one clause; None where it can."""
        ...

    def join(self, peers: Peers) -> DeviceGroup:
        """This device's place in a group of the peers' devices. Collective; waits for all of them.

        All groups of a process share one stream, so that no two of them can each hold up what the other one needs.
        """
        ...
