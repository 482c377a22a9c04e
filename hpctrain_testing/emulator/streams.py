"""Streams, events and captures of the emulated device, and their work queues.

Work is done as late and in as unusual an order as the dependencies between queues allow. Each call that enqueues work also does
some of the work that may be done, of any queue. A wait does the work that it waits for, alone or with other work. A program that
lacks a wait therefore probably computes with missing results, and does so reproducibly with the same seed.

A graph is recorded work with the addresses and values of its arguments. `DeviceCounters` count the requests to a device, so that
tests can assert what a step does not do.
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
        enqueued: numbers by kind of work, including captured work: names of kernels, "upload", "convolution forward", "graph",
            ...
        synchronisations: numbers of host waits by ("event" or "stream <name>", function that waits).
        uploaded_bytes, downloaded_bytes: total size of all copies from and to pinned memory, by the name of their stream.
        allocations: number of allocations of device and pinned memory.
        late_allocations: allocations after `EmulatedDevice.seal`.
    """

    enqueued: Counter[str] = field(default_factory=Counter)
    synchronisations: Counter[tuple[str, str]] = field(default_factory=Counter)
    uploaded_bytes: Counter[str] = field(default_factory=Counter)
    downloaded_bytes: Counter[str] = field(default_factory=Counter)
    allocations: int = 0
    late_allocations: list[str] = field(default_factory=list)
    sealed: bool = False

    def allocated(self, size_bytes: int, where: str) -> None:
        """Count an allocation."""
        self.allocations += 1
        if self.sealed:
            self.late_allocations.append(f"{size_bytes} bytes at {where}")


#: choices by seed: probability that a call does another piece of work; probability that a wait does only the work it waits for
_EAGERNESS, _LAZINESS = (0.02, 0.2, 0.5), (0.3, 0.9)
#: choices of the preference of a queue, by seed
_PREFERENCES = (1, 1, 20)


class WorkQueue:
    """Queue of work, done in order.

    Attributes:
        issued: number of pieces enqueued.
        done: number of pieces done.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.pending: deque[Work] = deque()
        self.issued, self.done = 0, 0

    @property
    def mark(self) -> Mark:
        """Mark after all work so far."""
        return Mark(self, self.issued)

    @property
    def blocked_by(self) -> Mark | None:
        """Mark that the next piece waits for; None if it can be done."""
        after = self.pending[0].after if self.pending else None
        return None if after is None or after.done else after


@dataclass(frozen=True)
class Mark:
    """A position in a queue, which represents all work before it."""

    queue: WorkQueue
    position: int

    @property
    def done(self) -> bool:
        """Whether all work before the mark is done."""
        return self.queue.done >= self.position


@dataclass
class Work:
    """A piece of work.

    Args:
        after: mark that must be done first.
        keep_alive: arrays whose memory stays in use until the piece is done.
        reads, writes: host memory that the piece reads and writes.
        goes_on: callback for a piece that depends on other devices, polled while the piece is next; returns whether it can be
            done.
    """

    text: str
    action: Callable[[], None] | None = None
    after: Mark | None = None
    keep_alive: Sequence[DeviceArray] = ()
    reads: tuple[np.ndarray, ...] = ()
    writes: tuple[np.ndarray, ...] = ()
    goes_on: Callable[[], bool] | None = None


class WorkScheduler:
    """Scheduler of the work of many queues.

    Attributes:
        failed: whether a piece raised an error.
    """

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
        """Return whether pending work reads or writes this host memory."""
        works = (work for queue in self.queues for work in queue.pending)
        return any(np.may_share_memory(memory, other) for work in works for other in (*work.reads, *work.writes))

    def run_until(self, mark: Mark) -> None:
        """Do the work before a mark, and possibly other work."""
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
        """Poll other devices if the next piece before a mark depends on them; never wait for them.

        Args:
            everything: whether to do all work before the mark that other devices allow.
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
        """Return the queue whose next piece must be done next for `queue` to progress."""
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
    return EmulatedDeviceError(f"Streams wait for each other forever: {waits}.")


_POISON = 0xFF
#: number of polls of an event, by a host that enqueues nothing, after which its work is done: a late device also progresses
_PATIENCE = 50


class Capture:
    """Recorded work of one stream, which is not done.

    Attributes:
        open: whether recording continues.
    """

    def __init__(self, name: str) -> None:
        self.name, self.open = name, True
        self.works: list[Work] = []


