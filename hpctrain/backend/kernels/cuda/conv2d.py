"""Convolution by the plans of a device: cuDNN's on a GPU."""

from __future__ import annotations

from typing import Literal

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.cuda.device import PLAN_ALIGNMENT_BYTES, ConvolutionKey, DeviceConvolution
from hpctrain.backend.cuda.device_array import DeviceArray
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
    to float32. Parameters lie without gaps in their group, but plans read and write at multiples of 16 bytes: those that do not
    begin at one go by way of scratch. Without pixels there is no plan: the output is empty, gradients of parameters are zero.
    """

    def __init__(
        self,
        spec: Conv2dSpec,
        x: TensorSpec,
        *,
        training: bool,
        input_gradient: bool = True,
        runtime: CudaRuntime,
        arithmetic: Arithmetic,
    ) -> None:
        super().__init__(spec, (x,), training=training, runtime=runtime)
        self.conv = spec
        self.needs_inputs = (training,)
        self._arithmetic = arithmetic
        self._empty = self.output.size == 0
        self._forward = self._plan("forward")
        self._weight = self._plan("weight") if training else None
        self._input = self._plan("input") if training and input_gradient else None
        n, ho, wo, channels = self.output.shape
        self._sums = ColumnSums(n * ho * wo, channels, self.dtype, runtime) if training and spec.bias else None
        weight, bias, sums = (spec.weight_shape, self.dtype), ((channels,), self.dtype), ((0,), runtime.parameter_dtype)
        self._requests: dict[str, list[Request]] = {
            "forward": [_workspace(self._forward), weight, bias],
            "parameters": [_workspace(self._weight), weight, sums if self._sums is None else self._sums.scratch],
            "input": [_workspace(self._input), weight],
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
        if self._forward is None:
            return
        workspace, *copies = self._arrays["forward"]
        weight = self._aligned("weight", copies[0])
        bias = self._aligned("bias", copies[1]) if self.conv.bias else None
        self._forward.run(self.runtime.stream, self.buffers.inputs[0], weight, self.buffers.output, workspace, bias)

    def backward_parameters(self) -> None:
        workspace, rounded, partial = self._arrays["parameters"]
        gradient, dy = self.buffers.gradients["weight"], self.output_grad
        if self._weight is None:
            self._arithmetic.fill(gradient, 0.0)
        else:
            target = gradient if gradient.dtype == self.dtype and _is_aligned(gradient) else rounded
            self._weight.run(self.runtime.stream, self.buffers.inputs[0], dy, target, workspace)
            if target is rounded:
                self._arithmetic.copy(gradient, rounded)
        if self._sums is not None:
            self._sums.run(dy, self.buffers.gradients["bias"], partial)

    def backward_input(self) -> None:
        grad, (workspace, weight) = self.input_grad(), self._arrays["input"]
        if grad is not None and self._input is not None:
            self._input.run(self.runtime.stream, self.output_grad, self._aligned("weight", weight), grad, workspace)

    def _aligned(self, role: str, copy: DeviceArray) -> DeviceArray:
        """A parameter's values where plans can read them: its own memory, or a copy."""
        value = self._values[role]
        if _is_aligned(value):
            return value
        self._arithmetic.copy(copy, value)
        return copy


def _is_aligned(array: DeviceArray) -> bool:
    return array.pointer % PLAN_ALIGNMENT_BYTES == 0


def _workspace(plan: DeviceConvolution | None) -> Request:
    return ((0 if plan is None else plan.workspace_bytes,), "uint8")
