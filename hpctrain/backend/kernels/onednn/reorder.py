"""Copies between layouts."""

from __future__ import annotations

from hpctrain.backend.kernels.abilities import Accumulating
from hpctrain.backend.operators import Array, Buffers, Operator, StepContext
from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.binding import Attributes, Call, Descriptor, Engine, Primitive
from hpctrain.backend.onednn.operator import images
from hpctrain.backend.specs import TensorSpec


class Copy:
    """A prepared reorder between two formats of one logical tensor, without its memory.

    Args:
        accumulate: add to the target instead of writing it.
    """

    def __init__(self, engine: Engine, what: str, source: Descriptor, target: Descriptor, *, accumulate: bool = False) -> None:
        self.source, self.target = source, target
        attributes = Attributes(engine, accumulate=accumulate)
        self._primitive = Primitive(engine, "reorder", what, source, engine, target, engine, attributes)

    @property
    def scratchpad_bytes(self) -> int:
        return self._primitive.scratchpad_bytes

    def bind(self, source: Array, target: Array, scratch: Array | None = None) -> Call:
        """The call on fixed memory."""
        return self._primitive.bind({c.ARG_SRC: (self.source, source), c.ARG_DST: (self.target, target)}, scratch)


class ReorderOperator(Accumulating, Operator):
    """y = x in another layout; backward copies the gradient back."""

    def __init__(self, engine: Engine, source: TensorSpec, target: TensorSpec, *, training: bool = True) -> None:
        self.inputs, self.output = (source,), target
        what = f"reorder {source.shape} {source.layout} -> {target.layout}"
        x, y = images(engine, source), images(engine, target)
        self._forward_copy = Copy(engine, what, x, y)
        self._backward_copies = {
            accumulate: Copy(engine, f"{what} backward", y, x, accumulate=accumulate) for accumulate in (False, True)
        }
        self.scratch_bytes = max(copy.scratchpad_bytes for copy in (self._forward_copy, *self._backward_copies.values()))

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self._forward = self._forward_copy.bind(buffers.inputs[0], buffers.output, buffers.scratch)
        self._backward: Call | None = None
        if buffers.input_grads and buffers.input_grads[0] is not None:
            copy = self._backward_copies[buffers.accumulate[0]]
            self._backward = copy.bind(buffers.output_grad, buffers.input_grads[0], buffers.scratch)

    def forward(self, context: StepContext) -> None:
        self._forward()

    def backward_input(self) -> None:
        if self._backward is not None:
            self._backward()
