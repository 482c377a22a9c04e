"""The service for transports that reach a device's memory themselves: events of its work, and groups of devices."""

from __future__ import annotations

from hpctrain.backend.cuda.device import DeviceEvent, DeviceStream
from hpctrain.backend.device_messages import DeviceLinks, Peers
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime


class EventPool:
    """Events that nobody asks any more: a stream that waits for an event waits for what it marked then."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._free: list[DeviceEvent] = []

    def take(self) -> DeviceEvent:
        """One of them, or a new one."""
        return self._free.pop() if self._free else self._runtime.device.event()

    def give_back(self, event: DeviceEvent) -> None:
        """Let the next one have it."""
        self._free.append(event)


class CudaMark:
    """Implements `WorkMark`: an event that is given back once it was seen to be done."""

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
        return self._runtime.device.groups.fault()

    def join(self, peers: Peers) -> CudaGroup:
        if self._stream is None:
            self._stream = self._runtime.device.stream("between devices")
        links = self._runtime.device.groups.join(peers, self._stream)
        return CudaGroup(self._runtime, links, self._stream, self._pool)
