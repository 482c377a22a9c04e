"""The rules of sharding: how one operation runs on the ranks of a split group, by its kind and its use.

Gholami et al. 2018: BATCH splits the samples; MODEL splits a weight's output channels (section 2.2), with everything that works
per channel done before the gather; DOMAIN splits the images (section 2.3). Pure data, the same on every rank.

A convolution under DOMAIN can also run in three parts, so that halos travel while its interior is computed. The interior reads
this rank's own image rows only; the edges above and below read the halo. The interior runs first, and each edge when its rows
have arrived. Backward runs the other way around, so that the edges' gradients travel while the interior's are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from hpctrain.backend.graph import Node
from hpctrain.backend.specs import (
    AdaptiveAveragePoolSpec,
    AddSpec,
    BatchNormSpec,
    Conv2dSpec,
    DropoutSpec,
    FlattenSpec,
    LinearSpec,
    Pair,
    PoolSpec,
    ReluSpec,
    Shape,
    Spec,
    Window,
)
from hpctrain.core.intervals import Interval, even_intervals, replace_dim, shape_of, whole
from hpctrain.parallel import layout
from hpctrain.parallel.layout import Layout, LayoutKind, ReceptiveField, local_window, window_receptive_field
from hpctrain.parallel.moves import NothingSpec, PartialMeanSpec
from hpctrain.parallel.parallel_plan import Parallelism

# They work per element or per channel, so any box will do. What a batch norm needs of other ranks, it merges by itself.
_ANY_CHANNELS = (BatchNormSpec, ReluSpec, AddSpec, DropoutSpec)
_PER_CHANNEL = (*_ANY_CHANNELS, PoolSpec, AdaptiveAveragePoolSpec)


@runtime_checkable
class Windowed(Protocol):
    """A spec whose receptive field is a window; `window` None: it has none."""

    @property
    def window(self) -> Window | None: ...

    def with_window(self, window: Window) -> Spec:
        """Return the same operation with another padding."""
        ...


@dataclass(frozen=True)
class SplitContext:
    """What the rules need besides the node: the samples of each of the Pr ranks of a split group, and the tiles of an image."""

    counts: tuple[int, ...]
    tiles: Pair

    @property
    def ranks(self) -> int:
        return len(self.counts)


@dataclass(frozen=True)
class OperatorSharding:
    """One operation on all ranks: the layout in which it reads each input, that of the output, and each rank's own spec.

    channel_intervals: by rank, the interval of output channels that it holds of all parameters and statistics; None: all of them.
    summed: every rank computes a summand of the whole output; `writes` is the layout after the sum.
    """

    reads: tuple[Layout, ...]
    writes: Layout
    specs: tuple[Spec, ...]
    channel_intervals: tuple[Interval, ...] | None = None
    summed: bool = False


def shard(node: Node, inputs: Sequence[Layout], output: Shape, use: Parallelism, context: SplitContext) -> OperatorSharding:
    """Return how `node` runs. inputs: the layouts of its inputs; output: the whole output's shape.

    If a use has no rule for an operation, it runs on whole samples, as every operation can.
    """
    images = len(inputs[0].shape) == 4
    if use is Parallelism.MODEL:
        by_use = _model(node.spec, inputs, output, context)
    elif use is Parallelism.DOMAIN and images:
        by_use = _domain(node.spec, inputs, output, context)
    else:
        by_use = None
    sharding = by_use if by_use is not None else _batch(node.spec, inputs, output, context)
    return replace(sharding, specs=tuple(_local(spec, sharding, rank) for rank, spec in enumerate(sharding.specs)))


def _batch(spec: Spec, inputs: Sequence[Layout], output: Shape, context: SplitContext) -> OperatorSharding:
    reads = tuple(layout.samples(x.shape, context.counts) for x in inputs)
    return OperatorSharding(reads, layout.samples(output, context.counts), (spec,) * context.ranks)


def _model(spec: Spec, inputs: Sequence[Layout], output: Shape, context: SplitContext) -> OperatorSharding | None:
    (first, *_) = inputs
    if isinstance(spec, LinearSpec):
        # Each output feature reads all input features: every rank reads the whole input, and the gradients that the ranks compute
        # of it are added at the owners of its elements.
        intervals = even_intervals(spec.features_out, context.ranks)
        specs: Any = tuple(replace(spec, features_out=stop - start) for start, stop in intervals)
        reads = layout.everything(first.shape, context.ranks)
        return OperatorSharding((reads,), layout.channels(output, intervals), specs, intervals)
    if isinstance(spec, Conv2dSpec):
        return _model_conv(spec, first, output, context)
    if isinstance(spec, FlattenSpec):
        # A flattened image of several pixels has all channels of one pixel before those of the next: an interval of channels is
        # no interval of features there.
        vectors = first.kind is LayoutKind.CHANNELS and first.shape[1] * first.shape[2] == 1
        return _per_channel(spec, inputs, output, context) if vectors else None
    return _per_channel(spec, inputs, output, context) if isinstance(spec, _PER_CHANNEL) else None


def _model_conv(spec: Conv2dSpec, x: Layout, output: Shape, context: SplitContext) -> OperatorSharding:
    """Split the output channels over the ranks; with groups, whole groups with the input channels that they read."""
    if spec.groups == 1:
        intervals = even_intervals(spec.channels_out, context.ranks)
        specs = tuple(replace(spec, channels_out=stop - start) for start, stop in intervals)
        return OperatorSharding(
            (layout.everything(x.shape, context.ranks),), layout.channels(output, intervals), specs, intervals
        )
    # Whole groups with the input channels that they read, so that nothing is gathered that is not read.
    inside, outside = spec.channels_in // spec.groups, spec.channels_out // spec.groups
    groups = even_intervals(spec.groups, context.ranks)
    reads = layout.channels(x.shape, [(start * inside, stop * inside) for start, stop in groups])
    intervals = tuple((start * outside, stop * outside) for start, stop in groups)
    # A rank without a group has a spec of one, as specs cannot be empty; `_local` replaces it, as its box has no channels.
    specs = tuple(
        replace(spec, channels_in=max(1, n) * inside, channels_out=max(1, n) * outside, groups=max(1, n))
        for n in (stop - start for start, stop in groups)
    )
    return OperatorSharding((reads,), layout.channels(output, intervals), specs, intervals)


def _per_channel(spec: Spec, inputs: Sequence[Layout], output: Shape, context: SplitContext) -> OperatorSharding:
    """Let each rank keep the channels that it has of the first input, however uneven they are, so that nothing moves."""
    (first, *_) = inputs
    intervals = (
        tuple(box[-1] for box in first.boxes)
        if first.kind is LayoutKind.CHANNELS
        else even_intervals(first.shape[-1], context.ranks)
    )
    reads = tuple(layout.channels(x.shape, intervals) for x in inputs)
    specs: Any = (spec,) * context.ranks
    if isinstance(spec, BatchNormSpec):
        specs = tuple(replace(spec, channels=stop - start) for start, stop in intervals)
    return OperatorSharding(reads, layout.channels(output, intervals), specs, intervals)


def _domain(spec: Spec, inputs: Sequence[Layout], output: Shape, context: SplitContext) -> OperatorSharding | None:
    window = getattr(spec, "window", None)
    if window is not None and isinstance(spec, Windowed):
        return _domain_window(spec, window, inputs[0], output, context)
    tiled = tuple(layout.tiles(x.shape, context.tiles) for x in inputs)
    if isinstance(spec, AdaptiveAveragePoolSpec) and spec.size == (1, 1):
        # Each rank sums its tile, divided by the pixels of the whole image; the sums go to the owners of the samples. Other sizes
        # of the result have windows that overlap at tiles' edges, and run on whole samples.
        height, width = inputs[0].shape[1:3]
        specs: Any = (PartialMeanSpec(height * width),) * context.ranks
        return OperatorSharding(tiled, layout.samples(output, context.counts), specs, summed=True)
    if isinstance(spec, _ANY_CHANNELS):
        return OperatorSharding(tiled, layout.tiles(output, context.tiles), (spec,) * context.ranks)
    return None


def _domain_window(spec: Windowed, window: Window, x: Layout, output: Shape, context: SplitContext) -> OperatorSharding:
    writes = layout.tiles(output, context.tiles)
    fields = [window_receptive_field(window, (x.shape[1], x.shape[2]), (box[1], box[2])) for box in writes.boxes]
    if x.kind is LayoutKind.TILES:
        fields = [
            (vertical, horizontal)
            # A spec has one ceil mode for both dims: with it a tail in the other dim would make one more window.
            if vertical.ceil or horizontal.ceil
            else (_with_tail(vertical, owned[1], window.stride[0]), _with_tail(horizontal, owned[2], window.stride[1]))
            for (vertical, horizontal), owned in zip(fields, x.boxes, strict=True)
        ]
    boxes = []
    for vertical, horizontal in fields:
        box = replace_dim(whole(x.shape), 1, (vertical.start, vertical.stop))
        boxes.append(replace_dim(box, 2, (horizontal.start, horizontal.stop)))
    specs = tuple(_with_receptive_field(spec, window, vertical, horizontal) for vertical, horizontal in fields)
    return OperatorSharding((layout.needed(x.shape, boxes),), writes, specs)


def _with_tail(field: ReceptiveField, owned: Interval, stride: int) -> ReceptiveField:
    """Return the field extended by the rank's own elements after the last window, if they make no further window.

    No window reads them, but so the operation reads exactly the rank's own elements, and nothing need be copied. Fewer than a
    stride of them leave no room for another window.
    """
    ends_inside = field.start < field.stop < owned[1] and field.after == 0
    if ends_inside and field.start == owned[0] and owned[1] - field.stop < stride:
        return replace(field, stop=owned[1])
    return field


def _with_receptive_field(spec: Windowed, window: Window, vertical: ReceptiveField, horizontal: ReceptiveField) -> Spec:
    local = spec.with_window(local_window(window, vertical, horizontal))
    if isinstance(local, PoolSpec):
        return replace(local, ceil_mode=vertical.ceil or horizontal.ceil)
    return local


def _local(spec: Spec, sharding: OperatorSharding, rank: int) -> Spec:
    """Return the spec of one rank's part, which depends on its box of the output.

    Masks and the ranks that share statistics follow from the box. A box without channels needs no work.
    """
    writes = sharding.writes
    box = writes.boxes[rank]
    if writes.kind is LayoutKind.CHANNELS and box[-1][0] == box[-1][1]:
        return NothingSpec(spec, shape_of(box))
    if isinstance(spec, BatchNormSpec):
        return _merged(spec, writes.kind)
    if isinstance(spec, DropoutSpec):
        # The mask is drawn by a sample's number and an element's place in the whole sample, so every sharding draws the same.
        split = writes.kind is not LayoutKind.SAMPLES and not spec.per_sample
        return replace(
            spec,
            first_sample=box[0][0],
            unsplit_shape=writes.shape[1:] if split else None,
            origin=tuple(start for start, _ in box[1:]) if split else (),
        )
    return spec


def _merged(spec: BatchNormSpec, kind: LayoutKind) -> BatchNormSpec:
    """Return the spec with the group over which statistics are merged: the ranks that hold samples, or tiles, of its channels."""
    if spec.fixed:  # it uses its running statistics
        return spec
    if kind is LayoutKind.TILES:
        # The statistics of a tile would be those of a part of an image, so they are merged in the split group at least.
        return replace(spec, synchronised=True, merge="all" if spec.synchronised else "split")
    if kind is LayoutKind.CHANNELS:
        # This rank has its channels of all the group's samples already; only other split groups have more of them.
        return replace(spec, merge="data")
    return spec


_HEIGHT = 1


@dataclass(frozen=True)
class ConvolutionPart:
    """Some output rows of a convolution on all ranks: the layouts that it reads and writes, and each rank's own spec."""

    reads: Layout
    writes: Layout
    specs: tuple[Spec, ...]


