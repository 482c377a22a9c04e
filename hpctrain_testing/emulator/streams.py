"""Streams, events and captures of the emulated device, and the queues of work beneath them.

Work is done as late and in as odd an order as the marks between queues allow. Whenever something is enqueued, some of the
work that may be done is done, of any queue; when somebody waits, the work that is waited for is done, alone or among other
work. So a program that forgets to wait is likely to compute with what is not there yet, and the seed that shows it shows it
again.

A graph is work that was recorded with the places and values of its arguments. `DeviceCounters` count what a device was asked
for, so that tests can assert what a step does not do.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from hpctrain.backend.cuda.device import DeviceArray, DeviceEvent, DeviceStream
from hpctrain_testing.emulator.memory import EmulatedDeviceError


@dataclass
class DeviceCounters:
    """Counts since the device was made.

    Attributes:
        enqueued: by the kind of work, captured work included: names of kernels, "upload", "convolution forward", "graph", ...
        synchronisations: of the host, by ("event" or "stream <name>", the function that waits).
        uploaded_bytes: of all uploads.
        allocations, late_allocations: of device and pinned memory; those after `EmulatedDevice.seal`.
    """

    enqueued: Counter[str] = field(default_factory=Counter)
    synchronisations: Counter[tuple[str, str]] = field(default_factory=Counter)
    uploaded_bytes: int = 0
    allocations: int = 0
    late_allocations: list[str] = field(default_factory=list)
    sealed: bool = False

    def allocated(self, size_bytes: int, where: str) -> None:
        """Count an allocation."""
        self.allocations += 1
        if self.sealed:
            self.late_allocations.append(f"{size_bytes} bytes at {where}")


#: by seed, the probability that one more piece of work is done after a call, and that a wait does only what it waits for
_EAGERNESS, _LAZINESS = (0.02, 0.2, 0.5), (0.3, 0.9)
#: by seed and queue, how much a queue is preferred
_PREFERENCES = (1, 1, 20)


class WorkQueue:
    """Work in its order.

    Attributes:
        issued, done: numbers of pieces.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.pending: deque[Work] = deque()
        self.issued, self.done = 0, 0

    @property
    def mark(self) -> Mark:
        """All work so far."""
        return Mark(self, self.issued)

    @property
    def blocked_by(self) -> Mark | None:
        """The mark that the next piece waits for."""
        after = self.pending[0].after if self.pending else None
        return None if after is None or after.done else after


@dataclass(frozen=True)
class Mark:
    """The work of a queue up to a position."""

    queue: WorkQueue
    position: int

    @property
    def done(self) -> bool:
        """Whether all of the work is done."""
        return self.queue.done >= self.position


@dataclass
class Work:
    """A piece of work.

    Args:
        after: it is done after this. keep_alive: arrays whose memory stays in use until it is done.
        reads, writes: host memory. goes_on: polled while the piece is the next one, because it needs other devices; returns
            whether it can be done.
    """

    text: str
    action: Callable[[], None] | None = None
    after: Mark | None = None
    keep_alive: Sequence[DeviceArray] = ()
    reads: tuple[np.ndarray, ...] = ()
    writes: tuple[np.ndarray, ...] = ()
    goes_on: Callable[[], bool] | None = None


class WorkScheduler:
    """Does the work of many queues. failed: a piece raised an error."""

    def __init__(self, source: random.Random) -> None:
        self.queues: list[WorkQueue] = []
        self.failed = False
        self._random = source
        self._eagerness, self._laziness = source.choice(_EAGERNESS), source.choice(_LAZINESS)
        self._preferences: dict[WorkQueue, int] = {}

    def queue(self, name: str) -> WorkQueue:
        """Return a new queue."""
        queue = WorkQueue(name)
        self.queues.append(queue)
        self._preferences[queue] = self._random.choice(_PREFERENCES)
        return queue

    def append(self, queue: WorkQueue, work: Work) -> None:
        """Add a piece to a queue."""
        queue.pending.append(work)
        queue.issued += 1

    def is_pending(self, memory: np.ndarray) -> bool:
        """Return whether pending work reads or writes this memory of the host."""
        works = (work for queue in self.queues for work in queue.pending)
        return any(np.may_share_memory(memory, other) for work in works for other in (*work.reads, *work.writes))

    def run_until(self, mark: Mark) -> None:
        """Do what a mark needs, and maybe other work."""
        alone = self._random.random() < self._laziness
        while not mark.done:
            self._step_where_ready(self._needed(mark.queue) if alone else self._pick())

    def run_all(self) -> None:
        """Do all work."""
        while any(queue.pending for queue in self.queues):
            self._step_where_ready(self._pick())

    def run_some(self) -> None:
        """Do some work, or none."""
        while self._random.random() < self._eagerness and any(q.pending and not q.blocked_by for q in self.queues):
            self._step_where_ready(self._pick())

    def advance(self, mark: Mark, *, everything: bool = False) -> None:
        """Poll other devices, if the next piece that a mark needs depends on them; never waits for them.

        everything: do all that the mark needs and other devices allow.
        """
        while not mark.done:
            queue = self._needed(mark.queue)
            asks = queue.pending[0].goes_on is not None
            if not (asks or everything) or not self._step_where_ready(queue) or not everything:
                return

    def _pick(self) -> WorkQueue:
        """Return a queue whose next piece can be done."""
        ready = [queue for queue in self.queues if queue.pending and not queue.blocked_by]
        if not ready:
            raise _deadlock([queue for queue in self.queues if queue.pending])
        return self._random.choices(ready, [self._preferences[queue] for queue in ready])[0]

    def _needed(self, queue: WorkQueue) -> WorkQueue:
        """Return the queue whose next piece brings `queue` forward."""
        passed = []
        while mark := queue.blocked_by:
            passed.append(queue)
            queue = mark.queue
            if queue in passed or not queue.pending:
                raise _deadlock(passed)
        return queue

    def _step_where_ready(self, queue: WorkQueue) -> bool:
        """Do the next piece of a queue, unless it waits for other devices; return whether it was done."""
        goes_on = queue.pending[0].goes_on
        try:
            ready = goes_on is None or goes_on()
        except BaseException:
            self.failed = True
            raise
        if ready:
            self._step(queue)
        return ready

    def _step(self, queue: WorkQueue) -> None:
        work = queue.pending.popleft()
        try:
            if work.action:
                work.action()
        except BaseException:
            self.failed = True
            raise
        finally:
            queue.done += 1


