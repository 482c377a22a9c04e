"""Halos that travel while the interior is computed: a convolution in three parts, as data.

The interior reads this rank's own image rows only; the edges above and below read the halo. Interior first, edges when their rows
have arrived; backward runs the other way around, so that the edges' gradients travel while the interior's are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.backend.kernels.abilities import AnyArrays
from hpctrain.backend.operators import Operator, StepContext
from hpctrain.backend.specs import Conv2dSpec, Spec, TensorSpec, Window
from hpctrain.core.intervals import Interval, consecutive, replace_dim, whole
from hpctrain.core.errors import ShapeError
from hpctrain.parallel import layout
from hpctrain.parallel.layout import Layout, LayoutKind
from hpctrain.parallel.receptive_field import local_window, window_receptive_field
from hpctrain.parallel.sharding_rules import OperatorSharding

_HEIGHT = 1


@dataclass(frozen=True)
class ConvolutionPart:
    """Some output rows of a convolution on all ranks: the layouts that are read and written, and each rank's own spec."""

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
    """Why a layer is not computed in parts: `reason` follows its name in a sentence. by_size: other images could change it."""

    reason: str
    by_size: bool = False


def split_interior(spec: Spec, sharding: OperatorSharding, owned: Layout) -> InteriorSplit | NoInterior:
    """The three parts, or the reason why there are none. owned: the layout of the input.

    The images must be split by height alone, and every rank must have an interior that can be computed from its own rows as they
    lie: all ranks cut the layer, or none does, since moves are collective.
    """
    if not isinstance(spec, Conv2dSpec):
        return NoInterior("is no convolution")
    if sharding.writes.kind is not LayoutKind.TILES:
        return NoInterior("is not under domain")
    if owned.kind is not LayoutKind.TILES:
        first = owned.kind is LayoutKind.NEEDED  # only the images themselves are given to a rank with their halo
        return NoInterior("reads its halo from the data file" if first else "reads what is not split by rows")
    (reads,) = sharding.reads
    if reads.boxes == owned.boxes:
        window = spec.window
        return NoInterior("reads no row of another rank", by_size=(window.extent[0], window.stride[0]) != (1, 1))
    # Tiles have halos on all four sides, whose corners two edges would read.
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
    if not all(_fits(read, box) for read, box in zip(interior.reads.boxes, owned.boxes, strict=True)):
        return NoInterior("has an interior that does not read all rows of its rank, which would have to be copied", by_size=True)
    return InteriorSplit(top, ConvolutionPart(owned, interior.writes, interior.specs), bottom)


def _interior(window: Window, height: int, owned: Interval, output: Interval) -> Interval | None:
    """Output rows that read own rows (and the image's padding) only; None where there are none.

    Output row o reads input rows [o stride - padding, o stride - padding + extent): the first interior row is the least o that
    begins at or after the first own row, the last one the greatest o that ends at or before the last. The image's own edges are
    no boundary, as padding needs nobody.
    """
    extent, stride, padding = window.extent[0], window.stride[0], window.padding[0]
    low = output[0] if owned[0] == 0 else max(output[0], -(-(owned[0] + padding) // stride))
    high = output[1] if owned[1] == height else min(output[1], (owned[1] + padding - extent) // stride + 1)
    return (low, high) if low < high else None


def _part(spec: Conv2dSpec, sharding: OperatorSharding, owned: Layout, of_ranks: Sequence[Interval]) -> ConvolutionPart:
    """The part that writes output rows `of_ranks[r]` on rank r."""
    reads, writes, specs = [], [], []
    for output_box, rows in zip(sharding.writes.boxes, of_ranks, strict=True):
        vertical, horizontal = window_receptive_field(spec.window, (owned.shape[1], owned.shape[2]), (rows, output_box[2]))
        # The ranks' boxes differ in rows alone; samples and channels are the whole tensor's.
        box = replace_dim(sharding.reads[0].boxes[0], 2, (horizontal.start, horizontal.stop))
        reads.append(replace_dim(box, _HEIGHT, (vertical.start, vertical.stop)))
        writes.append(replace_dim(output_box, _HEIGHT, rows))
        specs.append(spec.with_window(local_window(spec.window, vertical, horizontal)))
    return ConvolutionPart(layout.needed(owned.shape, reads), layout.needed(sharding.writes.shape, writes), tuple(specs))


def _fits(read: tuple[Interval, ...], owned: tuple[Interval, ...]) -> bool:
    """True where the interior reads all of this rank's rows, and columns from the first one on, so that no copy is needed."""
    return read[_HEIGHT] == owned[_HEIGHT] and read[2][0] == owned[2][0]


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


class JoinRowsOperator(AnyArrays, Operator):
    """Copies forward, and gradients back."""

    def __init__(self, spec: JoinRowsSpec, inputs: tuple[TensorSpec, ...]) -> None:
        self.spec, self.inputs, self.output = spec, inputs, spec.output(*inputs)
        self.needs_inputs = (False,) * len(inputs)
        rows = consecutive([x.shape[_HEIGHT] for x in inputs])
        self._places = [replace_dim(whole(self.output.shape), _HEIGHT, interval) for interval in rows]

    def forward(self, context: StepContext) -> None:
        for x, place in zip(self.buffers.inputs, self._places, strict=True):
            self.arithmetic.copy_box(self.buffers.output, place, x, whole(x.shape))

    def backward_input(self) -> None:
        dy = self.buffers.output_grad
        assert dy is not None
        for dx, place in zip(self.buffers.input_grads, self._places, strict=True):
            if dx is not None:
                self.arithmetic.copy_box(dx, whole(dx.shape), dy, place)
