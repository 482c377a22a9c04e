"""Progress engine: starts operations in a fixed order, drives all of them, and limits every wait by a deadline.

The `ProgressEngine` of a session owns one `PostingQueue` per communicator of its steps. Each wait drives all of them. If a wait
drove only one communicator, collectives of the split group and of the data group could deadlock each other; separate
communicators do not prevent this. Each MPI communicator also has an engine of its own, without queues, for waits of the start and
the end of a run (`comm/mpi.py`). Operations of a queue start in the order of `post`, never in the order of arrival, so that MPI
matches collectives in the same way on every rank. A `Ticket` is a queued operation. A `LocalEvent` is an event on this rank on
which queued operations depend.

A `ProgressThread` (`waiting.py`) can drive messages while kernels run (mode `thread`). It only tests operations in flight. It
completes no operation and starts none (except that an operation of two stages may enter its second stage), so no averager's code
runs on it, and the main thread notices completions only when it polls.

`MessageAccount` accumulates the time that the program spends on messages: posting, tests and the computations of starts. It
excludes waits, which are counted separately, and updates of weights, wherever they run. It reads the clock twice per engine call
that has work to do, and the processor clock of the thread twice per wait.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from typing import Any, NoReturn, TextIO, cast

from hpctrain.comm.base import Communicator, Handle, LateHandle
from hpctrain.comm.waiting import ProgressThread, WaitPolicy
from hpctrain.core.errors import CommunicationTimeoutError
from hpctrain.flight.autopsy import explanation
from hpctrain.flight.recorder import FlightNotes, FlightRecorder
from hpctrain.launch import process_end
from hpctrain.launch.process_end import End
from hpctrain.trace.tracer import HOOKS, Category, Tracer


class ProgressMode(StrEnum):
    """Way in which messages advance while kernels run.

    NONE: only the transport drives them between waits (MPICH_ASYNC_PROGRESS=1, offloading networks). TEST: the program tests
    after each operator. THREAD: in addition, a thread tests every 200 us, which requires MPI at thread level "serialized".
    """

    NONE = "none"
    TEST = "test"
    THREAD = "thread"

    @property
    def in_words(self) -> str:
        """Description of the mode for users who have not read the documentation."""
        return {
            ProgressMode.NONE: "messages move by themselves while layers compute",
            ProgressMode.TEST: "messages move whenever a layer is done",
            ProgressMode.THREAD: "a thread moves messages while layers compute",
        }[self]


class MessageAccount:
    """Account of the time that the program spends on messages. Calls of the engine may nest; only the outermost one is timed.

    Args:
        trace: tracer that records each outermost call; None: no recording.
        clock_ns: clock in nanoseconds; ignored if there is a tracer, whose clock is used.
        cpu_ns: processor clock of the calling thread, in nanoseconds.

    Attributes:
        updates_ns: total time of the program's updates, in waits or outside.
        last_update_ns: end of the last update inside a call of the engine.
        waited_cpu_ns: processor time of the program in waits so far, including updates.
        waited_updates_ns: time of the program's updates in waits so far.
    """

    def __init__(
        self,
        trace: Tracer | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._trace = trace
        self.clock_ns = clock_ns if trace is None else trace.clock_ns
        self._cpu_ns = cpu_ns
        self.updates_ns = self.last_update_ns = self.waited_cpu_ns = self.waited_updates_ns = 0
        self._depth = self._begin_ns = self._total_ns = 0
        self._update_ns = 0  # time of updates inside the outermost call

    @property
    def seconds(self) -> float:
        """Total seconds that the program has spent on messages."""
        return self._total_ns * 1e-9

    def begin(self) -> None:
        """Begin a call of the engine that may drive messages."""
        self._depth += 1
        if self._depth == 1:
            self._update_ns = 0
            self._begin_ns = self.clock_ns()

    def end(self) -> None:
        """End the call, after success or failure."""
        self._depth -= 1
        if self._depth == 0:
            now = self.clock_ns()
            self._total_ns += now - self._begin_ns - self._update_ns
            if self._trace is not None:
                self._trace.add(Category.MESSAGES, HOOKS, self._begin_ns, now)

    def begin_wait(self) -> None:
        """Stop counting until `end_wait`; waits are counted separately."""
        self._depth += 1
        self.waited_cpu_ns -= self._cpu_ns()
        self.waited_updates_ns -= self.updates_ns

    def end_wait(self) -> None:
        """Resume counting after a wait."""
        self._depth -= 1
        self.waited_cpu_ns += self._cpu_ns()
        self.waited_updates_ns += self.updates_ns

    def updated(self, begin_ns: int, stop_ns: int) -> None:
        """Count an update of weights that has run. Inside a call of the engine, its time is not counted for messages."""
        self.updates_ns += stop_ns - begin_ns
        if self._depth:
            self._update_ns += stop_ns - begin_ns
            self.last_update_ns = stop_ns


# Minimum delay of a posting that is recorded as delayed.
_LEAST_DELAY_NS = 5_000


class Dependency:
    """Base of what posted operations can depend on: another operation (`Ticket`) or an event on this rank (`LocalEvent`).

    Attributes:
        purpose: name in messages, usually the parameter's.
        done: whether the operation is complete or the event has happened; stays True.
        possible_ns: earliest possible time of the completion: the last time at which a traced operation was known to be
            incomplete, or the time at which an event happened.
        queue_name: name of the operation's queue; "this rank" for an event.
        sequence: position of the operation in its queue, counted from 0 at start-up; 0 for an event.
    """

    __slots__ = ("done", "possible_ns", "purpose")
    queue_name: str
    sequence: int

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose
        self.done = False
        self.possible_ns = 0


class LocalEvent(Dependency):
    """Event on this rank, on which posted operations can depend."""

    __slots__ = ()
    queue_name, sequence = "this rank", 0

    def happen(self) -> None:
        """Mark the event as happened. The caller then polls the engine to start operations that depend on it."""
        self.possible_ns = time.perf_counter_ns()
        self.done = True


class Ticket(Dependency):
    """An operation in a queue: waiting for its turn, in flight, or complete.

    Attributes:
        flight_number: number in the flight record; 0 without a record.
        late: handle of an operation that has not yet posted the messages to be noted in the flight record; otherwise None.
    """

    __slots__ = ("_after", "_start", "_turn_ns", "begun_ns", "flight_number", "handle", "late", "queue_name", "sequence")

    def __init__(
        self, start: Callable[[], Handle], purpose: str, after: Sequence[Dependency], queue_name: str, sequence: int
    ) -> None:
        super().__init__(purpose)
        self.queue_name = queue_name
        self.sequence = sequence
        self.begun_ns = 0  # begin of posting, if traced
        self.flight_number = 0
        self.handle: Handle | None = None
        self.late: LateHandle | None = None
        self._start: Callable[[], Handle] | None = start
        self._after = list(after)  # `ready` removes dependencies from the end as they complete
        self._turn_ns = 0

    def ready(self) -> bool:
        """Return whether all dependencies are complete."""
        after = self._after
        while after and after[-1].done:
            self._turn_ns = max(self._turn_ns, after.pop().possible_ns)
        return not after

    def turn_ns(self) -> int:
        """Return the earliest time at which all dependencies may have been complete. `ready` must have returned True."""
        return self._turn_ns

    def begin(self) -> None:
        """Start the operation. `ready` must have returned True; it released the dependencies, so that old tickets are freed."""
        assert self._start is not None, "an operation must be started once"
        start, self._start = self._start, None
        self.handle = start()

    def test(self) -> bool:
        """Drive the started operation and return whether it is complete. A complete operation releases its buffers."""
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
        name: name for messages and traces.
        window: maximum number of operations in flight; None: no limit.
        lock: lock that a thread must hold to call the transport.
        trace: tracer that records each operation from its posting to its completion, and the maximum delay of its posting after
            its turn.
        account: account of the time of posting; None: a separate account that is not used elsewhere.
        flight: flight recorder for each operation; None: no recording.
        world_ranks: world ranks of the communicator.
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
        self._free_ns = 0  # time since which the queue's head may start, if traced
        self._waiting: deque[Ticket] = deque()
        self._in_flight: list[Ticket] = []
        self._posted = 0
        self.starting = False

    def post(self, start: Callable[[], Handle], purpose: str, after: Sequence[Dependency] = ()) -> Ticket:
        """Queue an operation. It starts immediately if the queue's window, earlier operations and its dependencies permit.

        Args:
            start: function that posts the operation and returns its handle. It is called once all earlier operations of this
                queue have been started and all dependencies in `after` are complete. It may compute (for example a shard's
                update) and may post; it must not wait.
            purpose: name in messages and traces, usually the parameter's.
            after: operations of any queue, and events on this rank.
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
        """Whether no operation is waiting or in flight."""
        return not self._waiting and not self._in_flight

    def due(self) -> bool:
        """Return whether the queue has an operation in flight to test, or a head whose dependencies are complete."""
        return True if self._in_flight else bool(self._waiting) and self._waiting[0].ready()

    def unfinished(self) -> Sequence[Ticket]:
        """Return the operations in flight, then the waiting ones, each in order."""
        return (*self._in_flight, *self._waiting)

    def collect(self) -> None:
        """Test every operation in flight once, and remove those that are complete."""
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
        """Drive every operation in flight without completing any. A thread other than the owner's may call this."""
        for ticket in self._in_flight:
            if ticket.handle is not None:
                ticket.handle.test()

    def start_heads(self) -> None:
        """Start operations from the head of the queue while the window and their dependencies permit."""
        if self.starting:  # called by a `start` that posts; the outer call starts the new operation
            return
        waiting, flying = self._waiting, self._in_flight
        while waiting and (self.window is None or len(flying) < self.window) and waiting[0].ready():
            self.starting = True
            try:
                self._start(waiting.popleft())
            finally:
                self.starting = False

    def _start(self, ticket: Ticket) -> None:
        self._begin(ticket)
        if self._flight is not None:
            if hasattr(ticket.handle, "operation"):  # a LateHandle; `isinstance` with a protocol takes ten times as long
                ticket.late = cast(LateHandle, ticket.handle)
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

    def _record_posting(self, ticket: Ticket, late: LateHandle) -> None:
        """Note in the flight record the messages of a late operation, once it has posted them."""
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
        ticket.begun_ns = max(begun_ns, self._account.last_update_ns)  # a start that updates posts after the update
        ticket.possible_ns = self._free_ns = trace.clock_ns()

    def _record_end(self, ticket: Ticket) -> None:
        """Record the completion of an operation."""
        if self._flight is not None:
            self._flight.done(ticket.flight_number)
        if self._trace is not None:
            end_ns = self._trace.clock_ns()
            self._trace.add(Category.COMMUNICATION, ticket.purpose, ticket.begun_ns, end_ns, self.name, ticket.sequence)


