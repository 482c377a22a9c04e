"""Streams, events and captures of the emulated device."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hpctrain.backend.cuda.device import DeviceEvent
from hpctrain.backend.cuda.emulator.counters import DeviceCounters
from hpctrain.backend.cuda.emulator.errors import EmulatedDeviceError
from hpctrain.backend.cuda.emulator.work import Mark, Work, WorkQueue, WorkScheduler

_POISON = 0xFF
#: times in vain that a host which enqueues nothing asks for an event, until its work is done: time passes, also for a late device
_PATIENCE = 50


class Capture:
    """Work of one stream, recorded instead of done. open: it goes on."""

    def __init__(self, name: str) -> None:
        self.name, self.open = name, True
        self.works: list[Work] = []


class EmulatedEvent:
    """Implements `DeviceEvent`.

    Attributes:
        mark: of the latest record. asked, ignored: since then the host has asked for it, and that wait is left out.
        polls: times that the host has asked. polled_at: how much was enqueued when it did so last.
    """

    def __init__(self, table: StreamTable, number: int) -> None:
        self.table, self.number = table, number
        self.mark: Mark | Capture | None = None
        self.asked, self.ignored = False, False
        self.polls = self.polled_at = 0

    @property
    def done(self) -> bool:
        return self.table.poll(self)

    def synchronize(self) -> None:
        self.table.synchronize_event(self)

    def __str__(self) -> str:
        where = self.mark.queue.name if isinstance(self.mark, Mark) else self.mark.name if self.mark else ""
        return f"event {self.number}" + (f", recorded on {where}" if where else "")


def _own(event: DeviceEvent) -> EmulatedEvent:
    assert isinstance(event, EmulatedEvent), f"{event!r} is not of this device"
    return event


class EmulatedStream:
    """Implements `DeviceStream`."""

    def __init__(self, table: StreamTable, queue: WorkQueue) -> None:
        self.name, self.table, self.queue = queue.name, table, queue
        self.capture: Capture | None = None

    def record(self, event: DeviceEvent) -> None:
        self.table.record(self, _own(event))

    def wait(self, event: DeviceEvent) -> None:
        self.table.wait(self, _own(event))

    def synchronize(self) -> None:
        self.table.synchronize_stream(self)


class StreamTable:
    """All streams and events of a device; may be used by several threads.

    Args:
        check: is called after every wait of the host.
        ignored_wait: the number of a wait that is left out, counted from 0 over all waits of streams and of the host.

    Attributes:
        waits: all so far, each in words.
    """

    def __init__(
        self, source: random.Random, counters: DeviceCounters, check: Callable[[], None], ignored_wait: int | None = None
    ) -> None:
        self.scheduler = WorkScheduler(source)
        self.captures: dict[int, Capture] = {}  # by thread
        self.waits: list[str] = []
        self._counters, self._check, self._ignored_wait = counters, check, ignored_wait
        self._lock = threading.RLock()
        self._events = self._enqueued = 0

    def stream(self, name: str) -> EmulatedStream:
        """A new stream."""
        return EmulatedStream(self, self.scheduler.queue(name))

    def event(self) -> EmulatedEvent:
        """A new event."""
        self._events += 1
        return EmulatedEvent(self, self._events)

    def enqueue(self, stream: EmulatedStream, work: Work) -> None:
        """Add work to a stream, or to what is captured there."""
        with self._lock:
            self._counters.enqueued[work.text] += 1
            self._enqueued += 1
            self._require_own(stream)
            if stream.capture:
                stream.capture.works.append(replace(work, kept=()))  # a graph keeps no memory in use
                return
            for memory in work.writes:
                if not any(np.may_share_memory(memory, other) for other in work.reads):
                    self._poison(stream, memory)
            self.scheduler.append(stream.queue, work)
            self.scheduler.run_some()

    def _poison(self, stream: EmulatedStream, memory: np.ndarray) -> None:
        """Overwrite memory that is going to be written: now, or where earlier work with it is done."""
        if self.scheduler.is_pending(memory):
            self.scheduler.append(stream.queue, Work("begin of download", lambda: memory.fill(_POISON), writes=(memory,)))
        else:
            memory.fill(_POISON)

    def record(self, stream: EmulatedStream, event: EmulatedEvent) -> None:
        """Mark the stream's work so far."""
        with self._lock:
            self._require_own(stream, event)
            event.mark = stream.capture or stream.queue.mark
            event.asked = event.ignored = False

    def wait(self, stream: EmulatedStream, event: EmulatedEvent) -> None:
        """Let the stream wait for the event's latest record."""
        with self._lock:
            self._require_own(stream, event)
            mark = event.mark
            if mark is None or mark is stream.capture:  # nothing to wait for, or in the very order of the capture
                return
            if isinstance(mark, Capture) or stream.capture:
                raise EmulatedDeviceError(f"Stream {stream.name} cannot wait for {event}: one of them is captured, not both.")
            if not self._ignores(f"{stream.name} waits for {event}, at {caller()}"):
                self.scheduler.append(stream.queue, Work(f"a wait for {event}", after=mark))
                self.scheduler.run_some()

    def poll(self, event: EmulatedEvent) -> bool:
        """True where the event's work is done, or where this wait is left out."""
        with self._lock:
            self.refuse_in_capture(f"ask for {event}")
            event.polls = event.polls + 1 if event.polled_at == self._enqueued else 1
            event.polled_at = self._enqueued
            self.scheduler.run_some()
            if self._goes_on(event) or event.mark is None:
                return True
            mark = self._mark(event)
            # A program that asks again and again drives the messages between devices; and where it enqueues nothing time passes.
            self.scheduler.advance(mark, everything=event.polls > _PATIENCE)
            return mark.done

    def synchronize_event(self, event: EmulatedEvent) -> None:
        """Do what the event marks."""
        with self._lock:
            self.refuse_in_capture(f"wait for {event}")
            self._counters.synchronisations["event", caller()] += 1
            if not self._goes_on(event) and event.mark is not None:
                self.scheduler.run_until(self._mark(event))
            self._check()

    def synchronize_stream(self, stream: EmulatedStream) -> None:
        """Do all work of the stream."""
        with self._lock:
            self.refuse_in_capture(f"wait for stream {stream.name}")
            self._counters.synchronisations[f"stream {stream.name}", caller()] += 1
            if not self._ignores(f"the host waits for stream {stream.name}, at {caller()}"):
                self.scheduler.run_until(stream.queue.mark)
            self._check()

    def _mark(self, event: EmulatedEvent) -> Mark:
        if isinstance(event.mark, Mark):
            return event.mark
        raise EmulatedDeviceError(f"The host cannot ask for {event}: that was inside a capture.")

    def _goes_on(self, event: EmulatedEvent) -> bool:
        """The host asks for an event: True where it goes on whatever the answer. All that ask for one record are one wait."""
        if not event.asked and event.mark is not None:
            event.asked, event.ignored = True, self._ignores(f"the host waits for {event}, at {caller()}")
        return event.ignored

    def _ignores(self, text: str) -> bool:
        self.waits.append(text)
        return len(self.waits) - 1 == self._ignored_wait

    def refuse_in_capture(self, deed: str) -> None:
        """Raise if this thread captures.

        Raises:
            EmulatedDeviceError: this thread captures.
        """
        if capture := self.captures.get(threading.get_ident()):
            raise EmulatedDeviceError(f"Nobody can {deed} while stream {capture.name} is captured.")

    def _require_own(self, stream: EmulatedStream, event: EmulatedEvent | None = None) -> None:
        if stream.table is not self or (event and event.table is not self):
            raise EmulatedDeviceError(f"Stream {stream.name} and what it is given are of different devices.")


def caller() -> str:
    """The function outside of this package that called in here, as module.function."""
    frame = sys._getframe(1)
    package = __name__.rpartition(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}"