class EmulatedEvent:
    """Event; implements `DeviceEvent`.

    Attributes:
        mark: mark of the latest record; None before it.
        asked: whether the host has polled the latest record.
        ignored: whether the wait for the latest record is omitted.
        polls: number of polls by the host.
        polled_at: number of pieces that were enqueued at the last poll.
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
    """Stream; implements `DeviceStream`."""

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
        check: callback, called after every wait of the host.
        ignored_wait: number of the wait that is omitted, counted from 0 over all waits of streams and of the host.

    Attributes:
        waits: descriptions of all waits so far.
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
        """Add work to a stream, or to its capture."""
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
        """Overwrite memory that will be written, now or after earlier work that uses it."""
        if self.scheduler.is_pending(memory):
            self.scheduler.append(stream.queue, Work("begin of download", lambda: memory.fill(_POISON), writes=(memory,)))
        else:
            memory.fill(_POISON)

    def record(self, stream: EmulatedStream, event: EmulatedEvent) -> None:
        """Set the event's mark after all work of the stream so far."""
        with self._lock:
            self._require_own(stream, event)
            event.mark = stream.capture or stream.queue.mark
            event.asked = event.ignored = False

    def wait(self, stream: EmulatedStream, event: EmulatedEvent) -> None:
        """Make the stream wait for the event's latest record."""
        with self._lock:
            self._require_own(stream, event)
            mark = event.mark
            if mark is None or mark is stream.capture:  # nothing to wait for, or ordered within the capture
                return
            if isinstance(mark, Capture) or stream.capture:
                raise EmulatedDeviceError(f"Stream {stream.name} cannot wait for {event}: only one of them is being captured.")
            if not self._ignores(f"{stream.name} waits for {event}, at {caller()}"):
                self.scheduler.append(stream.queue, Work(f"a wait for {event}", after=mark))
                self.scheduler.run_some()

    def poll(self, event: EmulatedEvent) -> bool:
        """Return whether the event's work is done or this wait is omitted."""
        with self._lock:
            self.refuse_in_capture(f"ask for {event}")
            event.polls = event.polls + 1 if event.polled_at == self._enqueued else 1
            event.polled_at = self._enqueued
            self.scheduler.run_some()
            if self._goes_on(event) or event.mark is None:
                return True
            mark = self._mark(event)
            # Polling progresses the messages between devices; if the program enqueues nothing, time passes.
            self.scheduler.advance(mark, everything=event.polls > _PATIENCE)
            return mark.done

    def synchronize_event(self, event: EmulatedEvent) -> None:
        """Do all work before the event's latest record."""
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
        raise EmulatedDeviceError(f"The host cannot wait for {event}, which was recorded inside a capture.")

    def _goes_on(self, event: EmulatedEvent) -> bool:
        """Return whether the host continues without the event. All polls of one record count as one wait."""
        if not event.asked and event.mark is not None:
            event.asked, event.ignored = True, self._ignores(f"the host waits for {event}, at {caller()}")
        return event.ignored

    def _ignores(self, text: str) -> bool:
        self.waits.append(text)
        return len(self.waits) - 1 == self._ignored_wait

    def refuse_in_capture(self, deed: str) -> None:
        """Raise if this thread is capturing.

        Raises:
            EmulatedDeviceError: this thread is capturing.
        """
        if capture := self.captures.get(threading.get_ident()):
            raise EmulatedDeviceError(f"A thread cannot {deed} while it captures stream {capture.name}.")

    def _require_own(self, stream: EmulatedStream, event: EmulatedEvent | None = None) -> None:
        if stream.table is not self or (event and event.table is not self):
            raise EmulatedDeviceError(f"The arguments of stream {stream.name} belong to another device.")


def caller() -> str:
    """Return the function outside this package that called it, as module.function."""
    frame = sys._getframe(1)
    package = __name__.rpartition(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}"


class EmulatedGraph:
    """Graph; implements `CapturedGraph`. It does not keep memory in use: arrays must outlive it, as on a GPU."""

    def __init__(self, table: StreamTable, capture: Capture) -> None:
        self._table, self._capture = table, capture

    def launch(self, stream: DeviceStream) -> None:
        """Enqueue the whole graph as one piece of work."""
        assert isinstance(stream, EmulatedStream), f"{stream!r} is not of this device"
        works = self._capture.works
        if self._capture.open:
            raise EmulatedDeviceError("The graph was launched before its capture ended.")
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
    """Record the work enqueued on `stream` (context manager). Meanwhile this thread cannot wait, allocate or load kernels.

    Raises:
        EmulatedDeviceError: this thread or this stream is already capturing.
    """
    table.refuse_in_capture("begin another capture")
    if stream.capture:
        raise EmulatedDeviceError(f"Stream {stream.name} is already being captured.")
    capture = Capture(stream.name)
    stream.capture = table.captures[threading.get_ident()] = capture
    try:
        yield EmulatedGraph(table, capture)
        capture.open = False
    finally:
        stream.capture = None
        del table.captures[threading.get_ident()]