# Maximum share of a deadline that one pass of a wait counts for; a longer pass means that the job was suspended.
_LONGEST_PASS = 0.1

_ALONE: AbstractContextManager[Any] = nullcontext()


class ProgressEngine:
    """Owner of posting queues, and the only place that waits.

    One thread of a process posts, polls and waits. A second thread (`start_thread`) drives operations in flight inside
    `computing`. Every call of the transport holds the engine's lock.

    Args:
        rank: rank of this process, for messages.
        deadline_seconds: maximum duration of one wait. When it has passed, the rank prints the awaited operation, all unfinished
            operations and the stacks of all threads, and calls `abort`.
        abort: function that ends the whole job with an exit code (`Communicator.abort` of the world).
        clock: clock in seconds.
        sleep: function that sleeps for a number of seconds.
        offer_core: function that yields the core to other processes.
        stream: destination of the report; default: stderr.
        trace: tracer for operations, waits, and the time of posting and tests; None: no trace.
        flight: flight recorder, whose records explain an exceeded deadline or the end of a process; None: no recording.

    Attributes:
        waited_seconds: total time of all waits so far, which is exposed communication.
        account: account of the time spent on messages.
        wait_policy: rules for polling, yielding and sleeping in waits.
        polls_between_operators: whether `operator_done` polls.
        notes: notes for the flight record.
    """

    def __init__(
        self,
        *,
        rank: int,
        deadline_seconds: float,
        abort: Callable[[int], None],
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        offer_core: Callable[[], None] = os.sched_yield,
        stream: TextIO | None = None,
        trace: Tracer | None = None,
        flight: FlightRecorder | None = None,
    ) -> None:
        self.rank = rank
        self.deadline_seconds = deadline_seconds
        self.waited_seconds = 0.0
        self.polls_between_operators = True
        self.wait_policy = WaitPolicy()
        self.trace, self.flight, self.notes = trace, flight, FlightNotes(flight)
        self.account = MessageAccount(trace)
        self._abort = abort
        self._clock = clock
        self._sleep = sleep
        self._offer_core = offer_core
        self._stream = stream
        self._queues: dict[Communicator, PostingQueue] = {}
        self._lock = threading.RLock()
        self._thread: ProgressThread | None = None

    def queue(self, comm: Communicator, window: int | None = None) -> PostingQueue:
        """Return the queue of `comm`. The first call creates it, with `window`."""
        if comm not in self._queues:
            same = sum(other.name == comm.name for other in self._queues)
            name = f"{comm.name} {same + 1}" if same else comm.name
            with self._lock:
                self._queues[comm] = PostingQueue(
                    name,
                    window,
                    lock=self._lock,
                    trace=self.trace,
                    account=self.account,
                    flight=self.flight,
                    world_ranks=comm.world_ranks,
                )
        return self._queues[comm]

    def communicators(self) -> dict[str, Communicator]:
        """Return the communicators by queue name, in the order of creation, which is the same on every rank."""
        return {queue.name: comm for comm, queue in self._queues.items()}

    @property
    def outstanding(self) -> int:
        """Number of operations in flight or waiting, over all queues."""
        return sum(len(queue.unfinished()) for queue in self._queues.values())

    def now(self) -> float:
        """Return the engine's clock in seconds."""
        return self._clock()

    def poll(self) -> None:
        """Make one pass over all queues without blocking: test operations in flight, then start operations that are ready."""
        if self._thread is not None:
            self._thread.raise_failure()
        self._advance()

    def _advance(self) -> None:
        queues = self._queues.values()
        with self._lock:
            if not any(map(PostingQueue.due, queues)):
                return
            self.account.begin()
            try:
                for queue in queues:
                    if queue._in_flight:
                        queue.collect()
                for queue in queues:
                    if queue._waiting:
                        queue.start_heads()
            finally:
                self.account.end()

    def operator_done(self) -> None:
        """Drive messages between two operators if `polls_between_operators` is set, and note that this rank is alive."""
        self.notes.alive()
        if self.polls_between_operators:
            self.poll()

    def set_mode(self, mode: ProgressMode) -> None:
        """Change the way in which messages advance while kernels run."""
        self.polls_between_operators = mode is not ProgressMode.NONE
        if mode is ProgressMode.THREAD:
            self.start_thread()
        else:
            self.stop_thread()

    def start_thread(self) -> None:
        """Start a second thread, which drives operations in flight inside `computing`.

        The transport must allow calls from several threads, one at a time.
        """
        if self._thread is None:
            self._thread = ProgressThread(self._pass_of_thread, self._lock)

    def stop_thread(self) -> None:
        """End the second thread, if any."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context for computations, during which the second thread, if any, may call the transport.

        The caller must not call the transport except through this engine.
        """
        return _ALONE if self._thread is None else self._thread

    def _pass_of_thread(self) -> None:
        for queue in tuple(self._queues.values()):
            queue.progress_once()

    def wait(self, tickets: Dependency | Iterable[Dependency]) -> None:
        """Drive all queues until these operations are complete.

        Events among them must have happened, since only the waiting thread could make them happen.
        """
        for ticket in (tickets,) if isinstance(tickets, Dependency) else tickets:
            if not ticket.done:
                assert isinstance(ticket, Ticket), f"a wait for the event {ticket.purpose!r} would never end"
                self._wait_one(ticket)

    def wait_handle(self, handle: Handle, purpose: str) -> None:
        """Drive all queues until an operation outside them is complete."""
        with self._alone(purpose):
            if handle.test():
                return
            begun_ns = self.trace.clock_ns() if self.trace is not None else 0
            awaited = f"{purpose}: outside the queues, operation {handle}"
            with self.notes.waiting(purpose, 0):
                self._drive(handle.test, awaited)
            if self.trace is not None:
                self.trace.add(Category.WAIT, purpose, begun_ns, self.trace.clock_ns(), "outside the queues")

    def drain(self) -> None:
        """Drive all queues until they are empty.

        Ranks need not call it together, but all of them must have posted the same operations.
        """
        for queue in self._queues.values():
            while unfinished := queue.unfinished():
                self.wait(unfinished[0])

    def _wait_one(self, ticket: Ticket) -> None:
        begun_ns = self.trace.clock_ns() if self.trace is not None else 0
        with self._alone(ticket):
            with self.notes.waiting(ticket.purpose, ticket.flight_number):
                self._drive(lambda: ticket.done, ticket)
            if self.trace is not None:
                self.trace.add(Category.WAIT, ticket.purpose, begun_ns, self.trace.clock_ns(), ticket.queue_name, ticket.sequence)

    @contextmanager
    def _alone(self, awaited: object) -> Iterator[None]:
        """Return a context in which the second thread drives no messages. Wait for its current pass, up to the deadline."""
        if not self._lock.acquire(blocking=False):
            begin = self._clock()
            if not self._lock.acquire(timeout=min(self.deadline_seconds, threading.TIMEOUT_MAX)):
                self._give_up(awaited)
            self.waited_seconds += self._clock() - begin
        try:
            if self._thread is not None:
                self._thread.raise_failure()
            yield
        finally:
            self._lock.release()

    def _drive(self, finished: Callable[[], bool], awaited: object) -> None:
        assert not any(queue.starting for queue in self._queues.values()), "the start of an operation must not wait"
        begin = last = self._clock()
        counted, longest = 0.0, self.deadline_seconds * _LONGEST_PASS
        self.account.begin_wait()
        try:
            while True:
                self.notes.alive()
                self._advance()
                if finished():
                    break
                now = self._clock()
                counted, last = counted + min(now - last, longest), now
                if counted > self.deadline_seconds:
                    self._give_up(awaited)
                if self.wait_policy.sleeps(now - begin):
                    self._sleep(self.wait_policy.next_sleep(now - begin))
                else:
                    self._offer_core()
        finally:
            self.account.end_wait()
        self.waited_seconds += self._clock() - begin

    def _give_up(self, awaited: object) -> NoReturn:
        """Print the awaited operation, all unfinished operations and all stacks, and end the job."""
        sentence = f"no completion within the deadline of {self.deadline_seconds:g} s: {awaited}"
        if self.flight is not None:
            self.flight.ended(End.DEADLINE, sentence)
        if self._stream is None:
            process_end.await_turn(self.rank, self.deadline_seconds)
        lines = [sentence, "unfinished on this rank:"]
        lines += [f"  {ticket}" for queue in self._queues.values() for ticket in queue.unfinished()]
        process_end.say_last_words(self.rank, [*lines, "stacks of all threads:"], self._stream)
        findings = explanation(None if self.flight is None else self.flight.directory)
        process_end.say_last_words(self.rank, findings, self._stream, stacks=False)
        self._abort(process_end.DEADLINE)
        raise CommunicationTimeoutError(sentence)  # only if `abort` returned
