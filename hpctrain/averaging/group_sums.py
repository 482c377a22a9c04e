"""Norms over several groups of parameters: split layers lie in blocks on several ranks, and clipping needs all groups.

Every rank adds up squares of what it owns, or of its share of what every rank holds; each element of the network, wherever its
copies are, counts on one rank of all. So one small allreduce per step over all ranks completes every norm of every group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hpctrain.averaging.local_event import LocalEvent
from hpctrain.core.intervals import even_interval
from hpctrain.comm.base import Communicator
from hpctrain.comm.posting_queue import PostingQueue, Ticket
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.base import Norms

_TEXT = "allreduce of norms"


class _GroupNorms(Norms):
    """One group's part of the norms of all groups.

    Args:
        all_squares: float64 (parameters of all groups, 2), of which `place` is this group's.
    """

    def __init__(self, group: FlatGroup, all_squares: np.ndarray, place: slice) -> None:
        self.index = {segment.parameter: i for i, segment in enumerate(group.segments)}
        self.squares = all_squares[place]
        self._all_squares = all_squares

    def global_gradient(self) -> float:
        return float(np.sqrt(self._all_squares[:, 1].sum()))


@dataclass(frozen=True)
class JointStep:
    """The norms of one step.

    Every member contributes as soon as its own sums are there, driven by whatever its rank waits for, and never only because
    somebody asks: a rank may hold no element of what the others are waiting to update.

    Attributes:
        ticket: complete once all norms are; posted, so that it may stand among what updates come after.
        norms: by member; a member fills its own before it contributes.
    """

    ticket: Ticket
    norms: Sequence[Norms]
    _progress: ProgressEngine
    _contributions: Sequence[LocalEvent]

    def contribute(self, member: int) -> None:
        """The member's squares of what is its own are in place. Never waits."""
        self._contributions[member].happen()

    def complete(self) -> None:
        """Wait for all norms of the step; every member has announced all its gradients."""
        self._progress.wait(self.ticket)


class JointNorms:
    """Shared by the averagers of one network's groups. Making it is collective over all ranks.

    Its message is posted on a communicator of its own, one per step, so its order depends on nothing else. What is sent holds
    until the step after the next: two buffers take turns, and a step waits for the message that left its buffer.

    Args:
        comm: all ranks that hold a part of the network, or a copy of one. Each group's ranks are some of them or all.
        groups: in the same order on every rank. Parameters have the same names on all ranks of a group.
    """

    def __init__(self, comm: Communicator, progress: ProgressEngine, groups: Sequence[FlatGroup]) -> None:
        norms_comm = comm.split(0, comm.rank, f"{comm.name} norms")
        assert norms_comm is not None
        self._comm = norms_comm
        self._progress = progress
        self._groups = tuple(groups)
        self._queue: PostingQueue | None = None
        ends = np.cumsum([0] + [len(group.segments) for group in groups])
        places = [slice(int(begin), int(end)) for begin, end in pairwise(ends)]
        self._buffers: list[tuple[np.ndarray, tuple[Norms, ...]]] = []
        for _ in range(2):
            squares = np.zeros((int(ends[-1]), 2), np.float64)
            views = (_GroupNorms(group, squares, place) for group, place in zip(groups, places, strict=True))
            self._buffers.append((squares, tuple(views)))
        self._sent: list[Ticket | None] = [None, None]
        self._begun = [0] * len(groups)
        self._step: JointStep | None = None
        self._steps = 0

    def member(self, group: FlatGroup) -> int:
        """The place of a group among the members."""
        return next(member for member, other in enumerate(self._groups) if other is group)

    def begin_step(self, member: int) -> JointStep:
        """The step that this member begins: every member begins one before any begins the next. Queues the message.

        May wait for the message of the step before last: a rank that updates nothing has never waited for it.
        """
        if self._begun[member] == self._steps:
            self._step = self._queued()
            self._steps += 1
        self._begun[member] += 1
        assert self._begun[member] == self._steps, "a group of parameters has left a step out"
        assert self._step is not None
        return self._step

    def _queued(self) -> JointStep:
        if self._queue is None:
            # Made after the averagers' queues, it is served after them: what they complete leaves in the same pass.
            self._queue = self._progress.queue(self._comm)
        turn = self._steps % 2
        left = self._sent[turn]
        if left is not None:
            self._progress.wait(left)
        squares, views = self._buffers[turn]
        contributions = [LocalEvent(f"squares of group {member}") for member in range(len(self._groups))]
        ticket = self._sent[turn] = self._queue.post(lambda: self._comm.iallreduce(squares), _TEXT, contributions)
        return JointStep(ticket, views, self._progress, contributions)


def fill_share(norms: Norms, group: FlatGroup, comm: Communicator, names: Sequence[str]) -> None:
    """Squares of this rank's share of the named parameters, of which every rank of `comm` holds the whole sums."""
    norms.squares[...] = 0.0
    for name in names:
        segment = group.segment(name)
        begin, end = even_interval(segment.size, comm.size, comm.rank)
        norms.add_partial(group, [segment.part(segment.start + begin, segment.start + end)])