def _deadlock(queues: Sequence[WorkQueue]) -> EmulatedDeviceError:
    waits = ", ".join(f"{queue.name} in {queue.pending[0].text}" for queue in queues)
    return EmulatedDeviceError(f"Streams wait without end: {waits}.")


_POISON = 0xFF
#: polls of an event, by a host that enqueues nothing, until its work is done: time passes, also for a late device
_PATIENCE = 50


class Capture:
    """Work of one stream, recorded instead of done. open: recording continues."""

    def __init__(self, name: str) -> None:
        self.name, self.open = name, True
        self.works: list[Work] = []


class EmulatedEvent:
    """Implements `DeviceEvent`.

    Attributes:
        mark: of the latest record. asked, ignored: since then the host has polled it, and that wait is left out.
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
        """Return a new stream."""
        return EmulatedStream(self, self.scheduler.queue(name))

    def event(self) -> EmulatedEvent:
        """Return a new event."""
        self._events += 1
        return EmulatedEvent(self, self._events)

    def enqueue(self, stream: EmulatedStream, work: Work) -> None:
        """Add work to a stream, or to what is captured there."""
        with self._lock:
            self._counters.enqueued[work.text] += 1
            self._enqueued += 1
            self._require_own(stream)
            if stream.capture:
                stream.capture.works.append(replace(work, keep_alive=()))  # a graph keeps no memory in use
                return
            for memory in work.writes:
                if not any(np.may_share_memory(memory, other) for other in work.reads):
                    self._poison(stream, memory)
            self.scheduler.append(stream.queue, work)
            self.scheduler.run_some()

    def _poison(self, stream: EmulatedStream, memory: np.ndarray) -> None:
        """Overwrite memory that will be written: now, or after earlier work with it."""
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
            if mark is None or mark is stream.capture:  # nothing to wait for, or ordered within the capture
                return
            if isinstance(mark, Capture) or stream.capture:
                raise EmulatedDeviceError(f"Stream {stream.name} cannot wait for {event}: one of them is captured, not both.")
            if not self._ignores(f"{stream.name} waits for {event}, at {caller()}"):
                self.scheduler.append(stream.queue, Work(f"a wait for {event}", after=mark))
                self.scheduler.run_some()

    def poll(self, event: EmulatedEvent) -> bool:
        """Return whether the event's work is done, or this wait is left out."""
        with self._lock:
            self.refuse_in_capture(f"ask for {event}")
            event.polls = event.polls + 1 if event.polled_at == self._enqueued else 1
            event.polled_at = self._enqueued
            self.scheduler.run_some()
            if self._goes_on(event) or event.mark is None:
                return True
            mark = self._mark(event)
            # A program that polls drives the messages between devices; if it enqueues nothing, time passes.
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
        """Return whether the host goes on without the event. All questions about one record are one wait."""
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
    """Return the function outside of this package that called in here, as module.function."""
    frame = sys._getframe(1)
    package = __name__.rpartition(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}"


class EmulatedGraph:
    """Implements `CapturedGraph`. It keeps no memory in use: arrays have to outlive it, as on a GPU."""

    def __init__(self, table: StreamTable, capture: Capture) -> None:
        self._table, self._capture = table, capture

    def launch(self, stream: DeviceStream) -> None:
        """Enqueue all of it as one piece of work."""
        assert isinstance(stream, EmulatedStream), f"{stream!r} is not of this device"
        works = self._capture.works
        if self._capture.open:
            raise EmulatedDeviceError("A graph is launched before its capture has ended.")
        self._table.refuse_in_capture("launch a graph")
        reads = tuple(memory for work in works for memory in work.reads)
        writes = tuple(memory for work in works for memory in work.writes)
        self._table.enqueue(stream, Work("graph", lambda: _do(works), reads=reads, writes=writes))


def _do(works: Sequence[Work]) -> None:
    for work in works:
        if work.action:
            work.action()


@contextmanager
def capturing(table: StreamTable, stream: EmulatedStream) -> Iterator[EmulatedGraph]:
    """Record what is enqueued on `stream`. The calling thread can neither wait nor allocate nor load kernels meanwhile.

    Raises:
        EmulatedDeviceError: this thread or this stream captures already.
    """
    table.refuse_in_capture("begin another capture")
    if stream.capture:
        raise EmulatedDeviceError(f"Stream {stream.name} is captured already.")
    capture = Capture(stream.name)
    stream.capture = table.captures[threading.get_ident()] = capture
    try:
        yield EmulatedGraph(table, capture)
        capture.open = False
    finally:
        stream.capture = None
        del table.captures[threading.get_ident()]
