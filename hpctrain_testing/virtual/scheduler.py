"""Run virtual ranks one at a time: a baton is passed from thread to thread at calls of the communicator.

A policy chooses the next rank, so a run is a function of the program and the seed. A policy decides only what MPI leaves open:
which rank runs next, and when the data of an operation moves: at once, at the worst moment, or by a modelled clock. Matching
(collectives by posting order, messages of one source and tag in their order) precedes it.

A rank that only polls without success is parked until one of its operations completes. When no rank can continue and nothing is
pending, the run ends with a `DeadlockError`, whose message has the position, the operation and the partners of every waiting
rank.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from hpctrain.comm.link import LinkModel
from hpctrain.core.errors import DeadlockError
from hpctrain_testing.virtual.operations import (
    Message,
    Moments,
    PostedOperation,
    Posting,
    RankEnded,
    RankState,
    SourceLine,
    Status,
    source_line,
)

_MOST_POSTINGS = 4


def deadlock_of(ranks: Sequence[RankState]) -> DeadlockError:
    """Return the error for a run in which no rank can continue."""
    return DeadlockError(f"Deadlock of {len(ranks)} virtual ranks, none of which can continue:\n{describe_ranks(ranks)}")


def describe_ranks(ranks: Sequence[RankState]) -> str:
    """Return one line per rank."""
    return "\n".join(f"  rank {state.rank} {_describe(state)}" for state in ranks)


def _absent(posting: Posting) -> list[int]:
    return [] if posting.operation is None else posting.operation.absent()


def _describe(state: RankState) -> str:
    if state.status is Status.ENDED:
        return "has ended"
    if state.status in (Status.READY, Status.RUNNING):
        return f"is at {_current_line(state)}"
    pending = [posting for posting in state.stuck_on if not posting.complete]
    waits = [f"{posting}; {_who_is_absent(posting)}" for posting in pending[:_MOST_POSTINGS]]
    if len(pending) > _MOST_POSTINGS:
        waits.append(f"and {len(pending) - _MOST_POSTINGS} more")
    return f"waits at {state.line} for " + " | ".join(waits)


def _who_is_absent(posting: Posting) -> str:
    absent = _absent(posting)
    if not absent:
        return "posted by all"
    return f"not posted by rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"


def _current_line(state: RankState) -> SourceLine | str:
    frame = None if state.thread is None else sys._current_frames().get(state.thread)
    return "an unknown line" if frame is None else source_line(frame)


class Prompt:
    """Policy under which operations complete as soon as all parties have posted, and ranks take turns.

    Its methods are the choices that MPI leaves open; other policies choose otherwise. Only the running rank calls them.
    """

    def moments(self) -> Moments:
        """Return the moments at which the buffers of the next posting are accessed."""
        return Moments()

    def synchronous(self) -> bool:
        """Return whether the root of the next message or broadcast waits for the other parties."""
        return True

    def posted(self, operation: PostedOperation, party: int) -> Sequence[Posting]:
        """Record that a party has posted. Return the postings that this completes."""
        return [operation.deliver(p) for p in range(len(operation.members))] if operation.may_move() else []

    def preempts(self) -> bool:
        """Return whether another rank may run after a posting."""
        return False

    def arrived(self, posting: Posting) -> bool:
        """Return whether the owner's test finds a posting complete."""
        return posting.complete

    def stir(self) -> Sequence[Posting]:
        """Optionally complete something before another rank runs. Return the completed postings."""
        return ()

    def choose(self, ready: Sequence[RankState], ranks: Sequence[RankState]) -> RankState | None:
        """Return the next rank to run; None if no rank can run before something completes."""
        return ready[0] if ready else None

    def settle(self) -> Sequence[Posting] | None:
        """Complete something pending, as no rank can run. Return the completed postings; None if nothing is pending."""
        return None


