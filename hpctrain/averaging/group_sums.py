"""Sums over the arrays of parameter groups: gradients of shards, squared norms, and checksums of what a step reads.

`ShardGradients` adds up the gradients of a rank's shards in the order of a tree, so that sums do not depend on the number of
ranks.

`JointNorms` completes norms over several groups of parameters: split layers lie in blocks on several ranks, and clipping needs
all groups. Every rank adds up squares of what it owns, or of its share of what every rank holds; each element of the network,
wherever its copies are, counts on one rank of all. So one small allreduce per step over all ranks completes every norm of every
group.

`TreeNorms` are norms whose bits depend on no rank and on no size of slices: sums of squares of fixed blocks, added in one
order. The elements of a parameter that lie between two multiples of `NORM_BLOCK` in the flat buffers are one term, which one
rank sums up alone: parts of slices end at such multiples. The terms of a parameter are added in a tree (`summation_tree`): each
rank adds what it has, the places of others hold zeros, so that a sum over ranks changes nothing, and all ranks add the rest in
the tree's order.

`ReadSums` are sums over the parameters that a step reads, taken just before the update of that step overwrites them. A rank's
copy of a parameter that another rank owns is overwritten in every step. Damage to the copy therefore lasts one step only, but
that step has computed with it. Comparing the sums of all ranks reveals the damage afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from hpctrain.backend.arithmetic import ArrayChecksums, Fetch
from hpctrain.comm.base import Array, Communicator
from hpctrain.comm.progress import LocalEvent, PostingQueue, ProgressEngine, Ticket
from hpctrain.core.intervals import Interval, ShardsOfRank, TreeAddition, additions, cover, even_interval
from hpctrain.nn.parameter import FlatGroup, Parameter, Segment
from hpctrain.optim.base import Norms

_NORMS_TEXT = "allreduce of norms"


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
        """Note that the member's squares of what is its own are in place. Never waits."""
        self._contributions[member].happen()

    def complete(self) -> None:
        """Wait for all norms of the step; every member has announced all its gradients."""
        self._progress.wait(self.ticket)


class JointNorms:
    """The norms of all parameter groups of a network, shared by their averagers. Making it is collective over all ranks.

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
        """Return the place of a group among the members."""
        return next(member for member, other in enumerate(self._groups) if other is group)

    def begin_step(self, member: int) -> JointStep:
        """Begin this member's step, and queue the message. Every member begins one before any begins the next.

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
        ticket = self._sent[turn] = self._queue.post(lambda: self._comm.iallreduce(squares), _NORMS_TEXT, contributions)
        return JointStep(ticket, views, self._progress, contributions)


def fill_share(norms: Norms, group: FlatGroup, comm: Communicator, names: Sequence[str]) -> None:
    """Write the squares of this rank's share of the named parameters, whose sums every rank of `comm` holds."""
    norms.squares[...] = 0.0
    for name in names:
        segment = group.segment(name)
        begin, end = even_interval(segment.size, comm.size, comm.rank)
        norms.add_partial(group, [segment.part(segment.start + begin, segment.start + end)])


#: elements of a term; fewer cost more calls, more let ranks' parts differ more
NORM_BLOCK = 2048
_cached_additions = lru_cache(maxsize=None)(additions)


