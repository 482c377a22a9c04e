"""Operations between virtual ranks: postings, their consistency, the movement of data, and the modelled duration.

Nothing here advances time or runs threads. An operation is a collective or a message. Its parties post it. Once enough have
posted, its data may *move* (all contributions are read), and then be *delivered* to each party separately. MPI lets buffers be
read and written at any time between posting and completion, so the caller chooses these moments.
"""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from types import FrameType
from typing import Any

import numpy as np

import hpctrain.comm
from hpctrain.comm.link import LinkModel
from hpctrain.core.errors import CollectiveMismatchError

#: folders whose lines are not part of the communicating program
_NOT_THE_PROGRAM = tuple(
    os.path.join(os.path.dirname(os.path.abspath(file)), "") for file in (__file__, str(hpctrain.comm.__file__))
)


def _rounds(ranks: int) -> int:
    """Return the number of rounds of a binomial tree, or of a dissemination barrier."""
    return (ranks - 1).bit_length()


class RankEnded(BaseException):
    """Unwinds a virtual rank after another rank has failed. Must not be caught."""


class Status(Enum):
    """The state of a virtual rank."""

    READY = "ready"
    RUNNING = "running"
    PARKED = "parked"  # it only polls, and none of the operations has completed
    BLOCKED = "blocked"  # inside a blocking operation
    ENDED = "ended"


@dataclass(frozen=True)
class SourceLine:
    """The innermost line of a call outside the communication code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{_short(self.file, os.getcwd())}:{self.line}"


@cache
def _short(file: str, folder: str) -> str:
    """Return the path relative to a folder, or the whole path if it is outside. Cached, as each posted message has its line."""
    relative = os.path.relpath(file, folder)
    return file if relative.startswith("..") else relative


def source_line(frame: FrameType | None = None) -> SourceLine:
    """Return the position of the code that uses the communicator: of this call, or of the `frame` of another thread."""
    if frame is None:
        frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        frame = frame.f_back
    return SourceLine(frame.f_code.co_filename, frame.f_lineno)


Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Moments:
    """The moments at which the buffers of a posting are accessed.

    Attributes:
        read_early: whether the contribution is read at posting; otherwise when the data moves.
        write_early: whether the result is written when the data moves; otherwise at completion.
        scramble: whether the receive buffer contains garbage (NaN if possible) until the result is written, as with some
            transports.
    """

    read_early: bool = False
    write_early: bool = True
    scramble: bool = False


@dataclass(slots=True, eq=False)
class RankState:
    """State of a virtual rank for the scheduler: whether it may run, its clock, and the operations that it waits for.

    Attributes:
        baton: lock that the previous rank releases to let this rank run.
        clock_seconds: virtual time of this rank.
        wake_seconds: heap of completion times that it may wait for.
        polled: postings tested without success in the current pass over its handles.
        stuck_on: postings tested without success in the last complete pass.
        passes: number of complete passes without success since the last progress of this rank.
        line: position in the code at which it stopped.
        thread: identity of its thread.
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
        """Hand the baton to this rank."""
        with suppress(RuntimeError):  # a failure elsewhere has released all ranks
            self.baton.release()

    def polls_in_vain(self, posting: Posting) -> None:
        """Record a test without success."""
        if posting in self.polled:
            self.passes += 1
            self.stuck_on = tuple(self.polled)
            self.polled = {}
        self.polled[posting] = None

    def moves_on(self) -> None:
        """Record progress of this rank, so that polling is useful again."""
        self.passes = 0
        self.polled.clear()


@dataclass(slots=True, eq=False)
class Posting:
    """One rank's part in an operation.

    Attributes:
        kind: name of the communicator's method.
        owner: state of the rank.
        text: sizes and peers, for messages.
        line: position of the posting in the code.
        agreed: values that must be equal on all parties.
        contribution: 1-D view of the send buffer.
        target: 1-D view of the receive buffer.
        send_counts, recv_counts: number of elements per party.
        complete: whether the operation is complete for the owner.
        end_seconds: virtual time of completion; None until it is known.
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
        """Read the contribution if it has not been read."""
        if self.taken is None and self.contribution is not None:
            self.taken = self.contribution.copy()

    def scramble(self) -> None:
        """Fill the receive buffer with garbage, except for elements that must still be read."""
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
    """A collective or a message between `members`.

    Args:
        members: world ranks of the parties, in order.
        label: description in messages, such as "3 on world" or "on world".
        root: party whose data all others need; None if there is none.
        synchronous: whether the root completes only after every party has posted. Otherwise it may run ahead, as MPI allows.
    """

    def __init__(self, members: Sequence[RankState], label: str, *, root: int | None = None, synchronous: bool = True) -> None:
        self.members = members
        self.label = label
        self.root = root
        self.synchronous = synchronous or root is None
        self.postings: list[Posting | None] = [None] * len(members)
        self.missing = len(members)
        self.moved = False
        self.announced = False  # whether the policy, which chooses when the data moves, knows the operation

    def post(self, party: int, posting: Posting, moments: Moments) -> None:
        """Add the posting of a party.

        Raises:
            CollectiveMismatchError: the posting does not fit that of another party.
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
        """Return whether two postings may belong to one operation."""
        return first.kind == second.kind and first.agreed == second.agreed

    def may_move(self) -> bool:
        """Return whether the data is available and has not been moved."""
        root_is_there = self.root is not None and self.postings[self.root] is not None
        return not self.moved and (self.missing == 0 or (root_is_there and not self.synchronous))

    def move(self) -> None:
        """Read all contributions, and write the results that are written early."""
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
        """Complete the posting of one party, after moving the data if necessary."""
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
        """Return the world ranks of the parties whose postings are missing and needed."""
        parties = range(len(self.members)) if self.synchronous or self.root is None else (self.root,)
        return [self.members[party].rank for party in parties if self.postings[party] is None]

    def parts(self) -> list[Array]:
        """Return the contributions in party order."""
        return [posting.taken for posting in self.postings if posting is not None and posting.taken is not None]

    @abstractmethod
    def result(self, party: int) -> Array | None:
        """Return the array that a party receives."""

    @abstractmethod
    def seconds(self, link: LinkModel) -> float:
        """Return the modelled duration, once all parties have posted."""

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


