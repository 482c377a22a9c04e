"""Operations of one communicator, started strictly in the order in which they were queued.

`Ticket` is a queued operation, `LocalEvent` something that happens on this rank alone and that queued operations come after.

`MessageAccount` adds up the processor's time that messages take from a program: posting, tests, and the work of starts. It
excludes waits, which are counted separately, and updates, wherever they run. It costs two readings of a clock for each call of
the engine that has something to do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from time import perf_counter_ns
from typing import Any, NoReturn

from hpctrain.comm.base import Handle, LateHandle
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.trace.tracer import HOOKS, Category, Tracer


class _Stretch:
    """Nested engine calls of one thread; only the outermost is timed."""

    __slots__ = ("begin_ns", "depth", "total_ns", "update_ns")

    def __init__(self) -> None:
        self.depth = 0
        self.begin_ns = self.update_ns = self.total_ns = 0


class MessageAccount:
    """An account of a process's time for messages, of its program and of a second thread, if any, apart.

    Args:
        trace: records each stretch; None: none is recorded. clock_ns: nanoseconds since any start; a tracer's own counts.

    Attributes:
        last_update_ns: when the last update inside a call of the engine ended.
    """

    def __init__(self, trace: Tracer | None = None, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._trace = trace
        self.clock_ns = clock_ns if trace is None else trace.clock_ns
        self.last_update_ns = 0
        self._program, self._beside = _Stretch(), _Stretch()
        self._second: int | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the program so far."""
        return self._program.total_ns * 1e-9

    @property
    def beside_seconds(self) -> float:
        """Seconds of the second thread so far, which are not the program's."""
        return self._beside.total_ns * 1e-9

    def second_thread(self, identifier: int | None) -> None:
        """Set the second thread, whose calls are not the program's; None: there is none."""
        self._second = identifier
        if self._trace is not None:
            self._trace.second_thread(identifier)

    def begin(self) -> None:
        """Begin a call of the engine, in which something may move."""
        stretch = self._of_caller()
        stretch.depth += 1
        if stretch.depth == 1:
            stretch.update_ns = 0
            stretch.begin_ns = self.clock_ns()

    def end(self, *, recorded: bool = True) -> None:
        """End the call, whether or not it failed. recorded: in the trace, if any."""
        stretch = self._of_caller()
        stretch.depth -= 1
        if stretch.depth == 0:
            now = self.clock_ns()
            stretch.total_ns += now - stretch.begin_ns - stretch.update_ns
            if recorded and self._trace is not None:
                self._trace.add(Category.MESSAGES, HOOKS, stretch.begin_ns, now)

    def begin_wait(self) -> None:
        """Count nothing until `end_wait`: the program waits, and that is counted as a wait."""
        self._of_caller().depth += 1

    def end_wait(self) -> None:
        """End the wait."""
        self._of_caller().depth -= 1

    def updated(self, begin_ns: int, stop_ns: int) -> None:
        """Note that an update has run; inside of a call of the engine it is no message's time."""
        stretch = self._of_caller()
        if stretch.depth:
            stretch.update_ns += stop_ns - begin_ns
            self.last_update_ns = stop_ns

    def _of_caller(self) -> _Stretch:
        return self._beside if self._second is not None and get_ident() == self._second else self._program


# A posting that is not delayed by more is not recorded as delayed.
_LEAST_DELAY_NS = 5_000


