"""The progress engine: posts operations in a fixed order, drives them all, and never waits without end.

One `ProgressEngine` per process owns one `PostingQueue` per communicator. Every wait drives all queues. If a wait drove only
one communicator, collectives of the split group and of the data group could deadlock each other; separate communicators do not
prevent this. The order within a queue is the order of `post`, never one of arrival, so that MPI matches collectives alike on
every rank.

`WaitPolicy` and `FurtherPolls` are the rules of how a wait waits and how often a program polls after an operator.

`ProgressThread` works on messages while kernels run. In mode `thread` a pass tests, and does nothing else: no operation begins,
completes or computes in it (one of two stages may come to its second), so no averager ever runs on it, and the process's own
thread sees a change only when it polls. In mode `posting` a pass is a poll: it completes finished operations and starts ready
ones, including their computations, in queue order.

`guard` is a deadline for phases without polls: MPI's start, a file opened on a network file system.
"""

from __future__ import annotations

import contextlib
import contextvars
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, TextIO

from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.posting_queue import MessageAccount, PostingQueue, Ticket
from hpctrain.core.errors import CommunicationTimeoutError
from hpctrain.flight.recorder import FlightNotes, FlightRecorder
from hpctrain.launch import keeper, process_end
from hpctrain.launch import process_end as exit_codes
from hpctrain.launch.process_end import End
from hpctrain.trace.tracer import Category, Tracer


@dataclass(frozen=True)
class WaitPolicy:
    """How a wait changes from polling to sleeping, in seconds.

    A wait polls, offering its core to others after each poll for `offering_seconds`: as quick as a spin where it has the core to
    itself. Later it sleeps for `sleep_seconds` between polls, so that a slow rank gets the core; or for `growing_share` of the
    time waited so far where that is longer, up to `longest_seconds`.
    """

    offering_seconds: float = 1e-3
    sleep_seconds: float = 50e-6
    growing_share: float = 0.0
    longest_seconds: float = 10e-3

    def sleeps(self, waited_seconds: float) -> bool:
        """Return whether a wait that has lasted `waited_seconds` sleeps before its next poll."""
        return waited_seconds > self.offering_seconds

    def next_sleep(self, waited_seconds: float) -> float:
        """Return the seconds that a wait which has lasted `waited_seconds` sleeps before its next poll."""
        return max(self.sleep_seconds, min(self.growing_share * waited_seconds, self.longest_seconds))


#: for ranks that share a core: one that polls takes it from the rank that it waits for
SLEEPS_AT_ONCE = WaitPolicy(offering_seconds=0.0)

#: for start-up with more ranks on a node than cores: polls every 50 us of 63 ranks leave little to the one that they wait for
MORE_RANKS_THAN_CORES = WaitPolicy(growing_share=0.02)


class FurtherPolls:
    """Further polls at the end of an operator, as long as they take no more than a share of the operator's time.

    A message that moves in many small pieces, as over TCP, moves by one piece for each look. A poll is expected to take as long
    as the one before; so an operator is followed by one poll at least, and by a second one only where it lasted `1 / share` times
    as long as both.

    Args:
        share: of an operator's time that all polls after it may take, 0 .. 1.
    """

    def __init__(self, share: float) -> None:
        assert 0 <= share <= 1
        self._share = share
        self._ended_seconds: float | None = None
        self._begin_seconds = self._latest_seconds = self._allowed_seconds = 0.0

    def begin(self, now: float) -> None:
        """Note that an operator has ended at this instant of any clock; the first poll begins."""
        operator_seconds = 0.0 if self._ended_seconds is None else now - self._ended_seconds
        self._allowed_seconds = self._share * operator_seconds
        self._begin_seconds = self._latest_seconds = now

    def another(self, now: float) -> bool:
        """Return whether one more poll may begin. The last one has ended at this instant."""
        poll_seconds, self._latest_seconds = now - self._latest_seconds, now
        return now - self._begin_seconds + poll_seconds <= self._allowed_seconds

    def end(self, now: float) -> None:
        """Note that the last poll has ended; the next operator begins."""
        self._ended_seconds = now


#: between two passes. Shorter ones take time from the kernels, longer ones leave the wire idle between a message's parts.
INTERVAL_SECONDS = 200e-6


