"""Virtual ranks that read the memory of emulated devices, as an MPI library does that knows of devices."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.backend.cuda.device import DeviceArray
from hpctrain.comm.base import Array, Communicator, ForwardingCommunicator, Handle
from hpctrain_testing.emulator.memory import borrowed, on_host


def view(array: Array) -> Array:
    """The elements over the same memory, as they are now; an array of the host itself."""
    return on_host(borrowed(array)) if isinstance(array, DeviceArray) else array


class ViewingCommunicator(ForwardingCommunicator):
    """The ranks of `inner`, which knows arrays of the host alone."""

    def iallreduce(self, buffer: Array) -> Handle:
        assert not isinstance(buffer, DeviceArray), "MPI sums no memory of a device"
        return self.inner.iallreduce(buffer)

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        assert not isinstance(send, DeviceArray), "MPI sums no memory of a device"
        return self.inner.ireduce_scatter(send, recv, counts)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        return self.inner.iallgather(None if send is None else view(send), view(recv), counts)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        return self.inner.ialltoall(view(send), view(recv), send_counts, recv_counts)

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        return self.inner.ibroadcast(view(buffer), root)

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle:
        return self.inner.isend(view(buffer), dest, tag)

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle:
        return self.inner.irecv(view(buffer), source, tag)

    def wrap(self, part: Communicator) -> Communicator:
        return ViewingCommunicator(part)