class Ticket:
    """An operation given to a queue: waiting for its turn, in flight, or done.

    Attributes:
        purpose: its name in messages, usually the parameter's. sequence: its position in its queue, counted from 0 at start-up.
        done: complete; stays True. flight_number: in the flight record; 0 without one.
        possible_ns: where it is traced, the last instant at which it was known not to be complete.
        late: its handle, until it has posted what the flight record is to hold; None: the record holds it.
    """

    __slots__ = (
        "_after",
        "_start",
        "begun_ns",
        "done",
        "flight_number",
        "handle",
        "late",
        "possible_ns",
        "purpose",
        "queue_name",
        "sequence",
    )

    def __init__(
        self, start: Callable[[], Handle], purpose: str, after: Sequence[Ticket], queue_name: str, sequence: int
    ) -> None:
        self.purpose = purpose
        self.queue_name = queue_name
        self.sequence = sequence
        self.done = False
        self.begun_ns = 0  # where it is traced: when posting began
        self.possible_ns = self.flight_number = 0
        self.handle: Handle | None = None
        self.late: LateHandle | None = None
        self._start: Callable[[], Handle] | None = start
        self._after = tuple(after)

    def ready(self) -> bool:
        """Return whether everything that it comes after is complete."""
        return all(ticket.done for ticket in self._after)

    def turn_ns(self) -> int:
        """Return the earliest instant at which all that it comes after may have been complete, if operations are traced."""
        return max((ticket.possible_ns for ticket in self._after), default=0)

    def begin(self) -> None:
        """Start the operation and release its dependencies, so that no chain of old tickets is kept."""
        assert self._start is not None, "an operation is started once"
        start, self._start, self._after = self._start, None, ()
        self.handle = start()

    def test(self) -> bool:
        """Drive the started operation and return whether it is complete; its buffers are then released."""
        assert self.handle is not None
        if self.handle.test():
            self.done = True
            self.handle = None
        return self.done

    def __str__(self) -> str:
        head = f"{self.purpose}: queue {self.queue_name}, sequence number {self.sequence}"
        if self.done:
            return f"{head}, complete"
        if self.handle is not None:
            return f"{head}, operation {self.handle}, in flight"
        blockers = [f"{ticket.purpose} ({ticket.queue_name} {ticket.sequence})" for ticket in self._after if not ticket.done]
        return f"{head}, not started" + (f", comes after {', '.join(blockers)}" if blockers else ", after the queue's head")


