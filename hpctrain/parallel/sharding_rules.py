"""Sharding rules: how one operation runs on the ranks of a split group, by its kind and its use.

Gholami et al. 2018: BATCH splits the samples. MODEL splits a weight's output channels (section 2.2); per-channel operations run
before the gather. DOMAIN splits the images (section 2.3). The rules are pure data, the same on every rank.
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

# These operations work per element or channel, so any box is possible. A batch norm itself merges the ranks' statistics.
_ANY_CHANNELS = (BatchNormSpec, ReluSpec, AddSpec, DropoutSpec)
_PER_CHANNEL = (*_ANY_CHANNELS, PoolSpec, AdaptiveAveragePoolSpec)


@runtime_checkable
class Windowed(Protocol):
    """Spec of an operation whose `window` determines its receptive field. The window is None if there is no such field."""

    @property
    def window(self) -> Window | None: ...

    def with_window(self, window: Window) -> Spec:
        """Return the same operation with the padding of `window`."""
        ...


@dataclass(frozen=True)
class SplitContext:
    """Inputs of the rules other than the node.

    Attributes:
        counts: number of samples of each of the Pr ranks of a split group.
        tiles: (vertical, horizontal) tiles of an image.
    """

    counts: tuple[int, ...]
    tiles: Pair

    @property
    def ranks(self) -> int:
        return len(self.counts)


@dataclass(frozen=True)
class OperatorSharding:
    """One operation on all ranks.

    Attributes:
        reads: layout of each input.
        writes: layout of the output; for a sum, the layout after the sum.
        specs: spec of each rank.
        channel_intervals: interval of output channels of all parameters and statistics that each rank holds; None: all channels.
        summed: whether every rank computes a summand of the whole output.
    """

    reads: tuple[Layout, ...]
    writes: Layout
    specs: tuple[Spec, ...]
    channel_intervals: tuple[Interval, ...] | None = None
    summed: bool = False


def shard(node: Node, inputs: Sequence[Layout], output: Shape, use: Parallelism, context: SplitContext) -> OperatorSharding:
    """Return how `node` runs on all ranks.

    If a use has no rule for an operation, the operation runs on whole samples, which is always possible.

    Args:
        output: shape of the whole output.
        context: samples and tiles of the split group.
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
        # Each output feature depends on all input features, so every rank reads the whole input. Its gradients on the ranks are
        # added by the owners of its elements.
        intervals = even_intervals(spec.features_out, context.ranks)
        specs: Any = tuple(replace(spec, features_out=stop - start) for start, stop in intervals)
        reads = layout.everything(first.shape, context.ranks)
        return OperatorSharding((reads,), layout.channels(output, intervals), specs, intervals)
    if isinstance(spec, Conv2dSpec):
        return _model_conv(spec, first, output, context)
    if isinstance(spec, FlattenSpec):
        # In a flattened image all channels of one pixel come before those of the next. With several pixels, an interval of
        # channels is therefore not an interval of features.
        vectors = first.kind is LayoutKind.CHANNELS and first.shape[1] * first.shape[2] == 1
        return _per_channel(spec, inputs, output, context) if vectors else None
    return _per_channel(spec, inputs, output, context) if isinstance(spec, _PER_CHANNEL) else None


def _model_conv(spec: Conv2dSpec, x: Layout, output: Shape, context: SplitContext) -> OperatorSharding:
    """Split the output channels over the ranks; with groups, split whole groups with the input channels that they read."""
    if spec.groups == 1:
        intervals = even_intervals(spec.channels_out, context.ranks)
        specs = tuple(replace(spec, channels_out=stop - start) for start, stop in intervals)
        return OperatorSharding(
            (layout.everything(x.shape, context.ranks),), layout.channels(output, intervals), specs, intervals
        )
    # A rank reads the input channels of its groups only, so that no other channels are gathered.
    inside, outside = spec.channels_in // spec.groups, spec.channels_out // spec.groups
    groups = even_intervals(spec.groups, context.ranks)
    reads = layout.channels(x.shape, [(start * inside, stop * inside) for start, stop in groups])
    intervals = tuple((start * outside, stop * outside) for start, stop in groups)
    # Specs cannot be empty, so a rank without a group has the spec of one group; `_local` replaces it.
    specs = tuple(
        replace(spec, channels_in=max(1, n) * inside, channels_out=max(1, n) * outside, groups=max(1, n))
        for n in (stop - start for start, stop in groups)
    )
    return OperatorSharding((reads,), layout.channels(output, intervals), specs, intervals)


def _per_channel(spec: Spec, inputs: Sequence[Layout], output: Shape, context: SplitContext) -> OperatorSharding:
    """Split the operation by channels, so that each rank keeps its channels of the first input and nothing is moved.

    If the first input is not split by channels, the split is even.
    """
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
        # Each rank sums its tile, divided by the pixels of the whole image; the owners of the samples add the sums. For other
        # output sizes the windows overlap at the edges of tiles, so they run on whole samples.
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
            # A spec has one ceil mode for both dimensions, so a tail in the other dimension would add a window.
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
    """Return the field extended by the rank's elements after the last window, if they contain no further window.

    No window reads these elements, but with them the operation reads exactly the rank's elements, so nothing is copied. If they
    are fewer than a stride, they contain no further window.
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
    """Return the spec of one rank's part, which depends on the rank's box of the output.

    The box determines masks and the ranks that share statistics. A box without channels needs no work.
    """
    writes = sharding.writes
    box = writes.boxes[rank]
    if writes.kind is LayoutKind.CHANNELS and box[-1][0] == box[-1][1]:
        return NothingSpec(spec, shape_of(box))
    if isinstance(spec, BatchNormSpec):
        return _merged(spec, writes.kind)
    if isinstance(spec, DropoutSpec):
        # The mask depends on a sample's id and an element's place in the whole sample, so every sharding draws the same.
        split = writes.kind is not LayoutKind.SAMPLES and not spec.per_sample
        return replace(
            spec,
            first_sample=box[0][0],
            unsplit_shape=writes.shape[1:] if split else None,
            origin=tuple(start for start, _ in box[1:]) if split else (),
        )
    return spec


def _merged(spec: BatchNormSpec, kind: LayoutKind) -> BatchNormSpec:
    """Return the spec with the group of ranks that merge statistics.

    These ranks hold samples or tiles of this rank's channels.
    """
    if spec.fixed:  # it normalises by running statistics
        return spec
    if kind is LayoutKind.TILES:
        # A tile has the statistics of a part of an image only, so they are merged at least in the split group.
        return replace(spec, synchronised=True, merge="all" if spec.synchronised else "split")
    if kind is LayoutKind.CHANNELS:
        # This rank has its channels of all samples of its group, so only other split groups have further samples.
        return replace(spec, merge="data")
    return spec
