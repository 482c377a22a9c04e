"""The progress engine: posts operations in a fixed order, drives them all, and never waits without end.

One `ProgressEngine` per process owns one `PostingQueue` per communicator. Every wait drives all queues: a collective of the split
group that waits beside one of the data group which nobody drives is a deadlock that separate communicators do not cure. The order
within a queue is the order of `post`, never one of arrival, so that MPI matches collectives alike on every rank.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, TextIO

from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.message_account import MessageAccount
from hpctrain.comm.poll_policy import FurtherPolls, WaitPolicy
from hpctrain.comm.posting_queue import PostingQueue
from hpctrain.comm.posting_queue import Ticket
from hpctrain.comm.progress_thread import ProgressThread
from hpctrain.core.errors import CommunicationTimeoutError
from hpctrain.flight.notes import FlightNotes
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.launch.exit_codes import End
from hpctrain.launch import exit_codes, process_end
from hpctrain.trace.tracer import Category, Tracer

#: exit code of a job that ended at a deadline (as of timeout(1))
TIMEOUT_EXIT_CODE = exit_codes.DEADLINE

# The share of a deadline that one look of a wait may take: what took longer was no look, as where a scheduler suspends a job.
_LONGEST_LOOK = 0.1

_ALONE: AbstractContextManager[Any] = nullcontext()


class ProgressEngine:
    """Owns the posting queues of a process; the only place that waits.

    One thread of a process posts, polls and waits. A second one, where `start_thread` made it, works inside of `computing` and
    while the first holds no lock; everything that talks to the transport here holds it. It lets what is in flight move, or, as a
    posting thread, does all that a poll does: then a poll of the first one inside of `computing` only wakes it. What it starts
    computes beside the program: nothing that a start reads or writes may be in use once its events have happened.

    Args:
        rank: this process's rank, for messages.
        deadline_seconds: the longest that one wait may take. Past it the rank prints what it waits for, all that is in flight
            and the stacks of all threads, and calls `abort`.
        abort: ends the whole job with an exit code (`Communicator.abort` of the world).
        clock, sleep: seconds since any start, and a sleep of so many seconds. offer_core: to whatever else wants to run.
        stream: where the report goes; stderr by default.
        trace: records operations, waits, and what posting and tests take beside them. flight: is told of all that happens, as it
            does, so that it can be read where the process is gone; None: nobody is.
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
        """The queue of `comm`: made at the first call (with `window`), the same one ever after."""
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
        """The communicator of each queue, by the queue's name, in the order in which they were made: the same on every rank."""
        return {queue.name: comm for comm, queue in self._queues.items()}

    @property
    def outstanding(self) -> int:
        """Operations that are in flight or wait, over all queues."""
        return sum(len(queue.unfinished()) for queue in self._queues.values())

    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self._clock()

    def poll(self) -> None:
        """One pass over all queues: test what is in flight, then start what may start. Never blocks.

        Where a posting thread works, it is told to make the pass.
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
        """Between two operators: let messages move, unless that is left to the transport."""
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
        """From now on a thread works inside `computing`. The transport must allow calls from several threads, one at a time.

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
        """While this lasts, this process reaches the transport through this engine only, so a thread may drive it as well."""
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
        """While this lasts no other thread works on messages. A pass under way ends first, for which the deadline holds, too."""
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
        process_end.say(self.rank, [*lines, "stacks of all threads:"], self._stream)
        process_end.say(self.rank, self.explain(), self._stream, stacks=False)
        self._abort(TIMEOUT_EXIT_CODE)
        raise CommunicationTimeoutError(sentence)  # only where `abort` came back
