"""Convolution by the plans of a device: cuDNN's on a GPU."""

from __future__ import annotations

from typing import Literal

from hpctrain.backend.cuda.device import ConvolutionKey, DeviceConvolution
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.dtypes import parameter_dtype
from hpctrain.backend.kernels.base import Buffers, StepContext
from hpctrain.backend.kernels.cuda.column_sums import ColumnSums
from hpctrain.backend.kernels.cuda.operator import CudaOperatorBase, Request, carve, total_bytes
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.kernels.specs import Conv2dSpec, TensorSpec


class CudaConv2d(CudaOperatorBase):
    """y (N, Ho, Wo, K) from x (N, H, W, C), weight (K, R, S, C / groups), bias (K), all in the dtype of activations.

    Plans write their results. So the input's gradient is not added to what is there (it is no `Accumulating`): scratch for it
    would be as large as x in every convolution, while a plan has a partial only where several gradients meet, and the traffic is
    the same. The weight's gradient is written in bfloat16 beside bfloat16 and then cast: cuDNN 9.19 has no plan from bfloat16
    to float32. Without pixels there is no plan: the output is empty, gradients of parameters are zero.
    """

    def __init__(
        self, spec: Conv2dSpec, x: TensorSpec, *, training: bool, input_gradient: bool = True, runtime: CudaRuntime
    ) -> None:
        super().__init__(spec, (x,), training=training, runtime=runtime)
        self.conv = spec
        self.needs_inputs = (training,)
        self._empty = self.output.size == 0
        self._rounds = parameter_dtype(self.dtype) != self.dtype
        self._forward = self._plan("forward")
        self._weight = self._plan("weight") if training else None
        self._input = self._plan("input") if training and input_gradient else None
        n, ho, wo, channels = self.output.shape
        self._bias = ColumnSums(n * ho * wo, channels, self.dtype, runtime) if training and spec.bias else None
        weight: Request = (spec.weight_shape if self._rounds and self._weight is not None else (0,), self.dtype)
        none: Request = ((0, 0), parameter_dtype(self.dtype))
        self._requests: dict[str, list[Request]] = {
            "forward": [_workspace(self._forward)],
            "parameters": [_workspace(self._weight), weight, none if self._bias is None else self._bias.scratch],
            "input": [_workspace(self._input)],
        }
        self.scratch_bytes = max(map(total_bytes, self._requests.values()))
        self._arrays: dict[str, list[DeviceArray]] = {}
        self._values: dict[str, DeviceArray] = {}

    def _plan(self, kind: Literal["forward", "input", "weight"]) -> DeviceConvolution | None:
        if self._empty:
            return None
        spec, window = self.conv, self.conv.window
        key = ConvolutionKey(
            kind,
            self.inputs[0].shape,
            spec.weight_shape,
            self.output.shape,
            window.stride,
            window.padding,
            window.dilation,
            spec.groups,
            self.dtype,
            self.runtime.precision,
            "bias" if spec.bias and kind == "forward" else "",
        )
        return self.runtime.device.convolution(key)

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self._arrays = {call: carve(buffers.scratch, requests) for call, requests in self._requests.items()}
        self._values = {**buffers.parameters, **buffers.shadows}
        for role, value in self._values.items():
            assert value.dtype == self.dtype, f"the {role} of a convolution in {self.dtype} is {value.dtype}"

    def forward(self, context: StepContext) -> None:
        if self._forward is not None:
            x, y, (workspace,) = self.buffers.inputs[0], self.buffers.output, self._arrays["forward"]
            self._forward.run(self.runtime.stream, x, self._values["weight"], y, workspace, self._values.get("bias"))

    def backward_parameters(self) -> None:
        workspace, rounded, partial = self._arrays["parameters"]
        gradient, dy = self.buffers.gradients["weight"], self.output_grad
        if self._weight is not None:
            target = rounded if self._rounds else gradient
            self._weight.run(self.runtime.stream, self.buffers.inputs[0], dy, target, workspace)
        if self._rounds or self._weight is None:
            written = None if self._weight is None else rounded
            kernel = f"weight_gradient_{self.tag}"
            self.runtime.launch_items("weight_gradient", kernel, gradient.size, written, gradient)
        if self._bias is not None:
            self._bias.run(dy, self.buffers.gradients["bias"], partial)

    def backward_input(self) -> None:
        grad, (workspace,) = self.input_grad(), self._arrays["input"]
        if grad is not None and self._input is not None:
            self._input.run(self.runtime.stream, self.output_grad, self._values["weight"], grad, workspace)


def _workspace(plan: DeviceConvolution | None) -> Request:
    return ((0 if plan is None else plan.workspace_bytes,), "uint8")
