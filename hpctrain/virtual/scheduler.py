"""Runs virtual ranks one at a time: a baton goes from thread to thread at calls of the communicator.

Who gets it is the policy's choice, so a run is a function of the program and the seed. A rank that only polls in vain is parked
until something of its own completes; when no rank can go on and nothing is pending, the run ends with a `DeadlockError`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from hpctrain_testing.virtual.operations import PostedOperation, Posting, RankState
from hpctrain_testing.virtual.scheduler import Policy
from hpctrain.virtual.rank import RankEnded, Status, source_line
from hpctrain.virtual.wait_graph import deadlock_of

#: Passes in vain after which a rank is parked.
_PASSES_BEFORE_PARKING = 2
#: Passes that every parked rank may still make, without anybody else running, before it counts as a deadlock: a rank may poll
#: between kernels, long before it posts what the others wait for.
_PATIENCE = 500


class Scheduler:
    """Hands the baton from rank to rank.

    Attributes: ranks: by number. policy: what decides. failure: the first error of the run. over: set when all have ended or one
    has failed.
    """

    def __init__(self, size: int, policy: Policy) -> None:
        self.ranks = [RankState(rank) for rank in range(size)]
        self.failure: BaseException | None = None
        self.over = threading.Event()
        self.policy = policy
        self._ready = list(self.ranks)
        self._tried_again = False  # since anything last happened
        for state in self.ranks:
            state.baton.acquire()

    # Of the thread that starts the run.

    def begin(self) -> None:
        """Give the baton to the first rank; all threads stand in `enter`."""
        first = self._choose()
        assert first is not None
        first.resume()

    def fail(self, failure: BaseException, state: RankState | None = None) -> None:
        """End the run because of what happened, on one rank where that is given. The first failure counts. From any thread."""
        if self.failure is None:
            self.failure = failure
            if state is not None:
                failure.add_note(f"raised on virtual rank {state.rank} of {len(self.ranks)}")
            for state in self.ranks:
                state.resume()
            self.over.set()

    # Of a rank's own thread.

    def enter(self, state: RankState) -> None:
        """Wait for the first turn."""
        state.thread = threading.get_ident()
        self._wait_for_turn(state)

    def leave(self, state: RankState) -> None:
        """The rank has ended; it does not come back."""
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
        """Add a posting to its operation. Another rank may run meanwhile."""
        self._check(state)
        posting.posted_seconds = state.clock_seconds
        operation.post(party, posting, self.policy.moments())
        self._progress(state)
        self._wake(self.policy.posted(operation, party))
        if self.policy.preempts():
            self._yield(state)

    def poll(self, state: RankState, posting: Posting) -> bool:
        """Whether `posting` is complete; where it is not, other ranks run first."""
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
        """Other ranks run until `posting` is complete."""
        self._check(state)
        while not self.policy.arrived(posting):
            state.stuck_on = (posting,)
            self._stop(state, Status.BLOCKED)
        self._progress(state)

    def now(self, state: RankState) -> float:
        """A rank's virtual time. A loop that only looks at it ends with the run."""
        self._check(state)
        return state.clock_seconds

    def compute(self, state: RankState, seconds: float) -> None:
        """Let virtual time pass for one rank."""
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
        """Stay ready, and let the policy choose."""
        state.status = Status.READY
        self._ready.append(state)
        self._hand_over(state)

    def _stop(self, state: RankState, status: Status) -> None:
        """Stay away until something of one's own completes."""
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
        """The next rank to run, made running; None where the run cannot go on."""
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
        """Owners of completed postings that stand still go on: one that polls, or one that waits for just this."""
        for posting in completed:
            state = posting.owner
            if state.status is Status.PARKED or (state.status is Status.BLOCKED and posting in state.stuck_on):
                state.moves_on()
                self._make_ready(state)

    def _try_again(self) -> bool:
        """Let every parked rank make many more passes; False where that has been in vain."""
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
