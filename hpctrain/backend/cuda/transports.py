"""The services of a device for transports: mirrors of its arrays in pinned memory, events of its work, and groups of devices.

Copies to and from mirrors run on two streams next to the stream of computation, one for each direction. A copy to the host waits
for its gradient; with both directions on one stream, sums that have arrived would wait for the gradient too. Events order the
three streams. Each event is required: without it, some order of execution produces a wrong result.

Transports that access a device's memory directly use `CudaMessages` for events of its work and for groups of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hpctrain.backend.arithmetic import Array, DeviceLinks, Peers, Transit
from hpctrain.backend.cuda.device import DeviceEvent, DeviceStream
from hpctrain.backend.cuda.runtime import CudaRuntime, host_dtype


class EventPool:
    """Events that the host reuses.

    `DeviceStream.wait` refers to the work that the event marks at the time of the call, so the event may then be recorded again.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._free: list[DeviceEvent] = []

    def take(self) -> DeviceEvent:
        """Return a free event, or a new one."""
        return self._free.pop() if self._free else self._runtime.device.event()

    def give_back(self, event: DeviceEvent) -> None:
        """Make an event free, so that `take` may return it again."""
        self._free.append(event)


@dataclass(frozen=True)
class CudaTransit:
    """Implementation of `Transit`.

    Attributes:
        begun: event after all kernels enqueued before the operation.
        copied: event after the operation's copies to the host; None if there are none.
    """

    begun: DeviceEvent
    copied: DeviceEvent | None

    def on_host(self) -> bool:
        return self.copied is None or self.copied.done


@dataclass
class _Mirror:
    """Pinned memory for an array and all arrays inside it.

    Attributes:
        pointer: address of the array on the device; memory: uint8, as large as the array.
        copied_back: event after the latest copies from the memory; None if the host need not wait for any.
    """

    pointer: int
    memory: np.ndarray
    copied_back: DeviceEvent | None = None

    def covers(self, array: Array) -> bool:
        """Return whether `array` lies inside the mirrored array."""
        return bool(self.pointer <= array.pointer and array.pointer + array.nbytes <= self.pointer + self.memory.size)

    def view(self, array: Array) -> np.ndarray:
        """Return the part of the memory that mirrors `array`, flat."""
        begin = array.pointer - self.pointer
        part: np.ndarray = self.memory[begin : begin + array.nbytes].view(host_dtype(array))
        return part


class CudaMirrors:
    """Implementation of `HostMirrors` on one device. Events are reused by later operations."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.pinned_bytes = 0
        self._runtime = runtime
        self._to_host = runtime.device.stream("to the host")
        self._from_host = runtime.device.stream("from the host")
        self._mirrors: dict[tuple[int, int], _Mirror] = {}  # by address and size of an array in bytes
        self._covering: list[_Mirror] = []
        self._pool = EventPool(runtime)

    def mirror(self, array: Array) -> np.ndarray:
        key = array.pointer, array.nbytes
        if key not in self._mirrors:
            covering = next((mirror for mirror in self._covering if mirror.covers(array)), None)
            self._mirrors[key] = self._make(array) if covering is None else covering
        mirror = self._mirrors[key]
        if mirror.copied_back is not None:
            mirror.copied_back.synchronize()
            self._pool.give_back(mirror.copied_back)
            mirror.copied_back = None
        return mirror.view(array)

    def cover(self, array: Array, instead_of: Array | None = None) -> None:
        old = [] if instead_of is None else [mirror for mirror in self._covering if mirror.pointer == instead_of.pointer]
        for mirror in old:
            self._forget(mirror)
        self._covering.append(self._make(array))

    def _forget(self, mirror: _Mirror) -> None:
        if mirror.copied_back is not None:
            mirror.copied_back.synchronize()  # its memory must not be freed during a copy from it
        self._covering.remove(mirror)
        self._mirrors = {key: other for key, other in self._mirrors.items() if other is not mirror}
        self.pinned_bytes -= mirror.memory.nbytes

    def _make(self, array: Array) -> _Mirror:
        self.pinned_bytes += array.nbytes
        return _Mirror(array.pointer, self._runtime.device.pinned(array.nbytes))

    def leave(self, copies: Sequence[tuple[np.ndarray, Array]]) -> CudaTransit:
        begun = self._pool.take()
        self._runtime.stream.record(begun)
        if not copies:
            return CudaTransit(begun, None)
        copied = self._pool.take()
        self._to_host.wait(begun)
        for mirror, array in copies:
            assert mirror.dtype == host_dtype(array), f"{array!r} does not go to a mirror of {mirror.dtype}"
            self._runtime.device.download(self._to_host, mirror, array)
        self._to_host.record(copied)
        return CudaTransit(begun, copied)

    def arrive(self, transit: Transit, array: Array, intervals: Sequence[tuple[int, int]]) -> None:
        assert isinstance(transit, CudaTransit)
        if intervals:
            if transit.copied is None:  # otherwise the host has already seen that the work before the operation is done
                self._from_host.wait(transit.begun)
            mirror, flat, arrived = self._mirrors[array.pointer, array.nbytes], array.reshape(-1), self._pool.take()
            values = mirror.view(array)
            for begin, end in intervals:
                self._runtime.device.upload(self._from_host, flat[begin:end], values[begin:end])
            self._from_host.record(arrived)
            self._runtime.stream.wait(arrived)
            mirror.copied_back = arrived
        self._pool.give_back(transit.begun)
        if transit.copied is not None:
            self._pool.give_back(transit.copied)


class CudaMark:
    """Implementation of `WorkMark` by an event, which is returned to the pool once `done` has found its work complete."""

    __slots__ = ("_event", "_pool")

    def __init__(self, pool: EventPool, stream: DeviceStream) -> None:
        self._pool = pool
        self._event: DeviceEvent | None = pool.take()
        stream.record(self._event)

    @property
    def done(self) -> bool:
        if self._event is not None and self._event.done:
            self._pool.give_back(self._event)
            self._event = None
        return self._event is None


class CudaMessages:
    """Implementation of `DeviceMessages` on one device."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.identity = runtime.device.identity
        self._runtime = runtime
        self._pool = EventPool(runtime)

    @cached_property
    def _links_stream(self) -> DeviceStream:
        return self._runtime.device.stream("between devices")

    def mark(self) -> CudaMark:
        return CudaMark(self._pool, self._runtime.stream)

    def wait_for_kernels(self) -> None:
        event = self._pool.take()
        self._runtime.stream.record(event)
        self._links_stream.wait(event)
        self._pool.give_back(event)

    def mark_links(self) -> CudaMark:
        return CudaMark(self._pool, self._links_stream)

    def group_fault(self) -> str | None:
        return self._runtime.device.link_fault()

    def join(self, peers: Peers) -> DeviceLinks:
        return self._runtime.device.join(peers, self._links_stream)
