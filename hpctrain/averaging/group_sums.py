"""Sums over the arrays of parameter groups: gradients of shards, squared norms, and words of the parameters of a step.

`ShardGradients` sums the gradients of a rank's shards in the order of a tree, so that sums do not depend on the number of ranks.

`JointNorms` computes norms over several groups of parameters. Split layers lie in blocks on several ranks, and clipping needs all
groups. Every rank sums the squares of the elements that it owns, and of its share of the elements that every rank holds. Each
element of the network therefore counts on exactly one rank, and one small allreduce per step over all ranks completes all norms
of all groups.

`TreeNorms` are norms whose bits depend neither on ranks nor on sizes of slices. The elements of a parameter between two multiples
of `NORM_BLOCK` in the flat buffers are one term, which one rank sums alone; parts of slices end at such multiples. The terms of a
parameter are added in a tree (`core/intervals.py`). Each rank adds its own terms and has zeros for the other ranks' terms, so a
sum over ranks changes nothing. Then all ranks add the terms in the tree's order.

`ReadSums` sum the parameters that a step reads, just before the update of that step overwrites them. A rank's copy of a parameter
that another rank owns is overwritten in every step. Damage to the copy therefore lasts one step only, but that step has computed
with it. Comparing the sums of all ranks reveals the damage afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np

from hpctrain.backend.arithmetic import Fetch, WordSums
from hpctrain.comm.base import Array, Communicator
from hpctrain.comm.progress import LocalEvent, PostingQueue, ProgressEngine, Ticket
from hpctrain.core.intervals import Interval, ShardsOfRank, TreeAddition, additions, cover, even_interval
from hpctrain.nn.parameter import FlatGroup, Parameter, Segment
from hpctrain.optim.base import Norms

_NORMS_TEXT = "allreduce of norms"


class _GroupNorms(Norms):
    """Norms of one group as a view of the norms of all groups.

    Args:
        all_squares: float64 (parameters of all groups, 2).
        place: rows of this group.
    """

    def __init__(self, group: FlatGroup, all_squares: np.ndarray, place: slice) -> None:
        self.index = {segment.parameter: i for i, segment in enumerate(group.segments)}
        self.squares = all_squares[place]
        self._all_squares = all_squares

    def global_gradient(self) -> float:
        return float(np.sqrt(self._all_squares[:, 1].sum()))


@dataclass(frozen=True)
class JointStep:
    """Norms of one step.

    Every member contributes as soon as its sums are complete, during any wait of its rank, even if the rank itself needs no norms
    yet: other ranks may be waiting for the contribution.

    Attributes:
        ticket: ticket of the allreduce, complete once all norms are, so that updates can depend on it.
        norms: norms by member; each member fills its own norms before it contributes.
    """

    ticket: Ticket
    norms: Sequence[Norms]
    _progress: ProgressEngine
    _contributions: Sequence[LocalEvent]

    def contribute(self, member: int) -> None:
        """Announce that this rank has written the squares of the member's elements, without waiting."""
        self._contributions[member].happen()

    def complete(self) -> None:
        """Wait for all norms of the step. Every member must have announced all its gradients."""
        self._progress.wait(self.ticket)


class JointNorms:
    """Norms of all parameter groups of a network, shared by their averagers. Creation is collective over all ranks.

    One message per step is posted on a separate communicator, so its order depends on nothing else. A message's buffer is reused
    in the step after the next: two buffers alternate, and a step waits for the previous message of its buffer.

    Args:
        comm: communicator of all ranks that hold a part or a copy of the network. The ranks of each group are a subset.
        groups: parameter groups in the same order on every rank. Parameters have the same names on all ranks of a group.
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
        """Return the index of a group among the members."""
        return next(member for member, other in enumerate(self._groups) if other is group)

    def begin_step(self, member: int) -> JointStep:
        """Begin this member's step; the first member also queues the message.

        All members must begin a step before any member begins the next. The call may wait for the message of the step before the
        previous one, because a rank that updates nothing has never waited for it.
        """
        if self._begun[member] == self._steps:
            self._step = self._queued()
            self._steps += 1
        self._begun[member] += 1
        assert self._begun[member] == self._steps, "a group of parameters has skipped a step"
        assert self._step is not None
        return self._step

    def _queued(self) -> JointStep:
        if self._queue is None:
            # Created after the averagers' queues, this queue is served after them, so that contributions completed in a pass
            # are sent in the same pass.
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
    """Write the squares of this rank's share of the named parameters. Every rank of `comm` holds their summed gradients."""
    norms.squares[...] = 0.0
    for name in names:
        segment = group.segment(name)
        begin, end = even_interval(segment.size, comm.size, comm.rank)
        norms.add_partial(group, [segment.part(segment.start + begin, segment.start + end)])