class Adversary(Prompt):
    """Policy that delays and reorders everything that MPI may, by a seeded generator. The same seed yields the same run.

    Data moves at any time between the last necessary posting and completion. Operations complete in any order, and some only when
    nothing else can happen. A message may or may not wait for its receive. Ranks are interrupted at postings, and some are slow.
    The frequencies are drawn once per seed, so that runs with different seeds differ in kind.
    """

    def __init__(self, seed: int, size: int) -> None:
        self._random = random.Random(seed)
        draw = self._random.choice
        self._stir = draw((0.05, 0.3, 0.9))
        self._preempt = draw((0.0, 0.1, 0.5))
        self._eager = draw((0.0, 0.5, 1.0))
        self._late = draw((0.0, 0.1, 0.5))
        self._oldest_last = draw((False, True))
        self._speeds = [draw((1.0, 0.3, 0.05)) for _ in range(size)]
        self._pending: list[tuple[PostedOperation, int | None]] = []  # completions of parties, or (None) movements of data
        self._starved: list[tuple[PostedOperation, int | None]] = []  # the same, done only when nothing else can happen

    def moments(self) -> Moments:
        draw = self._random.random
        return Moments(read_early=draw() < 0.4, write_early=draw() < 0.4, scramble=draw() < 0.8)

    def synchronous(self) -> bool:
        return self._random.random() >= self._eager

    def posted(self, operation: PostedOperation, party: int) -> Sequence[Posting]:
        if operation.moved:
            self._add(operation, party)
        elif operation.may_move() and not operation.announced:
            operation.announced = True
            self._add(operation, None)
        return ()

    def preempts(self) -> bool:
        return self._random.random() < self._preempt

    def stir(self) -> Sequence[Posting]:
        completed: list[Posting] = []
        while self._pending and self._random.random() < self._stir:
            completed += self._happen(self._pending)
        return completed

    def choose(self, ready: Sequence[RankState], ranks: Sequence[RankState]) -> RankState | None:
        if not ready:
            return None
        for _ in range(3):  # a slow rank is usually skipped, but not forever
            rank = ready[int(self._random.random() * len(ready))]  # five times as fast as `randrange`
            if self._random.random() < self._speeds[rank.rank]:
                break
        return rank

    def settle(self) -> Sequence[Posting] | None:
        if self._pending or not self._starved:
            return self._happen(self._pending) if self._pending else None
        if self._oldest_last:
            return self._let(*self._starved.pop())
        return self._happen(self._starved)

    def _add(self, operation: PostedOperation, party: int | None) -> None:
        (self._starved if self._random.random() < self._late else self._pending).append((operation, party))

    def _happen(self, events: list[tuple[PostedOperation, int | None]]) -> list[Posting]:
        index = self._random.randrange(len(events))
        events[index], events[-1] = events[-1], events[index]
        return self._let(*events.pop())

    def _let(self, operation: PostedOperation, party: int | None) -> list[Posting]:
        if party is not None:
            return [operation.deliver(party)]
        operation.move()
        for other, posting in enumerate(operation.postings):
            if posting is not None:
                self._add(operation, other)
        return []


