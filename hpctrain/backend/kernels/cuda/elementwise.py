"""Rectified linear units and residual sums."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.cuda.device import pack_width
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.kernels.abilities import InPlace
from hpctrain.backend.operators import StepContext
from hpctrain.backend.cuda.operator import CudaOperator
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.specs import AddSpec, ReluSpec, TensorSpec


class _Elementwise(InPlace, CudaOperator):
    """The launches that both share."""

    def _launch(self, kernel: str, *arrays: DeviceArray | None, adds: int | None = None) -> None:
        """A kernel over all elements of these arrays; None stands for a gradient that nobody asks for."""
        size, itemsize = self.output.size, self.output.item_bytes
        width = pack_width(itemsize, size, arrays)
        flags = () if adds is None else (np.int32(adds),)
        self.runtime.launch_items("elementwise", f"{kernel}_{self.tag}_w{width}", size // width, *arrays, *flags)

    def _pass_back(self, kernel: str, grads: tuple[DeviceArray | None, DeviceArray | None]) -> None:
        adds = sum(1 << i for i in range(2) if self.accumulates(i))
        if any(grad is not None for grad in grads):
            self._launch(kernel, self.buffers.output, self.output_grad, *grads, adds=adds)


class CudaRelu(_Elementwise):
    """y = max(x, 0)."""

    def __init__(self, spec: ReluSpec, x: TensorSpec, *, training: bool, runtime: CudaRuntime) -> None:
        super().__init__(spec, (x,), training=training, runtime=runtime)
        self.needs_output = training
        self.declare()

    def forward(self, context: StepContext) -> None:
        self._launch("relu_forward", self.buffers.inputs[0], self.buffers.output)

    def backward_input(self) -> None:
        self._pass_back("add_relu_backward", (self.input_grad(), None))


class CudaAdd(_Elementwise):
    """y = a + b, then ReLU where the spec says so. The gradient passes to both inputs."""

    def __init__(self, spec: AddSpec, *inputs: TensorSpec, training: bool, runtime: CudaRuntime) -> None:
        super().__init__(spec, inputs, training=training, runtime=runtime)
        self._relu = "relu_" if spec.relu else ""
        self.needs_output = training and spec.relu
        self.declare()

    def forward(self, context: StepContext) -> None:
        self._launch(f"add_{self._relu}forward", *self.buffers.inputs, self.buffers.output)

    def backward_input(self) -> None:
        first, second = (self._asked(i) for i in range(2))
        self._pass_back(f"add_{self._relu}backward", (first, second))

    def _asked(self, i: int) -> DeviceArray | None:
        """The gradient of an input; none where it shares the buffer of the output's, which no ReLU changes: it is complete."""
        grad = self.input_grad(i)
        shares = grad is not None and grad.pointer == self.output_grad.pointer
        return None if shares and not self._relu else grad