class PostingQueue:
    """Operations of one communicator, started strictly in the order of `post`.

    Args:
        name: for messages and traces. window: most operations in flight at a time; None: no limit.
        flight: records each operation as it happens; None: nothing does. world_ranks: of the communicator.
        lock: held by the thread that talks to the transport. trace: records each operation from its posting to its completion,
            and how long after its turn it was posted at most. account: of the time that posting takes; None: it is not kept.

    Attributes:
        begun: operations that have been started so far.
    """

    def __init__(
        self,
        name: str,
        window: int | None = None,
        *,
        lock: AbstractContextManager[Any] | None = None,
        trace: Tracer | None = None,
        account: MessageAccount | None = None,
        flight: FlightRecorder | None = None,
        world_ranks: Sequence[int] = (0,),
    ) -> None:
        assert window is None or window >= 1
        self.name = name
        self.window = window
        self._lock = lock if lock is not None else nullcontext()
        self._trace = trace
        self._account = MessageAccount(trace) if account is None else account
        self._flight = flight
        self._flight_queue = 0 if flight is None else flight.queue_of(name, world_ranks)
        self._free_ns = 0  # where it is traced: since when this queue lets its head start
        self._waiting: deque[Ticket] = deque()
        self._in_flight: list[Ticket] = []
        self._posted = 0
        self.begun = 0
        self.starting = False

    def post(self, start: Callable[[], Handle], purpose: str, after: Sequence[Ticket] = ()) -> Ticket:
        """Queue an operation; it starts at once where it may.

        Args:
            start: posts the operation and returns its handle. Called when everything before it in this queue has been started and
                all of `after` are complete. May compute (a shard's update) and may post; must not wait.
            purpose: its name in messages and traces, usually the parameter's.
            after: tickets of any queue.
        """
        with self._lock:
            self._account.begin()
            try:
                ticket = Ticket(start, purpose, after, self.name, self._posted)
                self._posted += 1
                self._waiting.append(ticket)
                if self._flight is not None:
                    ticket.flight_number = self._flight.queued(self._flight_queue, purpose, ticket.sequence, depth=2)
                if self._trace is not None:
                    ticket.begun_ns = self._trace.clock_ns()
                self.start_heads()
            finally:
                self._account.end()
        return ticket

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is in flight."""
        return not self._waiting and not self._in_flight

    @property
    def in_flight(self) -> bool:
        """Whether something is in flight."""
        return bool(self._in_flight)

    def unfinished(self) -> Sequence[Ticket]:
        """Return the operations in flight, then those that wait, each in order."""
        return (*self._in_flight, *self._waiting)

    def collect(self) -> None:
        """Test everything in flight once."""
        flying, trace = self._in_flight, self._trace
        full = self.window is not None and len(flying) >= self.window
        now_ns = 0 if trace is None else trace.clock_ns()
        still_flying = 0
        for ticket in flying:
            done = ticket.test()
            if ticket.late is not None:
                self._record_posting(ticket, ticket.late)
            if not done:
                ticket.possible_ns = now_ns
                flying[still_flying] = ticket
                still_flying += 1
                continue
            self._record_end(ticket)
            if full and trace is not None:
                self._free_ns, full = max(self._free_ns, ticket.possible_ns), False
        del flying[still_flying:]

    def progress_once(self) -> None:
        """Let everything in flight move, but complete nothing: another thread than the owner's may call this."""
        for ticket in self._in_flight:
            if ticket.handle is not None:
                ticket.handle.test()

    def start_heads(self) -> None:
        """Start operations from the head while they may start."""
        if self.starting:  # a `start` that posts: what it adds comes after itself
            return
        self.starting = True
        try:
            while self._waiting and (self.window is None or len(self._in_flight) < self.window) and self._waiting[0].ready():
                ticket = self._waiting.popleft()
                self.begun += 1
                self._begin(ticket)
                if self._flight is not None:
                    if isinstance(ticket.handle, LateHandle):
                        ticket.late = ticket.handle
                    else:
                        self._flight.started(ticket.flight_number, str(ticket.handle))
                done = ticket.test()
                if ticket.late is not None:
                    self._record_posting(ticket, ticket.late)
                if done:
                    self._record_end(ticket)
                else:
                    ticket.possible_ns = self._free_ns
                    self._in_flight.append(ticket)
        finally:
            self.starting = False

    def _record_posting(self, ticket: Ticket, late: LateHandle) -> None:
        """Record in the flight record what a late operation has posted, if it has by now."""
        if self._flight is not None and late.operation:
            self._flight.started(ticket.flight_number, late.operation)
            ticket.late = None

    def _begin(self, ticket: Ticket) -> None:
        trace = self._trace
        if trace is None:
            ticket.begin()
            return
        begun_ns = trace.clock_ns()
        turn_ns = max(self._free_ns, ticket.begun_ns, ticket.turn_ns())
        if begun_ns - turn_ns > _LEAST_DELAY_NS:
            trace.add(Category.DELAY, ticket.purpose, turn_ns, begun_ns, self.name, ticket.sequence)
        ticket.begin()
        ticket.begun_ns = max(begun_ns, self._account.last_update_ns)  # a start that updates posts after it
        ticket.possible_ns = self._free_ns = trace.clock_ns()

    def _record_end(self, ticket: Ticket) -> None:
        """Record an operation that is complete."""
        if self._flight is not None:
            self._flight.done(ticket.flight_number)
        if self._trace is not None:
            end_ns = self._trace.clock_ns()
            self._trace.add(Category.COMMUNICATION, ticket.purpose, ticket.begun_ns, end_ns, self.name, ticket.sequence)


class LocalEvent(Ticket):
    """A ticket that is done once the event has happened. Never posted; operations that are posted come after it."""

    __slots__ = ()

    def __init__(self, text: str) -> None:
        super().__init__(_never, text, (), "this rank", 0)

    def happen(self) -> None:
        """Let go what waits for it; the caller polls the engine, so that it starts."""
        self.possible_ns = perf_counter_ns()
        self.done = True


def _never() -> NoReturn:
    raise AssertionError("a local event is no operation")