class Clocked(Prompt):
    """Policy with a modelled clock: every operation has a duration, and every rank one full-duplex link that serves in order.

    A transfer starts when all its ranks have posted it and their links are free. It occupies these links for its modelled time.
    The rank with the earliest clock runs next, so the run follows from the model alone; `seed` only decides when buffers are
    accessed (None: when the operation is matched).
    """

    def __init__(self, link: LinkModel, size: int, seed: int | None) -> None:
        self._link = link
        self._sending_until = [0.0] * size
        self._receiving_until = [0.0] * size
        self._random = None if seed is None else random.Random(seed)

    def moments(self) -> Moments:
        if self._random is None:
            return Moments()
        draw = self._random.random
        return Moments(read_early=draw() < 0.4, write_early=draw() < 0.4, scramble=draw() < 0.8)

    def posted(self, operation: PostedOperation, party: int) -> Sequence[Posting]:
        if operation.missing:
            return ()
        end_seconds = self._transfer(operation)
        for posting in operation.postings:
            assert posting is not None
            posting.end_seconds = end_seconds
            heappush(posting.owner.wake_seconds, end_seconds)
        if self._random is None:
            operation.move()
        return ()

    def arrived(self, posting: Posting) -> bool:
        due = posting.end_seconds is not None and posting.end_seconds <= posting.owner.clock_seconds
        if due and not posting.complete:
            assert posting.operation is not None
            posting.operation.deliver(posting.operation.postings.index(posting))
        return posting.complete

    def choose(self, ready: Sequence[RankState], ranks: Sequence[RankState]) -> RankState | None:
        candidates = [(state.clock_seconds, state.rank) for state in ready]
        for state in ranks:
            if state.status in (Status.PARKED, Status.BLOCKED) and state.wake_seconds:
                candidates.append((max(state.clock_seconds, state.wake_seconds[0]), state.rank))
        if not candidates:
            return None
        now, rank = min(candidates)
        chosen = ranks[rank]
        chosen.clock_seconds = now
        if chosen.status is not Status.READY:
            chosen.moves_on()
            while chosen.wake_seconds and chosen.wake_seconds[0] <= now:
                heappop(chosen.wake_seconds)
        return chosen

    def _transfer(self, operation: PostedOperation) -> float:
        """Reserve the links; return the time at which the transfer ends."""
        start = max(posting.posted_seconds for posting in operation.postings if posting is not None)
        members = [member.rank for member in operation.members]
        seconds = operation.seconds(self._link)
        if not seconds:
            return start
        message = isinstance(operation, Message)
        senders, receivers = (members[:1], members[1:]) if message else (members, members)
        start = max([start, *(self._sending_until[r] for r in senders), *(self._receiving_until[r] for r in receivers)])
        for rank in senders:
            self._sending_until[rank] = start + seconds
        for rank in receivers:
            self._receiving_until[rank] = start + seconds
        return start + seconds


#: number of passes without success after which a rank is parked
_PASSES_BEFORE_PARKING = 2
#: number of further passes of every parked rank, with no other rank running, before this is a deadlock: a rank may poll between
#: kernels, long before it posts an operation that others wait for
_PATIENCE = 500


