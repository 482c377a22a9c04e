"""Operations among virtual ranks: who has posted, what must agree, what is moved. No time and no threads.

An operation is a collective or one message. Its parties post; when enough have posted its data may *move* (all contributions are
taken), and then be *delivered* to each party by itself. MPI lets buffers be read and written at any time between posting and
completion, so the moments are the caller's choice.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpctrain.comm.link import LinkModel
from hpctrain.core.errors import CollectiveMismatchError
from hpctrain.virtual.rank import SourceLine, Status

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Moments:
    """When the buffers of one posting are touched.

    Attributes:
        read_early: the contribution is taken at posting; else when the data moves.
        write_early: the result is written when the data moves; else at completion.
        scramble: meanwhile the buffer that is written to holds garbage (NaN where it can), as a transport may leave it.
    """

    read_early: bool = False
    write_early: bool = True
    scramble: bool = False


@dataclass(slots=True, eq=False)
class RankState:
    """One virtual rank as the scheduler sees it: whether it may run, its clock, and what it waits for.

    Attributes:
        baton: released by the rank that hands over to this one; the rank itself acquires it.
        clock_seconds: this rank's virtual time. wake_seconds: heap of completion times that it may be waiting for.
        polled: what it has tested in vain in this pass over its handles. stuck_on: the same of the last whole pass.
        passes: how many whole passes were in vain since something last happened to this rank.
        line: where it stood when it stopped. thread: identity of its thread.
    """

    rank: int
    status: Status = Status.READY
    baton: threading.Lock = field(default_factory=threading.Lock)
    clock_seconds: float = 0.0
    wake_seconds: list[float] = field(default_factory=list)
    polled: dict[Posting, None] = field(default_factory=dict)
    stuck_on: tuple[Posting, ...] = ()
    passes: int = 0
    line: SourceLine | None = None
    thread: int | None = None

    def resume(self) -> None:
        """Give this rank the baton."""
        with suppress(RuntimeError):  # a failure elsewhere has just released everyone
            self.baton.release()

    def polls_in_vain(self, posting: Posting) -> None:
        """Count a test that found nothing."""
        if posting in self.polled:
            self.passes += 1
            self.stuck_on = tuple(self.polled)
            self.polled = {}
        self.polled[posting] = None

    def moves_on(self) -> None:
        """Something happened to this rank: what it polls is worth polling again."""
        self.passes = 0
        self.polled.clear()


@dataclass(slots=True, eq=False)
class Posting:
    """One rank's part in an operation.

    Attributes:
        kind: the method's name. owner: the rank. text: sizes and peers, for messages. line: where it was posted.
        agreed: what every party must have alike. contribution: read. target: written; both 1-D views of the caller's buffers.
        send_counts, recv_counts: elements per party.
        complete: the owner may know. end_seconds: the virtual time of completion, once known.
    """

    kind: str
    owner: RankState
    text: str
    line: SourceLine
    agreed: tuple[object, ...] = ()
    contribution: Array | None = None
    target: Array | None = None
    send_counts: tuple[int, ...] = ()
    recv_counts: tuple[int, ...] = ()
    moments: Moments = field(default_factory=Moments)
    taken: Array | None = None
    written: bool = False
    posted_seconds: float = 0.0
    operation: PostedOperation | None = None
    complete: bool = False
    end_seconds: float | None = None

    def take(self) -> None:
        """Read the contribution, unless that has been done."""
        if self.taken is None and self.contribution is not None:
            self.taken = self.contribution.copy()

    def scramble(self) -> None:
        """Fill the buffer to be written with garbage; what is still to be read of it stays."""
        if self.target is None or not self.target.size:
            return
        unread = self.contribution if self.taken is None else None
        kept = unread.copy() if unread is not None and np.may_share_memory(unread, self.target) else None
        if self.target.dtype.kind == "f":
            self.target.fill(np.nan)
        else:
            self.target.view(np.uint8).fill(0xA5)
        if unread is not None and kept is not None:
            unread[...] = kept

    def __str__(self) -> str:
        where = "" if self.operation is None else f" {self.operation.label}"
        return f"{self.kind}{where} ({self.text}), posted at {self.line}"


class PostedOperation(ABC):
    """A collective or a message among `members`.

    Args:
        members: the parties, in order. label: "3 on world", or "on world". root: the party whose data all need, if there is one.
        synchronous: the root completes only when every party has posted. Without it a root may run ahead, as MPI allows.
    """

    def __init__(self, members: Sequence[RankState], label: str, *, root: int | None = None, synchronous: bool = True) -> None:
        self.members = members
        self.label = label
        self.root = root
        self.synchronous = synchronous or root is None
        self.postings: list[Posting | None] = [None] * len(members)
        self.missing = len(members)
        self.moved = False
        self.announced = False  # to the policy, which chooses the moment of moving

    def post(self, party: int, posting: Posting, moments: Moments) -> None:
        """Add one party.

        Raises:
            CollectiveMismatchError: it does not fit what another party has posted.
        """
        assert self.postings[party] is None
        posting.operation, posting.moments = self, moments
        for other in self.postings:
            if other is not None and not self.fits(other, posting):
                raise CollectiveMismatchError(self._mismatch(other, posting))
        self.postings[party] = posting
        self.missing -= 1
        if moments.read_early:
            posting.take()
        if moments.scramble:
            posting.scramble()

    def fits(self, first: Posting, second: Posting) -> bool:
        """Whether two postings may belong to one operation."""
        return first.kind == second.kind and first.agreed == second.agreed

    def may_move(self) -> bool:
        """Whether the data is there and has not moved yet."""
        root_is_there = self.root is not None and self.postings[self.root] is not None
        return not self.moved and (self.missing == 0 or (root_is_there and not self.synchronous))

    def move(self) -> None:
        """Take all contributions; write the results that are written early."""
        assert self.may_move()
        self.moved = True
        posted = [(party, posting) for party, posting in enumerate(self.postings) if posting is not None]
        for _, posting in posted:
            posting.take()
        for party, posting in posted:
            if posting.moments.write_early:
                self._write(party, posting)
            elif posting.moments.scramble:
                posting.scramble()

    def deliver(self, party: int) -> Posting:
        """Complete one party's posting; moves the data first where that has not been done."""
        if not self.moved:
            self.move()
        posting = self.postings[party]
        assert posting is not None
        assert not posting.complete
        if not posting.written:
            self._write(party, posting)
        posting.complete = True
        return posting

    def absent(self) -> list[int]:
        """World ranks of the parties that have not posted, as far as they hold it up."""
        parties = range(len(self.members)) if self.synchronous or self.root is None else (self.root,)
        return [self.members[party].rank for party in parties if self.postings[party] is None]

    def parts(self) -> list[Array]:
        """The contributions taken, in party order."""
        return [posting.taken for posting in self.postings if posting is not None and posting.taken is not None]

    @abstractmethod
    def result(self, party: int) -> Array | None:
        """The array that this party receives."""

    @abstractmethod
    def seconds(self, link: LinkModel) -> float:
        """The modelled time, once all have posted."""

    def _write(self, party: int, posting: Posting) -> None:
        result = self.result(party)
        if result is not None and posting.target is not None:
            posting.target[...] = result
        posting.written = True

    def _mismatch(self, first: Posting, second: Posting) -> str:
        postings = sorted((first, second), key=lambda posting: posting.owner.rank)
        both = ", but ".join(f"rank {p.owner.rank} posted {p.kind} of {p.text} at {p.line}" for p in postings)
        rule = "every rank of a communicator must post the same collectives in the same order."
        return f"Collective {self.label} does not match: {both}; {rule}"