@dataclass(frozen=True)
class InteriorSplit:
    """A convolution under DOMAIN in three parts."""

    top: ConvolutionPart
    interior: ConvolutionPart
    bottom: ConvolutionPart


@dataclass(frozen=True)
class NoInterior:
    """The reason why a layer is not computed in parts; it follows the layer's name in a sentence.

    by_size: images of another size could be computed in parts.
    """

    reason: str
    by_size: bool = False


def split_interior(spec: Spec, sharding: OperatorSharding, owned: Layout) -> InteriorSplit | NoInterior:
    """Return the three parts, or the reason why there are none. owned: the layout of the input.

    The images must be split by height alone, and every rank must have an interior that can be computed from its own rows without
    a copy. All ranks cut the layer, or none does, since moves are collective.
    """
    if not isinstance(spec, Conv2dSpec):
        return NoInterior("is no convolution")
    if sharding.writes.kind is not LayoutKind.TILES:
        return NoInterior("is not under domain")
    if owned.kind is not LayoutKind.TILES:
        first = owned.kind is LayoutKind.NEEDED  # only the images themselves lie with a halo, as ranks read them from the file so
        return NoInterior("reads its halo from the data file" if first else "reads what is not split by rows")
    (reads,) = sharding.reads
    if reads.boxes == owned.boxes:
        window = spec.window
        return NoInterior("reads no row of another rank", by_size=(window.extent[0], window.stride[0]) != (1, 1))
    # Tiles of split columns have halos on all four sides; the corners would belong to two edges.
    if any(box[2] != (0, owned.shape[2]) for box in owned.boxes):
        return NoInterior("has images that are split by columns too (grid.tiles)")
    interiors = []
    for rank, (input_box, output_box) in enumerate(zip(owned.boxes, sharding.writes.boxes, strict=True)):
        rows = _interior(spec.window, owned.shape[_HEIGHT], input_box[_HEIGHT], output_box[_HEIGHT])
        if rows is None:
            return NoInterior(f"leaves rank {rank} of a split group no row to compute while its halo travels", by_size=True)
        interiors.append(rows)
    outputs = [box[_HEIGHT] for box in sharding.writes.boxes]
    above = [(begin, low) for (begin, _), (low, _) in zip(outputs, interiors, strict=True)]
    below = [(high, end) for (_, end), (_, high) in zip(outputs, interiors, strict=True)]
    top, interior, bottom = (_part(spec, sharding, owned, rows) for rows in (above, interiors, below))
    # The interior reads the tensor in place: it must read all of the rank's rows, and columns from the first one on.
    if not all(
        read[_HEIGHT] == box[_HEIGHT] and read[2][0] == box[2][0]
        for read, box in zip(interior.reads.boxes, owned.boxes, strict=True)
    ):
        return NoInterior("has an interior that does not read all rows of its rank, which would have to be copied", by_size=True)
    return InteriorSplit(top, ConvolutionPart(owned, interior.writes, interior.specs), bottom)