class Scheduler:
    """Scheduler that passes the baton from rank to rank.

    Attributes:
        ranks: states of the ranks, by number.
        policy: policy that makes the choices.
        failure: first error of the run; None if there is none.
        over: event that is set when all ranks have ended or one has failed.
    """

    def __init__(self, size: int, policy: Prompt) -> None:
        self.ranks = [RankState(rank) for rank in range(size)]
        self.failure: BaseException | None = None
        self.over = threading.Event()
        self.policy = policy
        self._ready = list(self.ranks)
        self._tried_again = False  # whether `_try_again` has run since the last progress
        for state in self.ranks:
            state.baton.acquire()

    # Called by the thread that starts the run.

    def begin(self) -> None:
        """Give the baton to the first rank. All threads must be waiting in `enter`."""
        first = self._choose()
        assert first is not None
        first.resume()

    def fail(self, failure: BaseException, state: RankState | None = None) -> None:
        """End the run because of a failure, on one rank if `state` is passed. May be called by any thread.

        Only the first failure is kept.
        """
        if self.failure is None:
            self.failure = failure
            if state is not None:
                failure.add_note(f"raised on virtual rank {state.rank} of {len(self.ranks)}")
            for state in self.ranks:
                state.resume()
            self.over.set()

    # Called by a rank's own thread.

    def enter(self, state: RankState) -> None:
        """Wait for the first turn."""
        state.thread = threading.get_ident()
        self._wait_for_turn(state)

    def leave(self, state: RankState) -> None:
        """Record that a rank has ended."""
        if self.failure is not None:
            return
        state.status = Status.ENDED
        self._tried_again = False
        if all(other.status is Status.ENDED for other in self.ranks):
            self.over.set()
            return
        chosen = self._choose()
        if chosen is None:
            self.fail(deadlock_of(self.ranks))
        else:
            chosen.resume()

    def post(self, state: RankState, operation: PostedOperation, party: int, posting: Posting) -> None:
        """Add a posting to its operation. Another rank may run before this returns."""
        self._check(state)
        posting.posted_seconds = state.clock_seconds
        operation.post(party, posting, self.policy.moments())
        self._progress(state)
        self._wake(self.policy.posted(operation, party))
        if self.policy.preempts():
            self._yield(state)

    def poll(self, state: RankState, posting: Posting) -> bool:
        """Return whether `posting` is complete; if it is not, other ranks run first."""
        self._check(state)
        if not self.policy.arrived(posting):
            state.polls_in_vain(posting)
            if state.passes < 0:
                return False
            if state.passes < _PASSES_BEFORE_PARKING:
                self._yield(state)
            else:
                self._stop(state, Status.PARKED)
            if not self.policy.arrived(posting):
                return False
        self._progress(state)
        return True

    def wait(self, state: RankState, posting: Posting) -> None:
        """Let other ranks run until `posting` is complete."""
        self._check(state)
        while not self.policy.arrived(posting):
            state.stuck_on = (posting,)
            self._stop(state, Status.BLOCKED)
        self._progress(state)

    def now(self, state: RankState) -> float:
        """Return the virtual time of a rank. A loop that only reads the time ends with the run."""
        self._check(state)
        return state.clock_seconds

    def compute(self, state: RankState, seconds: float) -> None:
        """Advance the virtual time of one rank."""
        self._check(state)
        state.clock_seconds += seconds
        self._progress(state)
        self._yield(state)

    def _check(self, state: RankState) -> None:
        if self.failure is not None:
            raise RankEnded
        assert state.thread == threading.get_ident(), f"virtual rank {state.rank} communicates from a thread that is not its own"

    def _progress(self, state: RankState) -> None:
        state.moves_on()
        self._tried_again = False

    def _yield(self, state: RankState) -> None:
        """Stay ready to run, and let the policy choose the next rank."""
        state.status = Status.READY
        self._ready.append(state)
        self._hand_over(state)

    def _stop(self, state: RankState, status: Status) -> None:
        """Let other ranks run until an operation of this rank completes."""
        state.status = status
        state.line = source_line()
        self._hand_over(state)

    def _hand_over(self, state: RankState) -> None:
        chosen = self._choose()
        if chosen is None:
            if self.failure is not None:
                raise RankEnded
            deadlock = deadlock_of(self.ranks)
            self.fail(deadlock)
            raise deadlock
        if chosen is not state:
            chosen.resume()
            self._wait_for_turn(state)

    def _wait_for_turn(self, state: RankState) -> None:
        state.baton.acquire()
        if self.failure is not None:
            raise RankEnded

    def _choose(self) -> RankState | None:
        """Return the next rank to run, marked as running; None if the run cannot continue."""
        while self.failure is None:
            self._wake(self.policy.stir())
            chosen = self.policy.choose(self._ready, self.ranks)
            if chosen is not None:
                if chosen.status is Status.READY:
                    self._ready.remove(chosen)
                chosen.status = Status.RUNNING
                return chosen
            completed = self.policy.settle()
            if completed is not None:
                self._wake(completed)
            elif not self._try_again():
                return None
        return None

    def _wake(self, completed: Iterable[Posting]) -> None:
        """Make the owners of completed postings ready if they poll or wait for one of these postings."""
        for posting in completed:
            state = posting.owner
            if state.status is Status.PARKED or (state.status is Status.BLOCKED and posting in state.stuck_on):
                state.moves_on()
                self._make_ready(state)

    def _try_again(self) -> bool:
        """Let every parked rank make further passes; return False if they have already been without success."""
        parked = [state for state in self.ranks if state.status is Status.PARKED]
        if not parked or self._tried_again:
            return False
        self._tried_again = True
        for state in parked:
            state.moves_on()
            state.passes = -_PATIENCE
            self._make_ready(state)
        return True

    def _make_ready(self, state: RankState) -> None:
        state.status = Status.READY
        self._ready.append(state)
