"""A convolution or linear layer of another kernel set with the ReLU that fusion put behind it."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.kernels.abilities import Accumulating, OutputReadOnce, SufficientFactors
from hpctrain.backend.operators import Buffers, Operator, StepContext
from hpctrain.backend.kernels.fused_specs import WithRelu
from hpctrain.backend.onednn.binding import Engine
from hpctrain.backend.onednn.elementwise import ReluMask
from hpctrain.backend.onednn.operator import elements


class RectifiedOperator(Accumulating, OutputReadOnce, Operator):
    """y = max(inner(x), 0), in place behind the inner operator; in plain memory.

    Args:
        inner: the operator of `spec.inner`.
    """

    needs_output = True

    def __init__(self, engine: Engine, spec: WithRelu, inner: Operator) -> None:
        self.spec, self._inner = spec, inner
        self.inputs, self.output = inner.inputs, inner.output
        self.needs_inputs = inner.needs_inputs
        self.saved_bytes, self.scratch_bytes = inner.saved_bytes, inner.scratch_bytes
        self._mask = ReluMask(engine, f"relu {self.output.shape} backward", elements(engine, self.output))
        self._masked = False

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self._inner.bind(buffers)
        if buffers.output_grad is not None:
            self._apply_mask = self._mask.bind(buffers.output, buffers.output_grad, buffers.output_grad)

    def forward(self, context: StepContext) -> None:
        self._inner.forward(context)
        np.maximum(self.buffers.output, 0, out=self.buffers.output)
        self._masked = False

    def finish_output_grad(self) -> None:
        """Once per backward, whichever half comes first."""
        if not self._masked:
            self._apply_mask()
            self._masked = True

    def backward_parameters(self) -> None:
        self.finish_output_grad()
        self._inner.backward_parameters()

    def backward_input(self) -> None:
        self.finish_output_grad()
        self._inner.backward_input()


class RectifiedLinearOperator(RectifiedOperator, SufficientFactors):
    """The same of a linear layer, whose factors are its input and the masked gradient."""
