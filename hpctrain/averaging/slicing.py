"""Slices: groups of elements of the flat buffers that travel together, and their sizes, as pure data, the same on every rank.

Sizes determine the order of additions, so a repeated run needs the same sizes. They follow from bytes and ranks by a rule: the
best ones for a link with the alpha, beta and processor time of `RULE_LINK`. Measurements determine only the order of operations,
which changes no bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hpctrain.averaging.top_k import kept_at
from hpctrain.comm.link import LinkModel
from hpctrain.core.errors import ConfigError
from hpctrain.core.intervals import even, even_interval, even_intervals
from hpctrain.nn.parameter import GroupLayout, Segment

#: minimum rows of a linear layer's weight in a slice, per rank; a product of fewer rows is slow
_LEAST_ROWS = 32
#: maximum slices of one parameter: five times those of the catalogue's largest layer with the smallest usual slices
_MOST_SLICES = 10_000
#: bytes of an element's position, which travels with its value if a slice is compressed
INDEX_BYTES = 4


@dataclass(frozen=True)
class Compression:
    """Compression of a slice: only the largest elements cross between nodes.

    The ranks of a node divide the slice among them. Ranks of a stream are numbered by (local number, node), as in `Levels`.

    Attributes:
        nodes: number m of nodes that exchange elements.
        density: share of a part's elements that a node sends after the warm-up.
    """

    nodes: int
    density: float

    def kept(self, size: int, density: float | None = None) -> int:
        """Return the number of elements that a node sends from a part of `size`; at least one unless the part is empty.

        Args:
            size: number of elements of the part.
            density: density to use instead of the final one, as in the first steps.
        """
        return kept_at(size, self.density if density is None else density)


@dataclass(frozen=True)
class Slice:
    """Elements [start, stop) of a group's flat buffers that one operation moves.

    Attributes:
        start: first element.
        stop: end of the elements.
        order: forward position of the front-most parameter, the priority key.
        parameters: parameters that the slice touches, in forward order.
        unit: number of elements that stay together on one rank: a row of a linear layer's weight if sufficient factors are
            exchanged, otherwise 1.
        sufficient_factors: whether the gradient is computed from the exchanged inputs and errors of a linear layer. The slice
            then consists of rows of the layer's weight.
        replicated: parameters outside of the slice (the layer's bias) that every rank updates together with it.
        block: alignment of the parts of ranks in the flat buffers.
        compression: compression between nodes; None: all elements cross. The parts of a compressed slice are those of the ranks
            of a node, and ranks with the same local number on all nodes have the same part.
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
        """Number of ranks that own the same part; 1 unless the slice is compressed.

        The ranks with the same local number on all nodes own the same part of a compressed slice.
        """
        return 1 if self.compression is None else self.compression.nodes

    def counts(self, ranks: int) -> tuple[int, ...]:
        """Return the sizes of the `ranks // copies` parts: whole units or aligned blocks, as evenly divided as possible."""
        if self.block > 1:
            return tuple(self.owned_size(rank, ranks) for rank in range(ranks))
        return tuple(self.unit * units for units in even(self.units, ranks // self.copies))

    def part(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return [start, stop) of one rank's part in the flat buffers. Parts lie in rank order."""
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
    """Return one slice for each non-empty parameter, in forward order."""
    return tuple(_joined((segment,)) for segment in layout.segments if segment.size)


def fused(layout: GroupLayout, least: int, leave_out: Collection[str] = (), apart: Collection[str] = ()) -> tuple[Slice, ...]:
    """Join neighbours, from the last parameter to the first, until a slice has `least` elements; return them in forward order.

    Backward reaches the last parameter first, so only the front-most slice of a run of neighbours may be smaller than `least`.

    Args:
        least: minimum number of elements.
        leave_out: parameters that are in no slice and that no slice spans.
        apart: parameters that share no slice with parameters outside this set.
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
    """Cut slices into even pieces of at most `most` elements. Slices of layers that exchange inputs and errors stay whole.

    Args:
        most: maximum number of elements.
        block: alignment of the cuts in the flat buffers. Pieces and their parts may exceed the maximum by up to one block.

    Raises:
        ConfigError: a parameter would be cut into too many slices.
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
    """Return the slices of a linear layer (K, M) that exchanges inputs and errors. Each rank owns whole rows of each slice.

    Slices have about `most` elements, or more if an efficient product needs more rows. All but the last have a multiple of
    `ranks` rows, so each rank owns the same number of rows as with a single slice.

    Raises:
        ConfigError: there would be too many slices.
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
    """Raise if a parameter would have too many slices. The simulation of the link takes quadratic time."""
    if count > _MOST_SLICES:
        raise ConfigError(
            f"{name} would be cut into {count:,} slices, but the maximum is {_MOST_SLICES:,}; choose a smaller model, or larger "
            f"slices (the options bucket_bytes and slice_parameters of averagers)."
        )


def layer_slices(slices: Sequence[Slice], k: int) -> tuple[int, ...]:
    """Return the indices, in order, of all slices that exchange the same inputs and errors as slice k.

    The result is (k,) if slice k belongs to no such exchange.
    """
    if not slices[k].sufficient_factors:
        return (k,)
    layer = slices[k].parameters
    return tuple(i for i, piece in enumerate(slices) if piece.sufficient_factors and piece.parameters == layer)


def _runs(layout: GroupLayout, leave_out: Collection[str], apart: Collection[str]) -> Iterator[list[Segment]]:
    """Yield maximal lists of neighbouring segments that may share a slice.

    Segments in `leave_out` are in no list. A list contains either only segments in `apart` or none of them.
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
    """Return a short hash of the group's parameters and of the subset that exchanges inputs and errors."""
    text = repr([(one.parameter, one.start, one.stop, one.parameter in exchanging) for one in layout.segments])
    return f"parameters {hashlib.sha256(f'{layout.dtype} {text}'.encode()).hexdigest()[:16]}"


#: link for sizes by rule: a message costs as much as 64 KiB. Networks lie between 25 KiB (20 us at 10 Gb/s) and some 200 KiB
#: (shared memory). Fused slices grow with its square root, so they are never far from the optimum. An operation takes as much
#: processor time as 6 KiB take on the link: 50 us at 1 Gb/s, where the order of the slices matters most
RULE_LINK = LinkModel(alpha_seconds=65.536e-6, beta_seconds_per_byte=1e-9, operation_seconds=6.144e-6)

_LEAST_BUCKET_BYTES = 1 << 14
# Above some 32 MB, MPI may allocate and touch temporary memory in every collective.
_LARGEST_BYTES = 1 << 24
_LEAST_PART_BYTES = 1 << 20
# A slice in flight delays slices that become ready meanwhile, so large layers are cut at a few times the best size for latency.
_LARGEST_IN_BUCKETS = 4


def bucket_bytes(total_bytes: int, ranks: int, link: LinkModel | None) -> int:
    """Return the size of fused slices that minimises exposed communication, a power of two.

    On one rank, or if no link limits the bandwidth, one slice has all bytes. Otherwise k slices of n / k bytes cost k (P - 1)
    alpha in latency. Neither backward nor forward hides the last reduction and the first gather, each of a slice that may have
    c = 4 times as many bytes: 2 c (P - 1) / P n / k beta. The sum is smallest for slices of sqrt(n P alpha / (2 c beta)) bytes.
    """
    if ranks == 1 or link is None or link.beta_seconds_per_byte == 0.0:
        return max(_LEAST_BUCKET_BYTES, total_bytes)
    exposed = 2 * _LARGEST_IN_BUCKETS * link.beta_seconds_per_byte
    best = math.sqrt(total_bytes * ranks * link.alpha_seconds / exposed)
    return int(2 ** round(math.log2(max(_LEAST_BUCKET_BYTES, min(best, total_bytes)))))


def slice_elements(bucket: int | None, layout: GroupLayout, ranks: int, link: LinkModel | None) -> tuple[int, int]:
    """Return the minimum number of elements of fused slices, and the number of elements above which slices are cut.

    Args:
        bucket: bytes of a fused slice; None: the best size on `link`.
    """
    if bucket is None:
        bucket = bucket_bytes(layout.size * layout.item_bytes, ranks, link)
    return max(1, bucket // layout.item_bytes), max(1, largest_bytes(bucket) // layout.item_bytes)


def largest_bytes(bucket: int) -> int:
    """Return the size in bytes above which a slice is cut if fused slices have `bucket` bytes."""
    return max(bucket, min(_LARGEST_IN_BUCKETS * bucket, _LARGEST_BYTES))


def slice_bytes(least: int, total_bytes: int, ranks: int, link: LinkModel | None) -> int:
    """Return the size of slices that may overtake each other: at least `least`, and large enough to limit their processor time.

    Several slices are in flight and hide each other's latency, but not their processor time: c for each of the P - 1 messages of
    a reduction and of a gather. k slices of n / k bytes cost 2 k (P - 1) c of processor time. The last slice, which nothing
    hides, takes twice (P - 1) / P n / k beta. The sum is smallest for slices of sqrt(n P c / beta) bytes. The result is the
    nearest power of two times `least`, up to the size at which slices are always cut. One rank sends nothing: its slices have it.
    """
    if ranks == 1:
        return max(least, _LARGEST_BYTES)
    if link is None or link.beta_seconds_per_byte == 0.0:
        return least
    best = math.sqrt(total_bytes * ranks * link.operation_seconds / link.beta_seconds_per_byte)
    doublings = max(0, round(math.log2(max(best, 1.0) / least)))
    return max(least, min(least << doublings, _LARGEST_BYTES))


def whole_bytes(total_bytes: int, ranks: int) -> int:
    """Return the size of a single slice of all gradients, for `StrategyCosts`."""
    return total_bytes


def uncut_bytes(total_bytes: int, ranks: int) -> int:
    """Return the size of slices that are cut only if they are very large, for `StrategyCosts`."""
    return min(total_bytes, _LARGEST_BYTES)


def fused_bytes(bucket: int | None, total_bytes: int, ranks: int) -> int:
    """Return the size of large slices that are fused and cut by rule, for `StrategyCosts`.

    Args:
        bucket: bytes of a fused slice; None: the size by rule.
        total_bytes: bytes of all gradients.
    """
    return min(total_bytes, largest_bytes(bucket or bucket_bytes(total_bytes, ranks, RULE_LINK)))


def parts_of(size: int, item_bytes: int, ranks: int) -> list[tuple[int, int]]:
    """Return intervals [start, stop) of an array of `size` elements; their collectives together cost as much as a single one.

    Parts have some 16 MiB at most or, if that is more, 1 MiB per rank, because latency grows with the number of ranks. The size
    of each part but the last is rounded up to a multiple of `ranks`, so that a rank's shares of the parts are its share of the
    whole.
    """
    most = max(1, max(_LARGEST_BYTES, ranks * _LEAST_PART_BYTES) // item_bytes)
    size_of_one = -(-size // max(1, -(-size // most)))
    step = max(1, -(-size_of_one // ranks)) * ranks
    return [(begin, min(begin + step, size)) for begin in range(0, size, step)]
