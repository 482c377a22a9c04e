"""The word of an MPI that goes on when a rank dies (ULFM, as Open MPI 5 has it), and the way out of what waits for that rank.

A rank that waits for a dead one gets an error. One that waits for a living rank, which has got such an error and has left its
work, would wait without end. So the first rank that learns of a loss revokes all its communicators, which makes operations on
them fail on all ranks; and ranks that share no other communicator with it see it at the world's, which all of them look at.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hpctrain.comm.base import Handle
from hpctrain.core.errors import RankLostError
from hpctrain.rank_spans import spans

# A poll takes a microsecond, and waits that last sleep for 50 between two: the look is at most some 10 ms late.
_POLLS_OF_A_LOOK = 256
_PAUSE_SECONDS = 1e-3
# The launcher's word of a death takes milliseconds, and longer where the machine is busy.
_KNOWN_AFTER_SECONDS = 5.0


class RevocableCommunicator(Protocol):
    """The part of an MPI communicator that is used here, as mpi4py names it."""

    def Get_failed(self) -> Any: ...

    def Get_group(self) -> Any: ...

    def Get_size(self) -> int: ...

    def Iprobe(self) -> bool: ...

    def Is_revoked(self) -> bool: ...

    def Revoke(self) -> None: ...


class LostRanks:
    """Knows all communicators that this process has made from one world, and the operations that it has in flight on them.

    Args:
        mpi: the module `mpi4py.MPI`. world: of all ranks.

    Attributes:
        error: the exception of MPI calls.
    """

    def __init__(self, mpi: Any, world: RevocableCommunicator) -> None:
        self.error: type[Exception] = mpi.Exception
        self._classes = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
        self._world = world
        self._communicators: list[RevocableCommunicator] = [world]
        self._in_flight: set[Handle] = set()
        self._polls = 0

    def made(self, communicator: RevocableCommunicator) -> None:
        """A communicator was made from the world, or from one of its parts."""
        self._communicators.append(communicator)

    def begun(self, handle: Handle) -> None:
        """An operation is in flight: its handle, which holds its buffers, is kept until it has ended."""
        self._in_flight.add(handle)

    def ended(self, handle: Handle) -> None:
        """It is in flight no more: it is complete, or has failed."""
        self._in_flight.discard(handle)

    def polled(self) -> None:
        """An operation was tested that has not ended. Now and then: whether another rank has learnt of a loss.

        Raises:
            RankLostError: it has.
        """
        self._polls += 1
        if self._polls % _POLLS_OF_A_LOOK == 0 and self._world.Is_revoked():
            self.revoke()
            raise RankLostError(self.sentence())

    def check(self, error: Exception, sleep: Callable[[float], None] = time.sleep) -> None:
        """Nothing, where an MPI call has failed for another reason than a lost rank, as far as MPI knows or soon will.

        Raises:
            RankLostError: that was the reason. All ranks that share a communicator with this one are told.
        """
        if error.Get_error_class() in self._classes or self._soon_known(sleep):  # type: ignore[attr-defined]
            self.revoke()
            raise RankLostError(self.sentence()) from error

    def _soon_known(self, sleep: Callable[[float], None]) -> bool:
        """Whether a loss comes to be known: messages to a rank that has just died fail with any error before that."""
        for _ in range(round(_KNOWN_AFTER_SECONDS / _PAUSE_SECONDS)):
            with contextlib.suppress(self.error):
                self._world.Iprobe()  # lets MPI take notice
            if self._world.Is_revoked() or self.lost():
                return True
            sleep(_PAUSE_SECONDS)
        return False

    def revoke(self) -> None:
        """Make all operations on all communicators fail, on every rank."""
        for communicator in self._communicators:
            if not communicator.Is_revoked():
                communicator.Revoke()

    def lost(self) -> tuple[int, ...]:
        """The ranks of the world that this process knows to be lost; others may know of more."""
        failed, group = self._world.Get_failed(), self._world.Get_group()
        try:
            return tuple(sorted(failed.Translate_ranks(list(range(failed.size)), group))) if failed.size else ()
        finally:
            failed.Free()
            group.Free()

    def sentence(self) -> str:
        """For a user: what is lost, as far as this process knows, and what to do."""
        return (
            f"{named(self.lost())} of {self._world.Get_size()} was lost, as the process has died or its node; start again with "
            "--resume, or set on_lost_rank to shrink to go on without lost ranks."
        )

    def settle(self, seconds: float, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Test what is in flight on revoked communicators until it has ended, so long at most; True once nothing is.

        Until then MPI may write into its buffers.
        """
        end = time.monotonic() + seconds
        while self._in_flight and time.monotonic() < end:
            for handle in tuple(self._in_flight):
                with contextlib.suppress(RankLostError):
                    handle.test()
            if self._in_flight:
                sleep(_PAUSE_SECONDS)
        return not self._in_flight

    def unsettled(self) -> Sequence[Handle]:
        """The operations that are still in flight."""
        return tuple(self._in_flight)


def named(ranks: Sequence[int]) -> str:
    """The subject of a sentence: `Rank 2`, `Ranks 1-2`; `A rank` where it is not known which."""
    if not ranks:
        return "A rank"
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {spans(ranks)}"


def translated(comm: RevocableCommunicator, world: RevocableCommunicator) -> tuple[int, ...]:
    """The ranks of `comm` in `world`, in its order. Not collective."""
    group, of_all = comm.Get_group(), world.Get_group()
    try:
        return tuple(group.Translate_ranks(list(range(group.size)), of_all))
    finally:
        group.Free()
        of_all.Free()
