"""The rules of distribution: how one operation runs on the ranks of the ROW axis, by its kind and its use.

Gholami et al. 2018: BATCH splits the samples; MODEL splits a weight's rows (output channels, section 2.2), with everything that
works per channel done before the gather; DOMAIN splits the images (section 2.3). Pure data, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from hpctrain.backend.kernels.graph import Node
from hpctrain.backend.kernels.specs import (
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
from hpctrain.boxes import Interval, even_intervals, replace_dim, shape_of, whole
from hpctrain.parallel import layout
from hpctrain.parallel.layout import Layout, LayoutKind
from hpctrain.parallel.parallel_plan import Parallelism
from hpctrain.parallel.receptive_field import ReceptiveField, local_window, window_receptive_field
from hpctrain.parallel.redistribute import NothingSpec, PartialMeanSpec

_ANY_CHANNELS = (BatchNormSpec, ReluSpec, AddSpec, DropoutSpec)  # per element or per channel: any split keeps them whole
_PER_CHANNEL = (*_ANY_CHANNELS, PoolSpec, AdaptiveAveragePoolSpec)


@runtime_checkable
class Windowed(Protocol):
    """A spec whose spatial reach is a window; `window` None: it has none."""

    @property
    def window(self) -> Window | None: ...

    def with_window(self, window: Window) -> Spec:
        """The same operation with another padding."""
        ...


@dataclass(frozen=True)
class SplitContext:
    """What the rules need beside the node: Pr, the samples of each rank of the column, and the tiles of an image."""

    counts: tuple[int, ...]
    tiles: Pair

    @property
    def ranks(self) -> int:
        return len(self.counts)


@dataclass(frozen=True)
class OperatorSharding:
    """One operation on all ranks: what each reads of every input, what it writes, and its own spec.

    shard: for each rank, the interval of output channels that it holds of all parameters and statistics; None: all of them.
    summed: the output is a partial sum on every rank; `writes` is its layout after the sum.
    """

    reads: tuple[Layout, ...]
    writes: Layout
    specs: tuple[Spec, ...]
    shard: tuple[Interval, ...] | None = None
    summed: bool = False


def shard(node: Node, inputs: Sequence[Layout], output: Shape, use: Parallelism, setting: SplitContext) -> OperatorSharding:
    """How `node` runs. inputs: where its inputs lie; output: the whole output's shape."""
    images = len(inputs[0].shape) == 4
    if use is Parallelism.MODEL:
        found = _model(node.spec, inputs, output, setting)
    elif use is Parallelism.DOMAIN and images:
        found = _domain(node.spec, inputs, output, setting)
    else:
        found = None
    placement = found if found is not None else _batch(node.spec, inputs, output, setting)
    return replace(placement, specs=tuple(_local(spec, placement, rank) for rank, spec in enumerate(placement.specs)))


def _batch(spec: Spec, inputs: Sequence[Layout], output: Shape, setting: SplitContext) -> OperatorSharding:
    reads = tuple(layout.samples(each.shape, setting.counts) for each in inputs)
    return OperatorSharding(reads, layout.samples(output, setting.counts), (spec,) * setting.ranks)


def _model(spec: Spec, inputs: Sequence[Layout], output: Shape, setting: SplitContext) -> OperatorSharding | None:
    (first, *_) = inputs
    if isinstance(spec, LinearSpec):
        parts = even_intervals(spec.features_out, setting.ranks)
        specs: Any = tuple(replace(spec, features_out=stop - start) for start, stop in parts)
        reads = layout.everything(first.shape, setting.ranks)
        return OperatorSharding((reads,), layout.channels(output, parts), specs, parts)
    if isinstance(spec, Conv2dSpec):
        return _model_conv(spec, first, output, setting)
    if isinstance(spec, FlattenSpec):
        vectors = first.kind is LayoutKind.CHANNELS and first.shape[1] * first.shape[2] == 1
        return _per_channel(spec, inputs, output, setting) if vectors else None
    return _per_channel(spec, inputs, output, setting) if isinstance(spec, _PER_CHANNEL) else None


def _model_conv(spec: Conv2dSpec, x: Layout, output: Shape, setting: SplitContext) -> OperatorSharding:
    """Output channels over the ranks; with groups, whole groups with the input channels that they read."""
    if spec.groups == 1:
        parts = even_intervals(spec.channels_out, setting.ranks)
        specs = tuple(replace(spec, channels_out=stop - start) for start, stop in parts)
        return OperatorSharding((layout.everything(x.shape, setting.ranks),), layout.channels(output, parts), specs, parts)
    inside, outside = spec.channels_in // spec.groups, spec.channels_out // spec.groups
    groups = even_intervals(spec.groups, setting.ranks)
    reads = layout.channels(x.shape, [(start * inside, stop * inside) for start, stop in groups])
    parts = tuple((start * outside, stop * outside) for start, stop in groups)
    specs = tuple(
        replace(spec, channels_in=max(1, n) * inside, channels_out=max(1, n) * outside, groups=max(1, n))
        for n in (stop - start for start, stop in groups)
    )
    return OperatorSharding((reads,), layout.channels(output, parts), specs, parts)


