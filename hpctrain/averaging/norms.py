"""Norms over several groups of parameters: split layers lie in blocks on several ranks, and clipping needs all groups.

Every rank adds up squares of what it owns, or of its share of what every rank holds; each element of the network, wherever its
copies are, counts on one rank of all. So one small allreduce a step over all ranks completes every norm of every group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hpctrain.averaging.local_event import LocalEvent
from hpctrain.boxes import even_interval
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import PostingQueue, ProgressEngine, Ticket
from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.base import Norms

WHAT = "allreduce of norms"


class _GroupNorms(Norms):
    """One group's rows of the norms of all groups.

    Args:
        all_squares: (parameters of all groups, 2); `rows` are this group's.
    """

    def __init__(self, group: FlatGroup, all_squares: np.ndarray, rows: slice) -> None:
        self.index = {segment.parameter: i for i, segment in enumerate(group.segments)}
        self.squares = all_squares[rows]
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
    _gates: Sequence[LocalEvent]

    def contribute(self, member: int) -> None:
        """The member's squares of what is its own are in place. Never waits."""
        self._gates[member].open()

    def complete(self) -> None:
        """Wait for all norms of the step; every member has announced all its gradients."""
        self._progress.wait(self.ticket)


class JointNorms:
    """Shared by the averagers of one network's groups; each joins once, in the same order on every rank.

    Its message is posted on a communicator of its own, one a step, so its order depends on nothing else. What is sent holds
    until the step after the next: two buffers take turns, and a step waits for the message that left its buffer.

    Args:
        comm: all ranks that hold a part of the network, or a copy of one. Each group's ranks are some of them or all.
    """

    def __init__(self, comm: Communicator, progress: ProgressEngine) -> None:
        self._all_ranks = comm
        self._progress = progress
        self._groups: list[FlatGroup] = []
        self._comm: Communicator | None = None
        self._queue: PostingQueue | None = None
        self._buffers: list[tuple[np.ndarray, tuple[Norms, ...]]] = []
        self._sent: list[Ticket | None] = [None, None]
        self._begun: list[int] = []
        self._step: JointStep | None = None
        self._steps = 0

    def join(self, group: FlatGroup) -> int:
        """A group takes part; its place among the members. Parameters have the same names on all ranks of it."""
        assert self._comm is None, "groups join before any averager agrees"
        self._groups.append(group)
        self._begun.append(0)
        return len(self._groups) - 1

    def agree(self) -> None:
        """Make the communicator and the buffers, once. Collective over all ranks."""
        if self._comm is not None:
            return
        comm = self._all_ranks
        self._comm = comm.split(0, comm.rank, f"{comm.name} norms")
        ends = np.cumsum([0] + [len(group.segments) for group in self._groups])
        for _ in range(2):
            squares = np.zeros((int(ends[-1]), 2), np.float64)
            rows = [slice(int(begin), int(end)) for begin, end in pairwise(ends)]
            views = (_GroupNorms(group, squares, own) for group, own in zip(self._groups, rows, strict=True))
            self._buffers.append((squares, tuple(views)))

    def begin_step(self, member: int) -> JointStep:
        """The step that this member begins: every member begins one before any begins the next. Queues the message.

        May wait for the message of the step before last: a rank that updates nothing has never waited for it.
        """
        self.agree()
        if self._begun[member] == self._steps:
            self._step = self._queued()
            self._steps += 1
        self._begun[member] += 1
        assert self._begun[member] == self._steps, "a group of parameters has left a step out"
        assert self._step is not None
        return self._step

    def _queued(self) -> JointStep:
        comm = self._comm
        assert comm is not None
        if self._queue is None:
            # Made after the averagers' queues, it is served after them: what they complete leaves in the same pass.
            self._queue = self._progress.queue(comm)
        turn = self._steps % 2
        left = self._sent[turn]
        if left is not None:
            self._progress.wait(left)
        squares, views = self._buffers[turn]
        gates = [LocalEvent(f"squares of group {member}") for member in range(len(self._groups))]
        ticket = self._sent[turn] = self._queue.post(lambda: comm.iallreduce(squares), WHAT, gates)
        return JointStep(ticket, views, self._progress, gates)


def fill_share(norms: Norms, group: FlatGroup, comm: Communicator, names: Sequence[str]) -> None:
    """Squares of this rank's share of the named parameters, of which every rank of `comm` holds the whole sums."""
    norms.squares[...] = 0.0
    for name in names:
        segment = group.segment(name)
        begin, end = even_interval(segment.size, comm.size, comm.rank)
        norms.add_partial(group, [segment.part(segment.start + begin, segment.start + end)])