#: elements of a term; smaller terms cost more calls, larger ones make the ranks' parts less even
NORM_BLOCK = 2048
_cached_additions = lru_cache(maxsize=None)(additions)


class TreeNorms(Norms):
    """Squared norms of whole parameters, complete once the ranks' terms are summed and `complete` was called.

    Args:
        parts: element ranges [start, stop) of the flat buffers, over all ranks; a rank sums each range at once.
    """

    def __init__(self, group: FlatGroup, parts: Iterable[Interval]) -> None:
        super().__init__(group)
        nodes: list[set[Interval]] = [set() for _ in group.segments]
        for start, stop in parts:
            for segment in group.covering(start, stop):
                terms = _terms_of_part(group.segment(segment.parameter), segment)
                nodes[self.index[segment.parameter]].update(cover(terms, _term_count(group.segment(segment.parameter))))
        self._nodes = [tuple(sorted(each)) for each in nodes]
        self._sizes = [_term_count(segment) for segment in group.segments]
        self._first = np.cumsum([0, *map(len, self._nodes)])
        self._place = {(i, node): row for i, each in enumerate(self._nodes) for row, node in enumerate(each, self._first[i])}
        self._sums = np.zeros((int(self._first[-1]), 2), np.float64)

    def clear(self, places: slice) -> None:
        self.message(places)[...] = 0.0

    def add_partial(self, group: FlatGroup, segments: Sequence[Segment]) -> None:
        """Write the sums of squares of `segments` to their places in the tree. Each segment lies completely within one part."""
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
    """Return the number of terms into which the norm of a parameter is divided."""
    return -(-whole.stop // NORM_BLOCK) - whole.start // NORM_BLOCK if whole.size else 0


def _terms_of_part(whole: Segment, part: Segment) -> Interval:
    """Return the range of a parameter's terms that a part of the parameter consists of."""
    first = whole.start // NORM_BLOCK
    assert part.start == whole.start or part.start % NORM_BLOCK == 0, f"{part} begins inside of a term"
    assert part.stop == whole.stop or part.stop % NORM_BLOCK == 0, f"{part} ends inside of a term"
    return part.start // NORM_BLOCK - first, -(-part.stop // NORM_BLOCK) - first


def _elements_of_term(whole: Segment, term: int) -> Interval:
    """Return the elements [start, stop) of the flat buffers in one term of a parameter."""
    start = (whole.start // NORM_BLOCK + term) * NORM_BLOCK
    return max(whole.start, start), min(whole.stop, start + NORM_BLOCK)


def waiting_sums(shards: ShardsOfRank) -> dict[int, int]:
    """Return, by place of a shard whose sum waits to be merged, the index of its buffer: the first one that is free then."""
    numbers: dict[int, int] = {}
    taken: set[int] = set()
    every_addition = shards.additions
    for place in range(shards.count - 1):
        after = [step for step in every_addition if step.last == place]
        taken -= {numbers[step.right] for step in after if step.right != place}
        if not after:
            numbers[place] = min(set(range(len(taken) + 1)) - taken)
            taken.add(numbers[place])
    return numbers


class ShardGradients:
    """Sums of one group's gradients over the shards of this rank, accumulated parameter by parameter.

    As in a binary counter, two sums over equal numbers of shards are merged at once, so the number of buffers is logarithmic in
    the number of shards. The gradient of the last shard stays in the group's own buffer, to which the earlier sums are added.
    Sums that have no common node in the tree remain separate terms, which ranks send one by one.

    `place` is the index of a shard among those of this rank. Each `add` follows the step's first forward, which waits for the
    messages of the previous step. Until then the buffers hold the sums of that step, because their message may not have been
    posted yet.

    Args:
        shards: shards of this rank among the ranks that average the group.
        homes: whether gradients are written directly to `buffer_for`, so that waiting sums need not be copied.
    """

    def __init__(self, group: FlatGroup, shards: ShardsOfRank, *, homes: bool = False) -> None:
        self.shards = shards
        self._homes = homes
        self._group = group
        self._after: list[list[TreeAddition]] = [[] for _ in range(shards.count)]
        for step in shards.additions:
            self._after[step.last].append(step)
        self._kept = shards.sums[:-1]
        self._number_of = waiting_sums(shards)
        buffers = 1 + max(self._number_of.values(), default=-1)
        self._buffers = [group.arithmetic.zeros(group.size, group.dtype) for _ in range(buffers)]
        self._added = dict.fromkeys(group.parameters, 0)

    def buffer_for(self, parameter: Parameter, place: int) -> Array:
        """Return the array, in the parameter's shape, to which the gradient of one parameter over a shard is written."""
        if self._homes and place in self._number_of:
            return self._waiting(place, parameter).reshape(parameter.grad.shape)
        return parameter.grad

    def start(self) -> None:
        """Begin a step, which needs no work."""

    def end_pass(self) -> None:
        """End a pass over a shard, which needs no work."""

    def add(self, parameter: Parameter, place: int) -> None:
        """Add `parameter.grad` over a shard other than the last to the sums. Call it for the shards in order."""
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
        """Add the earlier sums to the gradient of one parameter over the last shard."""
        self._count(parameter, self.shards.count - 1)
        for step in self._after[-1]:
            self._group.arithmetic.add(parameter.grad.reshape(-1), self._waiting(step.left, parameter))

    def terms(self, start: int, stop: int) -> Array | tuple[Array, ...]:
        """Return elements [start, stop) of this rank's terms of the sum over ranks: one array, or several in the tree's order."""
        last = self._group.grad[start:stop]
        if not self._kept:
            return last
        return (*(self._buffers[self._number_of[place]][start:stop] for place in self._kept), last)


class ReadSums:
    """Sums over the 32-bit words of one group's parameters. Created at set-up, in the same way on every rank of the group.

    Args:
        parts: segments that are written together; each element of the group is in at most one part.
        owned: segments that this rank owns; parameters are cut at their ends, so that a piece lies inside or outside of them.

    Attributes:
        names: name of the parameter of each summed piece, part by part.
        owned: whether the piece lies in `owned`, for each piece.
    """

    def __init__(self, group: FlatGroup, parts: Sequence[Sequence[Segment]], owned: Sequence[Segment] = ()) -> None:
        self.names: list[str] = []
        self.owned: list[bool] = []
        self._sums: dict[int, WordSums] = {}  # by part
        places = {place for segment in owned if segment.size for place in (segment.start, segment.stop)}
        for number, part in enumerate(parts):
            pieces = [piece for segment in part for piece in _cut(segment, places)]
            if pieces:
                self._sums[number] = group.arithmetic.word_sums([group.data[one.start : one.stop] for one in pieces])
            self.names += [f"parameter {piece.parameter}" for piece in pieces]
            self.owned += [any(one.start <= piece.start and piece.stop <= one.stop for one in owned) for piece in pieces]
        self._step: dict[int, Fetch] = {}

    def begin(self) -> Callable[[int], None]:
        """Begin a step. Return the function that sums a part unless it is done, to be called before the part is written.

        Calls that come after `complete` have no effect.
        """
        return partial(self._take, self._step)

    def complete(self) -> list[Fetch]:
        """Return pending fetches of the sums of all parts, in order, without waiting. Call it after the step's last read."""
        step, self._step = self._step, {}
        for part in self._sums:
            self._take(step, part)
        return [step[part] for part in self._sums]

    def _take(self, step: dict[int, Fetch], part: int) -> None:
        if part in self._sums and part not in step:
            step[part] = self._sums[part].fetch()


def _cut(segment: Segment, places: Collection[int]) -> list[Segment]:
    """Cut a segment at the given places and return the non-empty parts."""
    inside = sorted(place for place in places if segment.start < place < segment.stop)
    bounds = pairwise((segment.start, *inside, segment.stop))
    return [part for part in (segment.part(begin, end) for begin, end in bounds) if part.size]
