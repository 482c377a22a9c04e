"""Zero channels around an image's own: the parameter-free shortcut of narrow residual networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hpctrain.backend.kernels.abilities import AnyArrays
from hpctrain.backend.operators import Operator, StepContext
from hpctrain.backend.specs import TensorSpec, Window
from hpctrain.core.intervals import Box
from hpctrain.core.errors import ShapeError
from hpctrain.nn.layers import Leaf


class PadChannels(Leaf):
    """y (N, H, W, before + C + after) from x (N, H, W, C): x between channels of zeros (He et al. 2016, option A).

    Args:
        before, after: channels of zeros, at least 0 each.

    Raises:
        ShapeError: a negative number of channels.
    """

    def __init__(self, before: int, after: int) -> None:
        if min(before, after) < 0:
            nearest = (max(before, 0), max(after, 0))
            raise ShapeError(f"Channels of padding {(before, after)} are negative; the nearest legal ones are {nearest}.")
        self._spec = PadChannelsSpec(before, after)

    def spec(self, name: str) -> PadChannelsSpec:
        return self._spec


@dataclass(frozen=True)
class PadChannelsSpec:
    """Brings its own operator: the arithmetic service of any kernel set does it."""

    before: int
    after: int
    window: ClassVar[Window] = Window((1, 1), (1, 1), (0, 0, 0, 0))  # every pixel by itself

    def with_window(self, window: Window) -> PadChannelsSpec:
        """A window of one pixel has no padding to change."""
        return self

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        return x.with_shape((*x.shape[:-1], self.before + x.shape[-1] + self.after))

    def flops(self, *inputs: TensorSpec) -> int:
        return 0

    def operator(self, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        return PadChannelsOperator(self, inputs[0])


class PadChannelsOperator(AnyArrays, Operator):
    """Copies into the middle channels; backward copies out of them."""

    def __init__(self, spec: PadChannelsSpec, x: TensorSpec) -> None:
        self.spec, self.inputs, self.output = spec, (x,), spec.output(x)
        self._all: Box = tuple((0, size) for size in x.shape)
        self._middle: Box = (*self._all[:-1], (spec.before, spec.before + x.shape[-1]))

    def forward(self, context: StepContext) -> None:
        self.arithmetic.fill(self.buffers.output, 0.0)
        self.arithmetic.copy_box(self.buffers.output, self._middle, self.buffers.inputs[0], self._all)

    def backward_input(self) -> None:
        target, dy = self.buffers.input_grads[0], self.buffers.output_grad
        assert target is not None
        assert dy is not None
        self.arithmetic.copy_box(target, self._all, dy, self._middle)
