"""Halos that travel while the interior is computed: a convolution in three parts, as data.

The interior reads this rank's own rows only; the edges above and below read the halo. Interior first, edges when their rows have
arrived; backward runs the other way around, so that the edges' gradients travel while the interior's are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.backend.kernels.base import Operator, StepContext
from hpctrain.backend.kernels.specs import Conv2dSpec, Spec, TensorSpec, Window
from hpctrain.boxes import Interval, replace_dim
from hpctrain.errors import ShapeError
from hpctrain.parallel import layout
from hpctrain.parallel.layout import Layout, LayoutKind
from hpctrain.parallel.receptive_field import local_window, window_receptive_field
from hpctrain.parallel.sharding_rules import OperatorSharding

_HEIGHT = 1


@dataclass(frozen=True)
class Part:
    """Some output rows of a convolution on all ranks: what each reads, what it writes, its own spec."""

    reads: Layout
    writes: Layout
    specs: tuple[Spec, ...]


@dataclass(frozen=True)
class InteriorSplit:
    """A convolution under DOMAIN in three parts."""

    top: Part
    interior: Part
    bottom: Part


@dataclass(frozen=True)
class Whole:
    """Why a layer is not computed in parts: `reason` follows its name in a sentence. by_size: other images could change it."""

    reason: str
    by_size: bool = False


def split_interior(spec: Spec, placement: OperatorSharding, own: Layout) -> InteriorSplit | Whole:
    """The three parts, or why there are none: the images must be split by height alone, and every rank must have an interior
    that can be computed from its own rows as they lie."""
    if not isinstance(spec, Conv2dSpec):
        return Whole("is no convolution")
    if placement.writes.kind is not LayoutKind.TILES:
        return Whole("is not under domain")
    if own.kind is not LayoutKind.TILES:
        first = own.kind is LayoutKind.NEEDED
        return Whole("reads its halo from the data file" if first else "reads what is not split by rows")
    (reads,) = placement.reads
    if reads.boxes == own.boxes:
        window = spec.window
        return Whole("reads no row of another rank", by_size=(window.extent[0], window.stride[0]) != (1, 1))
    if any(box[2] != (0, own.shape[2]) for box in own.boxes):
        return Whole("has images that are split by columns too (grid.tiles)")
    interiors = []
    for rank, (mine, made) in enumerate(zip(own.boxes, placement.writes.boxes, strict=True)):
        rows = _interior(spec.window, own.shape[_HEIGHT], mine[_HEIGHT], made[_HEIGHT])
        if rows is None:
            return Whole(f"leaves rank {rank} of a column no row to compute while its halo travels", by_size=True)
        interiors.append(rows)
    outputs = [box[_HEIGHT] for box in placement.writes.boxes]
    above = [(begin, low) for (begin, _), (low, _) in zip(outputs, interiors, strict=True)]
    below = [(high, end) for (_, end), (_, high) in zip(outputs, interiors, strict=True)]
    top, interior, bottom = (_part(spec, placement, own, parts) for parts in (above, interiors, below))
    if not all(_fits(box, mine) for box, mine in zip(interior.reads.boxes, own.boxes, strict=True)):
        return Whole("has an interior that does not read all rows of its rank, which would have to be copied", by_size=True)
    return InteriorSplit(top, Part(own, interior.writes, interior.specs), bottom)


def _interior(window: Window, height: int, own: Interval, output: Interval) -> Interval | None:
    """Output rows that read own rows (and the image's padding) only; None where there are none."""
    extent, stride, padding = window.extent[0], window.stride[0], window.padding[0]
    low = output[0] if own[0] == 0 else max(output[0], -(-(own[0] + padding) // stride))
    high = output[1] if own[1] == height else min(output[1], (own[1] + padding - extent) // stride + 1)
    return (low, high) if low < high else None


def _part(spec: Conv2dSpec, placement: OperatorSharding, own: Layout, parts: Sequence[Interval]) -> Part:
    reads, writes, specs = [], [], []
    for whole, rows in zip(placement.writes.boxes, parts, strict=True):
        vertical, horizontal = window_receptive_field(spec.window, (own.shape[1], own.shape[2]), (rows, whole[2]))
        box = replace_dim(placement.reads[0].boxes[0], 2, (horizontal.start, horizontal.stop))
        reads.append(replace_dim(box, _HEIGHT, (vertical.start, vertical.stop)))
        writes.append(replace_dim(whole, _HEIGHT, rows))
        specs.append(spec.with_window(local_window(spec.window, vertical, horizontal)))
    return Part(layout.needed(own.shape, reads), layout.needed(placement.writes.shape, writes), tuple(specs))


def _fits(read: tuple[Interval, ...], own: tuple[Interval, ...]) -> bool:
    """True where the interior reads all of this rank's rows, and columns from the first one on, so that no copy is needed."""
    return read[_HEIGHT] == own[_HEIGHT] and read[2][0] == own[2][0]


@dataclass(frozen=True)
class JoinRowsSpec:
    """y (N, h, W, C) from images whose rows follow each other."""

    def output(self, *inputs: Any, **none: Any) -> TensorSpec:
        n, _, width, channels = inputs[0].shape
        if any((x.shape[0], *x.shape[2:]) != (n, width, channels) for x in inputs):
            raise ShapeError(f"Images of shapes {[x.shape for x in inputs]} differ in more than their height.")
        return TensorSpec((n, sum(x.shape[1] for x in inputs), width, channels), inputs[0].dtype)

    def flops(self, *inputs: Any, **none: Any) -> int:
        return 0

    def operator(self, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        return JoinRowsOperator(self, inputs)


class JoinRowsOperator(Operator):
    """Copies forward, and back."""

    def __init__(self, spec: JoinRowsSpec, inputs: tuple[TensorSpec, ...]) -> None:
        self.spec, self.inputs, self.output = spec, inputs, spec.output(*inputs)
        self.needs_inputs = (False,) * len(inputs)
        ends = np.cumsum([x.shape[1] for x in inputs]).tolist()
        self._rows = [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]

    def forward(self, context: StepContext) -> None:
        for x, rows in zip(self.buffers.inputs, self._rows, strict=True):
            self.buffers.output[:, rows] = x

    def backward_input(self) -> None:
        dy = self.buffers.output_grad
        assert dy is not None
        for dx, rows in zip(self.buffers.input_grads, self._rows, strict=True):
            if dx is not None:
                dx[...] = dy[:, rows]
