"""Norms over several groups of parameters: split layers lie in blocks on several ranks, and clipping needs all groups.

Every rank adds up squares of what it owns, or of its share of what every rank holds; each element of the network, wherever its
copies are, counts on one rank of all. So one small allreduce a step over all ranks completes every norm of every group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from hpctrain.averaging.gate import Gate
from hpctrain.averaging.slices import even
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


@dataclass
class JointStep:
    """The norms of one step.

    Attributes:
        ticket: complete once all norms are; posted, so that it may stand among what updates come after.
        norms: by member; a member fills its own before it contributes.
    """

    ticket: Ticket
    norms: Sequence[Norms]
    _progress: ProgressEngine
    _gates: Sequence[Gate]
    _fillers: dict[int, Callable[[], None]] = field(default_factory=dict)

    def contribute(self, member: int) -> None:
        """The member's squares of what is its own are in place. Never waits."""
        self._gates[member].open()

    def fill_on_demand(self, member: int, fill: Callable[[], None]) -> None:
        """For a member whose sums are complete only when it waits for them: `fill` waits, and puts its squares in place."""
        self._fillers[member] = fill

    def complete(self) -> None:
        """Wait for all norms of the step, after what members fill on demand."""
        for member in sorted(self._fillers):
            if not self._gates[member].done:
                self._fillers[member]()
                self._gates[member].open()
        self._progress.wait(self.ticket)


class JointNorms:
    """Shared by the averagers of one network's groups; each joins once, in the same order on every rank.

    Its message is posted on a communicator of its own, one a step, so its order depends on nothing else. What is sent holds
    until the step after the next: two buffers take turns.

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
        """The step that this member begins: every member begins one before any begins the next. Queues the message."""
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
        squares, views = self._buffers[self._steps % 2]
        gates = [Gate(f"squares of group {member}") for member in range(len(self._groups))]
        ticket = self._queue.post(lambda: comm.iallreduce(squares), WHAT, gates)
        return JointStep(ticket, views, self._progress, gates)


def fill_share(norms: Norms, group: FlatGroup, comm: Communicator, names: Sequence[str]) -> None:
    """Squares of this rank's share of the named parameters, of which every rank of `comm` holds the whole sums."""
    norms.squares[...] = 0.0
    for name in names:
        segment = group.segment(name)
        sizes = even(segment.size, comm.size)
        begin = segment.start + sum(sizes[: comm.rank])
        norms.add_partial(group, [segment.part(begin, begin + sizes[comm.rank])])