class ProgressThread:
    """A thread that calls `one_pass` again and again inside of its `with` block, and never outside of it.

    A block does not nest. A pass runs in the context of its owner, such as the handling of floating-point errors there. After an
    exception the thread makes no more passes in that block; its owner gets it from `raise_failure`, or at the block's end.

    Args:
        one_pass: over all queues. lock: held during each pass; every other thread that talks to the transport holds it, too.
        interval_seconds: between two passes, unless somebody calls `wake`.

    Attributes:
        inside: the block is open; changed under the lock.
    """

    def __init__(
        self, one_pass: Callable[[], None], lock: AbstractContextManager[Any], interval_seconds: float = INTERVAL_SECONDS
    ) -> None:
        self._one_pass = one_pass
        self._lock = lock
        self._interval_seconds = interval_seconds
        self._open, self._called = threading.Event(), threading.Event()
        self.inside = False
        self._context = contextvars.copy_context()
        self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hpctrain-progress", daemon=True)
        self._thread.start()

    @property
    def identifier(self) -> int | None:
        """The thread's number, as `threading.get_ident` returns it."""
        return self._thread.ident

    def wake(self) -> None:
        """Make the next pass at once, if a block is open."""
        self._called.set()

    def raise_failure(self) -> None:
        """Raise here, once, what a pass has raised."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def __enter__(self) -> None:
        assert not self.inside, "the block of a progress thread does not nest"
        self._context = contextvars.copy_context()
        self.inside = True
        self._open.set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.clear()
        with self._lock:  # a pass under way ends first; the next one finds the block closed
            self.inside = False
        if error is None:
            self.raise_failure()

    def close(self) -> None:
        """End the thread; outside of the block."""
        assert not self.inside
        self._ended = True
        self._open.set()
        self._called.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._open.wait()
            if self._ended:
                return
            self._called.clear()  # a call from here on is for the pass after this one
            try:
                with self._lock:
                    if self.inside:
                        self._context.run(self._one_pass)
            except BaseException as failure:  # the block's owner gets it
                self._failure = failure
                self._open.clear()
            self._called.wait(self._interval_seconds)


#: exit code of a job that ended at a deadline (as of timeout(1))
TIMEOUT_EXIT_CODE = exit_codes.DEADLINE

# The share of a deadline that one look of a wait may take: what took longer was no look, as where a scheduler suspends a job.
_LONGEST_LOOK = 0.1

_ALONE: AbstractContextManager[Any] = nullcontext()


class ProgressEngine:
    """The owner of the posting queues of a process, and the only place that waits.

    One thread of a process posts, polls and waits. A second one, where `start_thread` made it, works inside of `computing` and
    while the first holds no lock; everything that talks to the transport here holds it. It lets what is in flight move, or, as a
    posting thread, does all that a poll does: then a poll of the first one inside of `computing` only wakes it. What it starts
    computes while the program does: nothing that a start reads or writes may be in use once its events have happened.

    Args:
        rank: this process's rank, for messages.
        deadline_seconds: the longest that one wait may take. Past it the rank prints what it waits for, all that is in flight
            and the stacks of all threads, and calls `abort`.
        abort: ends the whole job with an exit code (`Communicator.abort` of the world).
        clock, sleep: seconds since any start, and a sleep of a number of seconds. offer_core: to other processes.
        stream: where the report goes; stderr by default.
        trace: records operations, waits, and the time of posting and tests. flight: records all that happens, as it happens, so
            that it can be read when the process is gone; None: nothing does.
        make_thread: makes a second thread from what one pass of it does and the lock that a pass holds.

    Attributes:
        waited_seconds: all waits so far: communication that nothing hid. account: of the processor's time for messages.
        wait_policy: how waits poll, offer their core and sleep. further_polls: after operators; None: there is one after each.
        notes: for the flight record. explain: lines that are printed at a deadline, for what others did.
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
        make_thread: Callable[[Callable[[], None], AbstractContextManager[Any]], ProgressThread] = ProgressThread,
    ) -> None:
        self.rank = rank
        self.deadline_seconds = deadline_seconds
        self.waited_seconds = 0.0
        self.polls_between_operators = True
        self.further_polls: FurtherPolls | None = None
        self.wait_policy = WaitPolicy()
        self.trace, self.flight, self.notes = trace, flight, FlightNotes(flight)
        self.explain: Callable[[], Sequence[str]] = lambda: ()
        self.account = MessageAccount(trace)
        self._abort = abort
        self._clock = clock
        self._sleep = sleep
        self._offer_core = offer_core
        self._stream = stream
        self._queues: dict[Communicator, PostingQueue] = {}
        self._lock = threading.RLock()
        self._make_thread = make_thread
        self._thread: ProgressThread | None = None
        self._posts_beside = False

    def queue(self, comm: Communicator, window: int | None = None) -> PostingQueue:
        """Return the queue of `comm`: made at the first call (with `window`), the same one ever after."""
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
        """Return the communicator of each queue, by the queue's name, in the order of their making: the same on every rank."""
        return {queue.name: comm for comm, queue in self._queues.items()}

    @property
    def outstanding(self) -> int:
        """Operations that are in flight or wait, over all queues."""
        return sum(len(queue.unfinished()) for queue in self._queues.values())

    def now(self) -> float:
        """Return seconds on the engine's clock."""
        return self._clock()

    def poll(self) -> None:
        """Make one pass over all queues: test what is in flight, then start what may start. Never blocks.

        If a posting thread works, it is woken to make the pass.
        """
        if self._thread is not None:
            self._thread.raise_failure()
            if self._posts_beside and self._thread.inside:
                self._thread.wake()
                return
        self._advance()

    def _advance(self) -> None:
        queues = self._queues.values()
        if all(queue.idle for queue in queues):
            return
        with self._lock:
            self.account.begin()
            try:
                self._pass_over(queues)
            finally:
                self.account.end()

    def operator_done(self) -> None:
        """Let messages move between two operators, unless that is left to the transport."""
        self.notes.alive()
        if not self.polls_between_operators:
            return
        policy = self.further_polls
        if policy is None:
            self.poll()
            return
        policy.begin(self._clock())
        self.poll()
        while policy.another(self._clock()) and any(queue.in_flight for queue in self._queues.values()):
            self.poll()
        policy.end(self._clock())

    def start_thread(self, *, posts: bool = False) -> None:
        """Let a thread work inside `computing` from now on.

        The transport must allow calls from several threads, one at a time.

        Args:
            posts: it completes and starts operations, too.
        """
        if self._thread is None:
            self._thread = self._make_thread(self._pass_of_thread, self._lock)
            self.account.second_thread(self._thread.identifier)
        self._posts_beside = posts

    def stop_thread(self) -> None:
        """End that thread, if any."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
            self.account.second_thread(None)

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context in which this process reaches the transport through this engine only, so a thread may drive it."""
        return _ALONE if self._thread is None else self._thread

    def _pass_of_thread(self) -> None:
        queues = tuple(self._queues.values())
        begun = sum(queue.begun for queue in queues)
        self.account.begin()
        try:
            if self._posts_beside:
                self._pass_over(queues)
            else:
                for queue in queues:
                    queue.progress_once()
        finally:
            self.account.end(recorded=sum(queue.begun for queue in queues) > begun)

    @staticmethod
    def _pass_over(queues: Collection[PostingQueue]) -> None:
        for queue in queues:
            if not queue.idle:
                queue.collect()
        for queue in queues:
            if not queue.idle:
                queue.start_heads()

    def wait(self, tickets: Ticket | Iterable[Ticket]) -> None:
        """Drive all queues until these operations are complete."""
        for ticket in (tickets,) if isinstance(tickets, Ticket) else tickets:
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
        """Drive all queues until they are empty. Every rank has posted the same, so every rank may call it."""
        for queue in self._queues.values():
            while unfinished := queue.unfinished():
                self.wait(unfinished[0])

    def _wait_one(self, ticket: Ticket) -> None:
        if ticket.done:
            return
        begun_ns = self.trace.clock_ns() if self.trace is not None else 0
        with self._alone(ticket):
            with self.notes.waiting(ticket.purpose, ticket.flight_number):
                self._drive(lambda: ticket.done, ticket)
            if self.trace is not None:
                self.trace.add(Category.WAIT, ticket.purpose, begun_ns, self.trace.clock_ns(), ticket.queue_name, ticket.sequence)

    @contextmanager
    def _alone(self, awaited: object) -> Iterator[None]:
        """Keep other threads from working on messages. A pass under way ends first, for which the deadline holds, too."""
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
        assert not any(queue.starting for queue in self._queues.values()), "a start must not wait"
        begin = last = self._clock()
        counted, longest = 0.0, self.deadline_seconds * _LONGEST_LOOK
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
        """Print rank, operation, parameter and sequence number, everything unfinished and all stacks; end the job."""
        sentence = f"no completion within the deadline of {self.deadline_seconds:g} s: {awaited}"
        if self.flight is not None:
            self.flight.ended(End.DEADLINE, sentence)
        if self._stream is None:
            process_end.await_turn(self.rank, self.deadline_seconds)
        lines = [sentence, "unfinished on this rank:"]
        lines += [f"  {ticket}" for queue in self._queues.values() for ticket in queue.unfinished()]
        process_end.say_last_words(self.rank, [*lines, "stacks of all threads:"], self._stream)
        process_end.say_last_words(self.rank, self.explain(), self._stream, stacks=False)
        self._abort(TIMEOUT_EXIT_CODE)
        raise CommunicationTimeoutError(sentence)  # only where `abort` came back


