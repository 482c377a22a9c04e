"""What transports need of a device: mirrors of its arrays in pinned memory, events of its work, and groups of devices.

Copies to and from mirrors run on two streams next to that of computation, one for each direction. A copy to the host waits
for the gradient that it takes: were both directions on one stream, sums that have arrived would wait for it too. Events order
the three streams; each of them is there for an order of the work in which leaving it out gives a wrong result.

Transports that reach a device's memory themselves ask `CudaMessages` for events of its work and for groups of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.arithmetic import Array, DeviceLinks, Peers, StagedBytes, Transit
from hpctrain.backend.cuda.device import DeviceEvent, DeviceStream
from hpctrain.backend.cuda.runtime import CudaRuntime, host_dtype


class EventPool:
    """Events for reuse, after the last question about them: a stream that waits for an event waits for what it marked then."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._free: list[DeviceEvent] = []

    def take(self) -> DeviceEvent:
        """Take a free event, or a new one."""
        return self._free.pop() if self._free else self._runtime.device.event()

    def give_back(self, event: DeviceEvent) -> None:
        """Let the next one have it."""
        self._free.append(event)


@dataclass(frozen=True)
class CudaTransit:
    """Implements `Transit`.

    begun: after the work of kernels before the operation. copied: after its copies to the host; None if there are none.
    """

    begun: DeviceEvent
    copied: DeviceEvent | None

    def on_host(self) -> bool:
        return self.copied is None or self.copied.done


@dataclass
class _Place:
    """The mirror of the memory of an array, and the event after the latest copies from it, if any.

    pointer: where the array begins on the device. memory: pinned, uint8, as long as the array.
    """

    pointer: int
    memory: np.ndarray
    read: DeviceEvent | None = None

    def has(self, array: Array) -> bool:
        """Return whether the whole array lies in this one."""
        return bool(self.pointer <= array.pointer and array.pointer + array.nbytes <= self.pointer + self.memory.size)

    def mirror(self, array: Array) -> np.ndarray:
        """Return the part of the mirror that is an array's, flat."""
        begin = array.pointer - self.pointer
        part: np.ndarray = self.memory[begin : begin + array.nbytes].view(host_dtype(array))
        return part


class CudaMirrors:
    """Implements `HostMirrors` on one device. Events are used again by later operations."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.copied, self.pinned_bytes = StagedBytes(), 0
        self._runtime = runtime
        self._to_host = runtime.device.stream("to the host")
        self._from_host = runtime.device.stream("from the host")
        self._places: dict[tuple[int, int], _Place] = {}  # by address and bytes of an array
        self._covered: list[_Place] = []
        self._pool = EventPool(runtime)

    def mirror(self, array: Array) -> np.ndarray:
        key = array.pointer, array.nbytes
        if key not in self._places:
            covered = next((place for place in self._covered if place.has(array)), None)
            self._places[key] = self._place(array) if covered is None else covered
        place = self._places[key]
        if place.read is not None:
            place.read.synchronize()
            self._pool.give_back(place.read)
            place.read = None
        return place.mirror(array)

    def cover(self, array: Array, instead_of: Array | None = None) -> None:
        old = [] if instead_of is None else [place for place in self._covered if place.pointer == instead_of.pointer]
        for place in old:
            self._forget(place)
        self._covered.append(self._place(array))

    def _forget(self, place: _Place) -> None:
        if place.read is not None:
            place.read.synchronize()  # its memory must not be freed while it is copied from
        self._covered.remove(place)
        self._places = {key: other for key, other in self._places.items() if other is not place}
        self.pinned_bytes -= place.memory.nbytes

    def _place(self, array: Array) -> _Place:
        self.pinned_bytes += array.nbytes
        return _Place(array.pointer, self._runtime.device.pinned(array.nbytes))

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
            self.copied.to_host += array.nbytes
        self._to_host.record(copied)
        return CudaTransit(begun, copied)

    def arrive(self, transit: Transit, array: Array, intervals: Sequence[tuple[int, int]]) -> None:
        assert isinstance(transit, CudaTransit)
        if intervals:
            if transit.copied is None:  # else the host has seen that the work before the operation is done
                self._from_host.wait(transit.begun)
            place, flat, arrived = self._places[array.pointer, array.nbytes], array.reshape(-1), self._pool.take()
            mirror = place.mirror(array)
            for begin, end in intervals:
                self._runtime.device.upload(self._from_host, flat[begin:end], mirror[begin:end])
                self.copied.from_host += (end - begin) * array.itemsize
            self._from_host.record(arrived)
            self._runtime.stream.wait(arrived)
            place.read = arrived
        self._pool.give_back(transit.begun)
        if transit.copied is not None:
            self._pool.give_back(transit.copied)


class CudaMark:
    """Implements `WorkMark`: an event that returns to the pool once it is found done."""

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


class CudaGroup:
    """Implements `DeviceGroup`.

    Args:
        stream: of the links.
    """

    def __init__(self, runtime: CudaRuntime, links: DeviceLinks, stream: DeviceStream, pool: EventPool) -> None:
        self.links: DeviceLinks = links
        self._runtime, self._stream, self._pool = runtime, stream, pool

    def wait_for_kernels(self) -> None:
        event = self._pool.take()
        self._runtime.stream.record(event)
        self._stream.wait(event)
        self._pool.give_back(event)

    def mark(self) -> CudaMark:
        return CudaMark(self._pool, self._stream)


class CudaMessages:
    """Implements `DeviceMessages` on one device."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self.identity = runtime.device.identity
        self._runtime = runtime
        self._pool = EventPool(runtime)
        self._stream: DeviceStream | None = None

    def mark(self) -> CudaMark:
        return CudaMark(self._pool, self._runtime.stream)

    def group_fault(self) -> str | None:
        return self._runtime.device.link_fault()

    def join(self, peers: Peers) -> CudaGroup:
        if self._stream is None:
            self._stream = self._runtime.device.stream("between devices")
        links = self._runtime.device.join(peers, self._stream)
        return CudaGroup(self._runtime, links, self._stream, self._pool)