class TreeNorms(Norms):
    """Squared norms of whole parameters, complete once the ranks' terms are summed and `complete` was called.

    Args:
        parts: of all ranks, the elements [start, stop) of the flat buffers that one of them adds up at once.
    """

    def __init__(self, group: FlatGroup, parts: Iterable[Interval]) -> None:
        super().__init__(group)
        nodes: list[set[Interval]] = [set() for _ in group.segments]
        for start, stop in parts:
            for segment in group.covering(start, stop):
                terms = _terms_of_part(group.segment(segment.parameter), segment)
                nodes[self.index[segment.parameter]].update(cover(terms, _term_count(group.segment(segment.parameter))))
        self._nodes = [tuple(sorted(of_one)) for of_one in nodes]
        self._sizes = [_term_count(segment) for segment in group.segments]
        self._first = np.cumsum([0, *map(len, self._nodes)])
        self._place = {(i, node): row for i, of_one in enumerate(self._nodes) for row, node in enumerate(of_one, self._first[i])}
        self._sums = np.zeros((int(self._first[-1]), 2), np.float64)

    def clear(self, places: slice) -> None:
        self.message(places)[...] = 0.0

    def add_partial(self, group: FlatGroup, segments: Sequence[Segment]) -> None:
        """Put the sums of the elements in `segments` into their places. Each segment lies within one of the parts, whole."""
        for segment in segments:
            if not segment.size:
                continue
            whole, position = group.segment(segment.parameter), self.index[segment.parameter]
            first, last = _terms_of_part(whole, segment)
            blocks = [(term, term + 1) for term in range(first, last)]
            views = [flat[slice(*_elements_of_term(whole, term))] for flat in (group.data, group.grad) for term, _ in blocks]
            values = group.arithmetic.square_sums(views).reshape(2, -1)
            steps = _cached_additions(tuple(blocks), self._sizes[position])
            for column, terms in enumerate(values.tolist()):
                _add_terms(terms, steps)
                for node in cover((first, last), self._sizes[position]):
                    self._sums[self._place[position, node], column] = terms[node[0] - first]

    def message(self, places: slice) -> np.ndarray:
        first, last, _ = places.indices(len(self._nodes))
        return self._sums[self._first[first] : self._first[last]]

    def complete(self, places: slice) -> None:
        for position in range(*places.indices(len(self._nodes))):
            nodes = self._nodes[position]
            rows = self._sums[self._first[position] : self._first[position + 1]]
            steps = _cached_additions(nodes, self._sizes[position])
            for column in range(2):
                terms = rows[:, column].tolist()
                _add_terms(terms, steps)
                self.squares[position, column] = terms[0] if terms else 0.0


def _add_terms(terms: list[float], steps: Sequence[TreeAddition]) -> None:
    for step in steps:
        terms[step.left] += terms[step.right]