# A phase that holds the interpreter lock stops the thread that prints. Then faulthandler, which needs no lock, ends the process.
_BACKSTOP_SECONDS = 2.0


@contextlib.contextmanager
def guard(phase: str, deadline_seconds: float, *, rank: int | None = None) -> Iterator[None]:
    """End this process if the block takes longer than the deadline; the launcher then ends the job.

    Prints rank, phase and all stacks on stderr. The exit code is 124. If the phase holds the interpreter lock, the process itself
    leaves with 1, which its keeper, if any, turns into 124. Do not nest: a process has one such timer.
    """
    assert sys.__stderr__ is not None
    timer = threading.Timer(deadline_seconds, _give_up, (phase, deadline_seconds, rank))
    timer.daemon = True
    backstop = deadline_seconds + process_end.turn_seconds(rank or 0, deadline_seconds) + _BACKSTOP_SECONDS
    faulthandler.dump_traceback_later(backstop, exit=True, file=sys.__stderr__)
    keeper.current_keeper().pulse.guard(True)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        keeper.current_keeper().pulse.guard(False)
        faulthandler.cancel_dump_traceback_later()


def _give_up(phase: str, deadline_seconds: float, rank: int | None) -> None:
    process_end.await_turn(rank, deadline_seconds)
    process_end.say_last_words(
        rank, [f"{phase} did not end within the deadline of {deadline_seconds:g} s; stacks of all threads:"]
    )
    os._exit(TIMEOUT_EXIT_CODE)
