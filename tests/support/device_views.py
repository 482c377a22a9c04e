"""Virtual ranks that read the memory of emulated devices, as an MPI library does that knows of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpctrain.backend.cuda.device import DeviceArray
from hpctrain.comm.base import Array, Communicator, Handle
from hpctrain_testing.emulator.memory import borrowed, on_host


def view(array: Array) -> Array:
    """The elements over the same memory, as they are now; an array of the host itself."""
    return on_host(borrowed(array)) if isinstance(array, DeviceArray) else array


class ViewingCommunicator:
    """The ranks of `inner`, which knows arrays of the host alone."""

    def __init__(self, inner: Communicator) -> None:
        self.rank, self.size, self.name, self.world_ranks = inner.rank, inner.size, inner.name, inner.world_ranks
        self._inner = inner

    def iallreduce(self, buffer: Array) -> Handle:
        assert not isinstance(buffer, DeviceArray), "MPI sums no memory of a device"
        return self._inner.iallreduce(buffer)

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        assert not isinstance(send, DeviceArray), "MPI sums no memory of a device"
        return self._inner.ireduce_scatter(send, recv, counts)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        return self._inner.iallgather(None if send is None else view(send), view(recv), counts)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        return self._inner.ialltoall(view(send), view(recv), send_counts, recv_counts)

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        return self._inner.ibroadcast(view(buffer), root)

    def ibarrier(self) -> Handle:
        return self._inner.ibarrier()

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle:
        return self._inner.isend(view(buffer), dest, tag)

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle:
        return self._inner.irecv(view(buffer), source, tag)

    def split(self, color: int | None, key: int, name: str) -> Communicator | None:
        inner = self._inner.split(color, key, name)
        return None if inner is None else ViewingCommunicator(inner)

    def split_shared_memory(self, name: str) -> Communicator:
        return ViewingCommunicator(self._inner.split_shared_memory(name))

    def allgather_object(self, value: Any) -> list[Any]:
        return self._inner.allgather_object(value)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return self._inner.broadcast_object(value, root)

    def abort(self, code: int) -> None:
        self._inner.abort(code)