def _term_count(whole: Segment) -> int:
    """Return the number of terms of a parameter."""
    return -(-whole.stop // NORM_BLOCK) - whole.start // NORM_BLOCK if whole.size else 0


def _terms_of_part(whole: Segment, part: Segment) -> Interval:
    """Return the terms of a parameter that a part of it consists of."""
    first = whole.start // NORM_BLOCK
    assert part.start == whole.start or part.start % NORM_BLOCK == 0, f"{part} begins inside of a term"
    assert part.stop == whole.stop or part.stop % NORM_BLOCK == 0, f"{part} ends inside of a term"
    return part.start // NORM_BLOCK - first, -(-part.stop // NORM_BLOCK) - first


def _elements_of_term(whole: Segment, term: int) -> Interval:
    """Return the elements [start, stop) of the flat buffers in one term of a parameter."""
    start = (whole.start // NORM_BLOCK + term) * NORM_BLOCK
    return max(whole.start, start), min(whole.stop, start + NORM_BLOCK)


class ShardGradients:
    """The sums of one group's gradients over the shards of this rank, added up parameter by parameter.

    As in a binary counter, sums of equal numbers of shards become one as soon as there are two, so there are as many buffers as
    a number has digits. The last shard's gradient stays where it is, in the group's own buffer, and takes the sums before it.
    What no node of the tree holds together is left as several terms, which ranks send one by one.

    Each `add` comes after the step's first forward, which waits for what the step before has sent: buffers are free then, and
    keep its sums until then, as their message may still have to be posted.

    Args:
        group: the parameters. shards: those of this rank among the ranks that average the group.
        homes: gradients are written to `buffer_for`, so that what waits need not be copied.

    Attributes:
        shards: as given.
    """

    def __init__(self, group: FlatGroup, shards: ShardsOfRank, *, homes: bool = False) -> None:
        self.shards = shards
        self._homes = homes
        self._group = group
        self._after: list[list[TreeAddition]] = [[] for _ in range(shards.count)]
        for step in shards.additions:
            self._after[step.last].append(step)
        self._kept = shards.sums[:-1]
        self._number_of = self._places()
        buffers = 1 + max(self._number_of.values(), default=-1)
        self._buffers = [group.arithmetic.zeros(group.size, group.dtype) for _ in range(buffers)]
        self._added = dict.fromkeys(group.parameters, 0)

    def _places(self) -> dict[int, int]:
        """Return, by the place of a shard whose sum waits for others, the number of the first free buffer, in which it waits."""
        numbers: dict[int, int] = {}
        taken: set[int] = set()
        for place in range(self.shards.count - 1):
            taken -= {numbers[step.right] for step in self._after[place] if step.right != place}
            if not self._after[place]:
                numbers[place] = min(set(range(len(taken) + 1)) - taken)
                taken.add(numbers[place])
        return numbers

    def buffer_for(self, parameter: Parameter, place: int) -> Array:
        """Return where the gradient of one parameter over a shard is to be written, in the parameter's shape."""
        if self._homes and place in self._number_of:
            return self._waiting(place, parameter).reshape(parameter.grad.shape)
        return parameter.grad

    def start(self) -> None:
        """Begin a step: nothing is added up."""

    def end_pass(self) -> None:
        """End a pass over a shard. No-op."""

    def add(self, parameter: Parameter, place: int) -> None:
        """Add the gradient of one parameter over a shard that is not the last, as soon as it is there. Shards come in order."""
        self._count(parameter, place)
        arithmetic = self._group.arithmetic
        value: Array = parameter.grad.reshape(-1)
        for step in self._after[place]:
            left = self._waiting(step.left, parameter)
            arithmetic.add(left, value)
            value = left
        if place in self._number_of and not self._homes:
            arithmetic.copy(self._waiting(place, parameter), value)

    def _count(self, parameter: Parameter, place: int) -> None:
        assert self._added[parameter.name] == place, "a shard is missing"
        self._added[parameter.name] = (place + 1) % self.shards.count

    def _waiting(self, place: int, parameter: Parameter) -> Array:
        segment = self._group.segment(parameter.name)
        return self._buffers[self._number_of[place]][segment.start : segment.stop]

    def complete(self, parameter: Parameter) -> None:
        """Add what was added up before to the gradient of one parameter over the last shard."""
        self._count(parameter, self.shards.count - 1)
        for step in self._after[-1]:
            self._group.arithmetic.add(parameter.grad.reshape(-1), self._waiting(step.left, parameter))

    def terms(self, start: int, stop: int) -> Array | tuple[Array, ...]:
        """Return elements [start, stop) of this rank's terms of the sums over ranks.

        One array, or several in the tree's order.
        """
        last = self._group.grad[start:stop]
        if not self._kept:
            return last
        return (*(self._buffers[self._number_of[place]][start:stop] for place in self._kept), last)


class ReadSums:
    """Sum the 32-bit words of one group's parameters. Made at set-up, alike on every rank of the group.

    Args:
        parts: the segments that are written together; each element of the group is in at most one part.
        places: elements of the flat buffers at which segments are cut, so that no piece has elements of several owners.

    Attributes:
        pieces: the summed segments, part after part.
    """

    def __init__(self, group: FlatGroup, parts: Sequence[Sequence[Segment]], places: Sequence[int] = ()) -> None:
        self.pieces: list[Segment] = []
        self._sums: list[ArrayChecksums] = []
        for part in parts:
            pieces = [piece for segment in part for piece in _cut_segment(segment, places)]
            if pieces:
                self._sums.append(group.arithmetic.watched([group.data[one.start : one.stop] for one in pieces]).sums())
            self.pieces += pieces
        counts = [any(segment.size for segment in part) for part in parts]
        #: by part, the index of its sums; None for a part without elements
        self._place = [sum(counts[:number]) if sized else None for number, sized in enumerate(counts)]
        self._step: StepReads | None = None

    def begin(self) -> StepReads:
        """Begin a step and return its sums."""
        self._step = StepReads(self._sums, self._place)
        return self._step

    def complete(self) -> list[Fetch]:
        """Return pending fetches of the sums of all parts, in order. Call it after the step's last read. Does not wait."""
        step, self._step = self._step or self.begin(), None
        return step.complete()


class StepReads:
    """The sums of one step, part by part."""

    def __init__(self, sums: Sequence[ArrayChecksums], place: Sequence[int | None]) -> None:
        self._sums, self._place = sums, place
        self._fetches: list[Fetch | None] = [None] * len(sums)

    def take(self, part: int) -> None:
        """Take the sums of a part that is about to be written, unless they were taken before."""
        place = self._place[part]
        if place is not None:
            self._take(place)

    def complete(self) -> list[Fetch]:
        """Take the sums of all remaining parts, and return those of all parts."""
        return [self._take(place) for place in range(len(self._sums))]

    def _take(self, place: int) -> Fetch:
        fetch = self._fetches[place]
        if fetch is None:
            fetch = self._fetches[place] = self._sums[place].fetch()
        return fetch


def _cut_segment(segment: Segment, places: Sequence[int]) -> list[Segment]:
    """Cut a segment at places, and return the non-empty parts."""
    inside = sorted({place for place in places if segment.start < place < segment.stop})
    bounds = pairwise((segment.start, *inside, segment.stop))
    return [part for part in (segment.part(begin, end) for begin, end in bounds) if part.size]
