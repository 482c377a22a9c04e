"""Rectified linear units."""

from __future__ import annotations

from hpctrain.backend.cuda.device import pack_width
from hpctrain.backend.kernels.abilities import InPlace
from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.cuda.operator import CudaOperator
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.kernels.specs import ReluSpec, TensorSpec


class CudaRelu(InPlace, CudaOperator):
    """y = max(x, 0)."""

    def __init__(self, spec: ReluSpec, x: TensorSpec, *, training: bool, runtime: CudaRuntime) -> None:
        super().__init__(spec, (x,), training=training, runtime=runtime)
        self.needs_output = training
        self.declare()

    def forward(self, context: StepContext) -> None:
        x, y = self.buffers.inputs[0], self.buffers.output
        width = pack_width(x.itemsize, x.size, (x, y))
        self.runtime.launch_items("elementwise", f"relu_forward_{self.tag}_w{width}", x.size // width, x, y)

    def backward_input(self) -> None:
        raise NotImplementedError
