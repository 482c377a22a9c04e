"""Fully connected layer: three matrix products."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.kernels.abilities import SufficientFactors
from hpctrain.backend.operators import StepContext
from hpctrain.backend.numpy.operator import NumpyOperator
from hpctrain.backend.kernels.numpy.reduce import column_sums
from hpctrain.backend.numpy.windows import split
from hpctrain.backend.specs import LinearSpec, TensorSpec

_BLOCK_BYTES = 1 << 20


class NumpyLinear(SufficientFactors, NumpyOperator):
    """y (N, out) = x (N, in) @ weight (in, out) + bias (out)."""

    def __init__(self, spec: LinearSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, (x,), training=training)
        self.bias = spec.bias
        self.needs_inputs = (training,)
        self.rows = min(x.shape[0], max(1, _BLOCK_BYTES // max(1, spec.features_in * x.item_bytes)))
        self.declare(scratch=[((self.rows, spec.features_in), self.dtype)] if training else [])

    def forward(self, context: StepContext) -> None:
        y = self.buffers.output
        np.matmul(self.buffers.inputs[0], self.buffers.parameters["weight"], out=y)
        if self.bias:
            np.add(y, self.buffers.parameters["bias"], out=y)

    def backward_parameters(self) -> None:
        np.matmul(self.buffers.inputs[0].T, self.output_grad, out=self.buffers.gradients["weight"])
        if self.bias:
            column_sums(self.output_grad, self.buffers.gradients["bias"])

    def backward_input(self) -> None:
        grad = self.input_grad()
        if grad is None:
            return
        weight = self.buffers.parameters["weight"].T
        if not self.accumulates():
            np.matmul(self.output_grad, weight, out=grad)
            return
        for low, high in split(grad.shape[0], self.rows):
            part = self.scratch[0][: high - low]
            np.matmul(self.output_grad[low:high], weight, out=part)
            np.add(grad[low:high], part, out=grad[low:high])