def _per_channel(spec: Spec, inputs: Sequence[Layout], output: Shape, setting: SplitContext) -> OperatorSharding:
    """Keeps the channels where its first input has them."""
    (first, *_) = inputs
    parts = (
        tuple(box[-1] for box in first.boxes)
        if first.kind is LayoutKind.CHANNELS
        else even_intervals(first.shape[-1], setting.ranks)
    )
    reads = tuple(layout.channels(each.shape, parts) for each in inputs)
    specs: Any = (spec,) * setting.ranks
    if isinstance(spec, BatchNormSpec):
        specs = tuple(replace(spec, channels=stop - start) for start, stop in parts)
    return OperatorSharding(reads, layout.channels(output, parts), specs, parts)


def _domain(spec: Spec, inputs: Sequence[Layout], output: Shape, setting: SplitContext) -> OperatorSharding | None:
    window = getattr(spec, "window", None)
    if window is not None and isinstance(spec, Windowed):
        return _domain_window(spec, window, inputs[0], output, setting)
    tiled = tuple(layout.tiles(each.shape, setting.tiles) for each in inputs)
    if isinstance(spec, AdaptiveAveragePoolSpec) and spec.size == (1, 1):
        height, width = inputs[0].shape[1:3]
        specs: Any = (PartialMeanSpec(height * width),) * setting.ranks
        return OperatorSharding(tiled, layout.samples(output, setting.counts), specs, summed=True)
    if isinstance(spec, _ANY_CHANNELS):
        return OperatorSharding(tiled, layout.tiles(output, setting.tiles), (spec,) * setting.ranks)
    return None


def _domain_window(spec: Windowed, window: Window, x: Layout, output: Shape, setting: SplitContext) -> OperatorSharding:
    writes = layout.tiles(output, setting.tiles)
    reaches = [window_receptive_field(window, (x.shape[1], x.shape[2]), (box[1], box[2])) for box in writes.boxes]
    if x.kind is LayoutKind.TILES:
        reaches = [
            (vertical, horizontal)
            if vertical.ceil or horizontal.ceil  # of both dims, where the tail would give another window
            else (_with_tail(vertical, own[1], window.stride[0]), _with_tail(horizontal, own[2], window.stride[1]))
            for (vertical, horizontal), own in zip(reaches, x.boxes, strict=True)
        ]
    boxes = []
    for vertical, horizontal in reaches:
        box = replace_dim(whole(x.shape), 1, (vertical.start, vertical.stop))
        boxes.append(replace_dim(box, 2, (horizontal.start, horizontal.stop)))
    specs = tuple(_with_receptive_field(spec, window, vertical, horizontal) for vertical, horizontal in reaches)
    return OperatorSharding((layout.needed(x.shape, boxes),), writes, specs)


def _with_tail(reach: ReceptiveField, own: Interval, stride: int) -> ReceptiveField:
    """Own elements behind the last window are read along, where that gives no further window: then nothing need be copied."""
    ends_inside = reach.start < reach.stop < own[1] and reach.after == 0
    if ends_inside and reach.start == own[0] and own[1] - reach.stop < stride:
        return replace(reach, stop=own[1])
    return reach


def _with_receptive_field(spec: Windowed, window: Window, vertical: ReceptiveField, horizontal: ReceptiveField) -> Spec:
    local = spec.with_window(local_window(window, vertical, horizontal))
    if isinstance(local, PoolSpec):
        return replace(local, ceil_mode=vertical.ceil or horizontal.ceil)
    return local


def _local(spec: Spec, placement: OperatorSharding, rank: int) -> Spec:
    """What depends on where the output lies: masks, the ranks that share statistics, and nothing at all."""
    writes = placement.writes
    box = writes.boxes[rank]
    if writes.kind is LayoutKind.CHANNELS and box[-1][0] == box[-1][1]:
        return NothingSpec(spec, shape_of(box))
    if isinstance(spec, BatchNormSpec):
        return _merged(spec, writes.kind)
    if isinstance(spec, DropoutSpec):
        split = writes.kind is not LayoutKind.SAMPLES
        return replace(
            spec,
            first_sample=box[0][0],
            unsplit_shape=writes.shape[1:] if split else None,
            origin=tuple(start for start, _ in box[1:]) if split else (),
        )
    return spec


def _merged(spec: BatchNormSpec, kind: LayoutKind) -> BatchNormSpec:
    """Whose statistics they are: of the ranks that hold samples, or parts of images, of these channels."""
    if kind is LayoutKind.TILES:
        return replace(spec, synchronised=True, merge="all" if spec.synchronised else "split")
    if kind is LayoutKind.CHANNELS:
        return replace(spec, merge="data")
    return spec