class Allreduce(PostedOperation):
    """Sum in rank order, bitwise the same for all parties."""

    _sum: Array | None = None

    def result(self, party: int) -> Array:
        if self._sum is None:
            self._sum = _sum_in_order(self.parts())
        return self._sum

    def seconds(self, link: LinkModel) -> float:
        return 2 * link.reduce_scatter_seconds(self.parts_bytes(), len(self.members))

    def parts_bytes(self) -> int:
        return max(p.contribution.nbytes for p in self.postings if p is not None and p.contribution is not None)


class ReduceScatter(Allreduce):
    """Sum, part r of which is received by party r."""

    def result(self, party: int) -> Array:
        posting = self.postings[party]
        assert posting is not None
        start = sum(posting.send_counts[:party])
        return super().result(party)[start : start + posting.send_counts[party]]

    def seconds(self, link: LinkModel) -> float:
        return link.reduce_scatter_seconds(self.parts_bytes(), len(self.members))


class Allgather(PostedOperation):
    """Concatenation of all parts in rank order."""

    _gathered: Array | None = None

    def result(self, party: int) -> Array:
        if self._gathered is None:
            self._gathered = np.concatenate(self.parts())
        return self._gathered

    def seconds(self, link: LinkModel) -> float:
        gathered_bytes = max(p.target.nbytes for p in self.postings if p is not None and p.target is not None)
        return link.allgather_seconds(gathered_bytes, len(self.members))


class Alltoall(PostedOperation):
    """Exchange in which part p of every party's buffer is sent to party p. Counts must agree in pairs."""

    def post(self, party: int, posting: Posting, moments: Moments) -> None:
        for other, first in enumerate(self.postings):
            if first is not None and first.kind == posting.kind:
                there = first.send_counts[party], first.recv_counts[party]
                here = posting.recv_counts[other], posting.send_counts[other]
                if there != here:
                    raise CollectiveMismatchError(self._mismatch(first, posting))
        super().post(party, posting, moments)

    def result(self, party: int) -> Array:
        pieces = []
        for posting in self.postings:
            assert posting is not None
            assert posting.taken is not None
            start = sum(posting.send_counts[:party])
            pieces.append(posting.taken[start : start + posting.send_counts[party]])
        return np.concatenate(pieces)

    def seconds(self, link: LinkModel) -> float:
        buffers = [buffer for p in self.postings if p for buffer in (p.contribution, p.target) if buffer is not None]
        return link.reduce_scatter_seconds(max(buffer.nbytes for buffer in buffers), len(self.members))


class Broadcast(PostedOperation):
    """Broadcast of the root's buffer."""

    def result(self, party: int) -> Array | None:
        assert self.root is not None
        root = self.postings[self.root]
        assert root is not None
        return root.taken

    def bytes(self) -> int:
        root = self.postings[self.root or 0]
        assert root is not None
        assert root.contribution is not None
        return root.contribution.nbytes

    def seconds(self, link: LinkModel) -> float:
        return _rounds(len(self.members)) * link.point_to_point_seconds(self.bytes())


class Message(Broadcast):
    """Message from party 0, the root, to party 1. Lengths must agree, as the receiver cannot query the sender's length."""

    def fits(self, first: Posting, second: Posting) -> bool:
        return first.agreed == second.agreed

    def seconds(self, link: LinkModel) -> float:
        return 0.0 if self.members[0] is self.members[1] else link.point_to_point_seconds(self.bytes())

    def _mismatch(self, first: Posting, second: Posting) -> str:
        both = " and ".join(f"{p.kind} of rank {p.owner.rank} ({p.text}) at {p.line}" for p in (first, second))
        return f"A message and its receive must have the same length and type, but these differ: {both}."


class Barrier(PostedOperation):
    """Barrier, which moves no data."""

    def result(self, party: int) -> None:
        return None

    def seconds(self, link: LinkModel) -> float:
        return _rounds(len(self.members)) * link.alpha_seconds


class ObjectExchange(PostedOperation):
    """Exchange of pickled values of all parties, read through `parts`. It has no modelled cost, as it serves set-up only."""

    def result(self, party: int) -> None:
        return None

    def seconds(self, link: LinkModel) -> float:
        return 0.0


def _sum_in_order(parts: Sequence[Array]) -> Array:
    total = parts[0].copy()
    with np.errstate(all="ignore"):  # transports do not warn of overflow
        for part in parts[1:]:
            total += part
    return total
