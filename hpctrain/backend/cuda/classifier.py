"""Fully connected layer: three matrix products by the device's library."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.cuda.device import pack_width
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.kernels.abilities import SufficientFactors
from hpctrain.backend.operators import Buffers, StepContext
from hpctrain.backend.kernels.cuda.column_sums import ColumnSums
from hpctrain.backend.kernels.cuda.images import check_images, row_launch
from hpctrain.backend.cuda.operator import CudaOperator, Request, carve, total_bytes
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.specs import LinearSpec, TensorSpec


class CudaLinear(SufficientFactors, CudaOperator):
    """y (N, out) = x (N, in) @ weight (in, out) + bias (out); weight in the dtype of activations, bias in that of parameters.

    All products sum in the dtype of parameters, and so are the gradients of weight and bias written. Beside bfloat16 the product
    goes to scratch in float32, so that the sum with the bias is rounded once.
    """

    def __init__(self, spec: LinearSpec, x: TensorSpec, *, training: bool, runtime: CudaRuntime, arithmetic: Arithmetic) -> None:
        super().__init__(spec, (x,), training=training, runtime=runtime)
        self.linear = spec
        self.needs_inputs = (training,)
        self._arithmetic = arithmetic
        samples, outputs = self.output.shape
        check_images("linear", (samples, 1, 1, outputs))
        self._sums = ColumnSums(samples, outputs, self.dtype, runtime) if training and spec.bias else None
        separate = spec.bias and runtime.parameter_dtype != self.dtype
        nothing: Request = ((0,), runtime.parameter_dtype)
        self._product: Request = (self.output.shape, runtime.parameter_dtype) if separate else nothing
        self._partial: Request = nothing if self._sums is None else self._sums.scratch
        self.scratch_bytes = max(total_bytes([self._product]), total_bytes([self._partial]))
        self._weight: DeviceArray | None = None

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        weight = {**buffers.parameters, **buffers.shadows}["weight"]
        assert weight.dtype == self.dtype, f"the weight of a linear layer in {self.dtype} is {weight.dtype}"
        self._weight = weight

    def _gemm(
        self,
        a: DeviceArray,
        b: DeviceArray,
        c: DeviceArray,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        accumulate: bool = False,
    ) -> None:
        self.runtime.device.gemm(
            self.runtime.stream,
            a,
            b,
            c,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            accumulate=accumulate,
            precision=self.runtime.precision,
        )

    def forward(self, context: StepContext) -> None:
        y = self.buffers.output
        if not y.size:
            return
        product = y
        if self._product[0] == y.shape:
            (product,) = carve(self.buffers.scratch, [self._product])
        assert self._weight is not None
        self._gemm(self.buffers.inputs[0], self._weight, product)
        if self.linear.bias:
            self._add_bias(product, y)

    def _add_bias(self, product: DeviceArray, y: DeviceArray) -> None:
        samples, outputs = y.shape
        width = pack_width(y.itemsize, outputs, (product, y))
        grid, block = row_launch(samples, outputs // width, self.runtime.device.multiprocessors)
        sizes = np.int32(outputs // width), np.int32(samples)
        kernel = f"add_bias_{self.tag}_w{width}"
        self.runtime.launch("linear", kernel, grid, block, product, self.buffers.parameters["bias"], y, *sizes)

    def backward_parameters(self) -> None:
        dy, gradient = self.output_grad, self.buffers.gradients["weight"]
        if dy.size:
            self._gemm(self.buffers.inputs[0], dy, gradient, transpose_a=True)
        else:
            self._arithmetic.fill(gradient, 0.0)
        if self._sums is not None:
            (partial,) = carve(self.buffers.scratch, [self._partial])
            self._sums.run(dy, self.buffers.gradients["bias"], partial)

    def backward_input(self) -> None:
        grad = self.input_grad()
        if grad is not None and grad.size:
            assert self._weight is not None
            self._gemm(self.output_grad, self._weight, grad, transpose_b=True, accumulate=self.accumulates())
