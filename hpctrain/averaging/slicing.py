"""Slices: which elements of a flat group travel together, and how large they are. Pure data, the same on every rank.

Sizes follow from bytes, ranks, a link's alpha and beta, and what an operation costs a core. They decide which numbers are added
first, so a repeated run needs the same ones: by default they follow by rule, from bytes and ranks. What is measured then
decides the order of operations only, which changes no bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from hpctrain.averaging.top_k import kept_at
from hpctrain.comm.link import LinkModel
from hpctrain.core.errors import ConfigError
from hpctrain.core.intervals import even, even_interval, even_intervals
from hpctrain.nn.parameter import GroupLayout, Segment

#: of a linear layer's weight in a slice, on each rank: a product of fewer rows is slow
_LEAST_ROWS = 32
#: of one parameter; five times as many as the largest layer of the catalogue has with the smallest slices that are usual
_MOST_SLICES = 10_000
#: of an element's position, which travels with its value if a slice is compressed
INDEX_BYTES = 4


@dataclass(frozen=True)
class Compression:
    """The compression of a slice of which only the largest elements cross between nodes.

    The ranks of a node divide the slice among them; a stream counts its ranks by (number on the node, node), as `Levels` does.

    Attributes:
        nodes: m, those that exchange. density: the share of the elements of a part that a node sends, once it has warmed up.
    """

    nodes: int
    density: float

    def kept(self, size: int, density: float | None = None) -> int:
        """Return the elements that a node sends of a part of `size`: at least one, if there are any.

        Args:
            density: another one than in the end, as in the first steps.
        """
        return kept_at(size, self.density if density is None else density)


@dataclass(frozen=True)
class Slice:
    """Elements [start, stop) of a group's flat buffers that one operation moves.

    Attributes:
        name: for messages and tables. order: forward position of its front-most parameter, the priority key.
        parameters: those it touches, in forward order.
        unit: elements that stay on one rank (a row of a linear layer's weight where sufficient factors are exchanged), else 1.
        sufficient_factors: the gradient is made from the exchanged inputs and errors of a linear layer, of whose weight the slice
            is rows.
        replicated: parameters outside of it (that layer's bias) that every rank updates with it, by itself.
        block: parts of ranks meet at multiples of it in the flat buffers.
        compression: how it crosses between nodes where not all of it does; its parts are then those of the ranks of a node, and
            ranks of equal number on all nodes have the same one.
    """

    name: str
    start: int
    stop: int
    order: int
    parameters: tuple[str, ...]
    unit: int = 1
    sufficient_factors: bool = False
    replicated: tuple[str, ...] = ()
    compression: Compression | None = None
    block: int = 1

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def units(self) -> int:
        return self.size // self.unit

    @property
    def copies(self) -> int:
        """Number of ranks that have the same part: those of one number on all nodes if it is compressed; else 1."""
        return 1 if self.compression is None else self.compression.nodes

    def counts(self, ranks: int) -> tuple[int, ...]:
        """Return the elements of the parts: whole units or blocks, as even as possible, the first ones having one more."""
        if self.block > 1:
            return tuple(self.owned_size(rank, ranks) for rank in range(ranks))
        return tuple(self.unit * units for units in even(self.units, ranks // self.copies))

    def part(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return [start, stop) in the flat buffers of one rank's part; parts lie in rank order."""
        if self.block > 1:
            first, last = self.start // self.block, -(-self.stop // self.block)
            begin, end = (self.block * (first + bound) for bound in even_interval(last - first, ranks, rank))
            return min(max(begin, self.start), self.stop), min(max(end, self.start), self.stop)
        begin, end = even_interval(self.units, ranks // self.copies, rank // self.copies)
        return self.start + self.unit * begin, self.start + self.unit * end

    def owned_size(self, rank: int, ranks: int) -> int:
        """Return the number of elements of one rank's part."""
        begin, end = self.part(rank, ranks)
        return end - begin


def per_parameter(layout: GroupLayout) -> tuple[Slice, ...]:
    """Return one slice per parameter, empty ones left out, in forward order."""
    return tuple(_joined((segment,)) for segment in layout.segments if segment.size)


def fused(layout: GroupLayout, least: int, leave_out: Collection[str] = (), apart: Collection[str] = ()) -> tuple[Slice, ...]:
    """Join neighbours, from the last parameter to the first, until a slice has `least` elements; return them in forward order.

    Backward reaches the last parameter first, so only the front-most slice of a run stays smaller than `least`.

    Args:
        leave_out: parameters that are in no slice and that no slice spans. apart: those that share no slice with others.
    """
    slices: list[Slice] = []
    for run in _runs(layout, leave_out, apart):
        pending: list[Segment] = []
        for segment in reversed(run):
            pending.insert(0, segment)
            if sum(one.size for one in pending) >= least:
                slices.append(_joined(pending))
                pending = []
        if pending:
            slices.append(_joined(pending))
    return tuple(sorted((piece for piece in slices if piece.size), key=lambda piece: piece.start))


def cut(layout: GroupLayout, slices: Sequence[Slice], most: int, block: int = 1) -> tuple[Slice, ...]:
    """Cut slices into even pieces of at most `most` elements. Slices of exchanged layers stay whole.

    block: slices are cut at multiples of it in the flat buffers, so that some have up to a block more, and so are their parts.

    Raises:
        ConfigError: a parameter in too many slices.
    """
    assert most >= 1
    pieces: list[Slice] = []
    for whole in slices:
        if whole.sufficient_factors or whole.size <= most:
            pieces.append(replace(whole, block=block))
            continue
        _check_count(whole.name, -(-whole.size // most))
        cuts = [whole.start + begin for begin, _ in even_intervals(whole.size, -(-whole.size // most))][1:]
        cuts = sorted({block * round(place / block) for place in cuts})
        inside = [place for place in cuts if whole.start < place < whole.stop]
        for begin, end in pairwise((whole.start, *inside, whole.stop)):
            pieces.append(replace(_piece(layout, whole, begin, end), block=block))
    return tuple(pieces)


def sufficient_factor_slices(
    layout: GroupLayout, weight: str, replicated: Sequence[str], ranks: int, most: int
) -> tuple[Slice, ...]:
    """Return the slices of a linear layer (K, M) that exchanges inputs and errors.

    Of each slice, rank r owns whole rows of the weight.

    Slices have at most `most` elements, but enough rows for a product. All but the last have a multiple of `ranks` rows, so
    each rank owns as many rows in all as if there were one slice.

    Raises:
        ConfigError: too many slices.
    """
    segment = layout.segment(weight)
    inputs, outputs = layout.specs[weight].shape
    rows = max(most // max(1, outputs), _LEAST_ROWS * ranks)
    rows = max(1, -(-inputs // -(-inputs // rows)))  # even slices
    rows = -(-rows // ranks) * ranks
    _check_count(weight, -(-inputs // rows))
    slices = []
    for low in range(0, max(1, inputs), rows):
        high = min(low + rows, inputs)
        begin, end = low * outputs, high * outputs
        name = weight if high - low == inputs else f"{weight}[{begin}:{end}]"
        bias = tuple(replicated) if low == 0 else ()
        slices.append(Slice(name, segment.start + begin, segment.start + end, segment.order, (weight,), outputs, True, bias))
    return tuple(slices)


def _check_count(name: str, count: int) -> None:
    """Refuse more slices of a parameter than can be planned: the simulation of the link looks at pairs of them."""
    if count > _MOST_SLICES:
        raise ConfigError(
            f"{name} would travel in {count:,} slices, but the largest number is {_MOST_SLICES:,}; choose a smaller model, "
            f"or larger slices (the options bucket_bytes and slice_parameters of averagers)."
        )


def layer_slices(slices: Sequence[Slice], k: int) -> tuple[int, ...]:
    """Return the positions, in order, of all slices that exchange the same inputs and errors as slice k does.

    For other slices it is k alone.
    """
    if not slices[k].sufficient_factors:
        return (k,)
    layer = slices[k].parameters
    return tuple(i for i, piece in enumerate(slices) if piece.sufficient_factors and piece.parameters == layer)


def _runs(layout: GroupLayout, leave_out: Collection[str], apart: Collection[str]) -> Iterator[list[Segment]]:
    """Yield maximal lists of neighbouring segments that may share a slice.

    Those left out are in none; those apart are with each other only.
    """
    run: list[Segment] = []
    for segment in layout.segments:
        left_out = segment.parameter in leave_out
        if run and (left_out or (segment.parameter in apart) != (run[-1].parameter in apart)):
            yield run
            run = []
        if not left_out:
            run.append(segment)
    if run:
        yield run


def _joined(segments: Sequence[Segment]) -> Slice:
    touched = [segment for segment in segments if segment.size] or segments[:1]
    first, last = touched[0], touched[-1]
    name = first.parameter if first is last else f"{first.parameter} .. {last.parameter}"
    return Slice(name, first.start, last.stop, first.order, tuple(segment.parameter for segment in touched))


def _piece(layout: GroupLayout, whole: Slice, start: int, stop: int) -> Slice:
    parts = [layout.segment(name).part(start, stop) for name in whole.parameters]
    touched = [segment for segment in parts if segment.size]
    first, last = touched[0], touched[-1]
    begin = start - layout.segment(first.parameter).start
    end = stop - layout.segment(last.parameter).start
    where = f"[{begin}:{end}]" if first is last else f"[{begin}:] .. {last.parameter}[:{end}]"
    return Slice(f"{first.parameter}{where}", start, stop, first.order, tuple(segment.parameter for segment in touched))


def fingerprint(layout: GroupLayout, exchanging: Collection[str] = ()) -> str:
    """Return one short word for the group's parameters and for which of them exchange inputs and errors."""
    text = repr([(one.parameter, one.start, one.stop, one.parameter in exchanging) for one in layout.segments])
    return f"parameters {hashlib.sha256(f'{layout.dtype} {text}'.encode()).hexdigest()[:16]}"


Sizes = Literal["rule", "measured"]
#: the link that sizes by rule are made for: a message costs as much as 64 KiB. Networks lie between 25 KiB (20 us at 10 Gb/s) and
#: some 200 KiB (shared memory); fused slices go with the square root of it, so they are never far from what is best. An operation
#: takes as long of a core as 6 KiB on the link: 50 us at 1 Gb/s, where it matters most which slices go first
RULE_LINK = LinkModel(alpha_seconds=65.536e-6, beta_seconds_per_byte=1e-9, operation_seconds=6.144e-6)

_LEAST_BUCKET_BYTES = 1 << 14
# Above some 32 MB an MPI may allocate, and touch again, what it needs for a collective each time.
_LARGEST_BYTES = 1 << 24
_LEAST_PART_BYTES = 1 << 20
# A slice on its way holds up what becomes ready meanwhile, so large layers are cut: at a few times the best size for latency.
_LARGEST_IN_BUCKETS = 4


def bucket_bytes(total_bytes: int, ranks: int, link: LinkModel | None) -> int:
    """Return the size of fused slices with which a step exposes least; a power of two.

    k slices of n / k bytes cost k (P - 1) alpha in latency, and the last one, which backward cannot hide, (P - 1) / P n / k beta.
    The sum is least at slices of sqrt(n P alpha / beta) bytes.
    """
    if ranks == 1 or link is None or link.beta_seconds_per_byte == 0.0:
        return max(_LEAST_BUCKET_BYTES, total_bytes)
    best = math.sqrt(total_bytes * ranks * link.alpha_seconds / link.beta_seconds_per_byte)
    return int(2 ** round(math.log2(max(_LEAST_BUCKET_BYTES, min(best, total_bytes)))))


def slice_elements(bucket: int | None, layout: GroupLayout, ranks: int, link: LinkModel | None) -> tuple[int, int]:
    """Return the least elements of fused slices, and the number above which one is cut.

    Args:
        bucket: bytes of a fused slice; None: those that a step exposes least with on `link`.
    """
    if bucket is None:
        bucket = bucket_bytes(layout.size * layout.item_bytes, ranks, link)
    return max(1, bucket // layout.item_bytes), max(1, largest_bytes(bucket) // layout.item_bytes)


def largest_bytes(bucket: int) -> int:
    """Return the size above which a slice is cut, where fused ones have `bucket` bytes."""
    return max(bucket, min(_LARGEST_IN_BUCKETS * bucket, _LARGEST_BYTES))


def slice_bytes(least: int, total_bytes: int, ranks: int, link: LinkModel | None) -> int:
    """Return the size of slices that may overtake each other: at least `least`, and as large as their cost to a core requires.

    Several are in flight and hide each other's latency, but not what each takes of a core that computes: c for each of the P - 1
    messages of a reduction and of a gather. k slices of n / k bytes cost 2 k (P - 1) c of that, and the last one, which nothing
    hides, is twice (P - 1) / P n / k beta on its way. The sum is least at slices of sqrt(n P c / beta) bytes. The result is the
    nearest power of two times `least`; never so large that it had to be cut for another reason.
    """
    if ranks == 1 or link is None or link.beta_seconds_per_byte == 0.0:
        return least
    best = math.sqrt(total_bytes * ranks * link.operation_seconds / link.beta_seconds_per_byte)
    doublings = max(0, round(math.log2(max(best, 1.0) / least)))
    return max(least, min(least << doublings, _LARGEST_BYTES))


def whole_bytes(total_bytes: int, ranks: int) -> int:
    """Return the size of a single slice of everything, for `StrategyCosts`."""
    return total_bytes


def uncut_bytes(total_bytes: int, ranks: int) -> int:
    """Return the size of slices that are cut where they are very large, for `StrategyCosts`."""
    return min(total_bytes, _LARGEST_BYTES)


def fused_bytes(bucket: int | None, total_bytes: int, ranks: int) -> int:
    """Return the size of large slices that are fused and cut by rule, for `StrategyCosts`.

    Args:
        bucket: bytes of a fused slice; None: those of the rule.
    """
    return min(total_bytes, largest_bytes(bucket or bucket_bytes(total_bytes, ranks, RULE_LINK)))


def parts_of(size: int, item_bytes: int, ranks: int) -> list[tuple[int, int]]:
    """Return [start, stop) of the collectives that an array of `size` elements is sent in, at the cost of a single one.

    They have 16 MiB at most, but no less than 1 MiB per rank, as latency grows with the ranks. Each but the last has a multiple
    of `ranks` elements, so that the ranks' parts add up to those of the whole.
    """
    most = max(1, max(_LARGEST_BYTES, ranks * _LEAST_PART_BYTES) // item_bytes)
    size_of_one = -(-size // max(1, -(-size // most)))
    step = max(1, -(-size_of_one // ranks)) * ranks
    return [(begin, min(begin + step, size)) for begin in range(0, size, step)]