def _interior(window: Window, height: int, owned: Interval, output: Interval) -> Interval | None:
    """Return the output rows that read own rows (and the image's padding) only; None if there are none.

    Output row o reads input rows [o stride - padding, o stride - padding + extent): the first interior row is the least o that
    begins at or after the first own row, the last one the greatest o that ends at or before the last. The image's own edges are
    no boundary, as padding needs no other rank.
    """
    extent, stride, padding = window.extent[0], window.stride[0], window.padding[0]
    low = output[0] if owned[0] == 0 else max(output[0], -(-(owned[0] + padding) // stride))
    high = output[1] if owned[1] == height else min(output[1], (owned[1] + padding - extent) // stride + 1)
    return (low, high) if low < high else None


def _part(spec: Conv2dSpec, sharding: OperatorSharding, owned: Layout, of_ranks: Sequence[Interval]) -> ConvolutionPart:
    """Return the part that writes output rows `of_ranks[r]` on rank r."""
    reads, writes, specs = [], [], []
    for output_box, rows in zip(sharding.writes.boxes, of_ranks, strict=True):
        vertical, horizontal = window_receptive_field(spec.window, (owned.shape[1], owned.shape[2]), (rows, output_box[2]))
        # The ranks' boxes differ in rows alone; samples and channels are the whole tensor's.
        box = replace_dim(sharding.reads[0].boxes[0], 2, (horizontal.start, horizontal.stop))
        reads.append(replace_dim(box, _HEIGHT, (vertical.start, vertical.stop)))
        writes.append(replace_dim(output_box, _HEIGHT, rows))
        specs.append(spec.with_window(local_window(spec.window, vertical, horizontal)))
    return ConvolutionPart(layout.needed(owned.shape, reads), layout.needed(sharding.writes.shape, writes), tuple(specs))
