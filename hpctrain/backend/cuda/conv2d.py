"""Convolution by the plans of a device: cuDNN's on a GPU."""

from __future__ import annotations

from typing import Literal

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.cuda.device import PLAN_ALIGNMENT_BYTES, ConvolutionKey, DeviceConvolution, pack_width
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.kernels.abilities import OutputReadOnce
from hpctrain.backend.operators import Buffers, StepContext
from hpctrain.backend.kernels.cuda.column_sums import ColumnSums
from hpctrain.backend.cuda.operator import CudaOperatorBase, Request, carve, total_bytes
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.kernels.fused_specs import WithRelu
from hpctrain.backend.specs import Conv2dSpec, TensorSpec


class CudaConv2d(OutputReadOnce, CudaOperatorBase):
    """y (N, Ho, Wo, K) from x (N, H, W, C), weight (K, R, S, C / groups), bias (K), all in the dtype of activations.

    A ReLU behind it is computed by the plan that adds the bias. Backward then reads the output, turns the output's gradient into
    that before the ReLU, and sums it up for the bias in the same pass.

    Plans write their results. So the input's gradient is not added to what is there (it is no `Accumulating`): scratch for it
    would be as large as x in every convolution, while a plan has a partial only where several gradients meet, and the traffic is
    the same. The weight's gradient is written in bfloat16 beside bfloat16 and then cast: cuDNN 9.19 has no plan from bfloat16
    to float32. Parameters lie without gaps in their group, but plans read and write at multiples of 16 bytes: those that do not
    begin at one go by way of scratch. Without pixels there is no plan: the output is empty, gradients of parameters are zero.
    """

    def __init__(
        self,
        spec: Conv2dSpec | WithRelu,
        x: TensorSpec,
        *,
        training: bool,
        input_gradient: bool = True,
        runtime: CudaRuntime,
        arithmetic: Arithmetic,
    ) -> None:
        super().__init__(spec, (x,), training=training, runtime=runtime)
        conv, self._relu = (spec.inner, True) if isinstance(spec, WithRelu) else (spec, False)
        assert isinstance(conv, Conv2dSpec)
        self.conv = conv
        self.needs_inputs, self.needs_output = (training,), training and self._relu
        self._arithmetic = arithmetic
        self._empty = self.output.size == 0
        self._forward = self._plan("forward")
        self._weight = self._plan("weight") if training else None
        self._input = self._plan("input") if training and input_gradient else None
        n, ho, wo, channels = self.output.shape
        sums, weight = ((channels,), runtime.parameter_dtype), (conv.weight_shape, self.dtype)
        self._sums = (
            ColumnSums(n * ho * wo, channels, self.dtype, runtime) if training and (self.conv.bias or self._relu) else None
        )
        self._requests: dict[str, list[Request]] = {
            "forward": [_workspace(self._forward), weight, ((channels,), self.dtype)],
            "sums": [] if self._sums is None else [sums, self._sums.scratch],
            "weight": [_workspace(self._weight), weight],
            "input": [_workspace(self._input), weight],
        }
        self.scratch_bytes = max(map(total_bytes, self._requests.values()))
        self._arrays: dict[str, list[DeviceArray]] = {}
        self._values: dict[str, DeviceArray] = {}
        self._finished = False

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
            self._fused() if kind == "forward" else "",
        )
        return self.runtime.device.convolution(key)

    def _fused(self) -> Literal["", "bias", "bias_relu"]:
        """Part of the plan of forward. A ReLU alone is not: cuDNN 9.19 would have to compile that at run time."""
        if not self.conv.bias:
            return ""
        return "bias_relu" if self._relu else "bias"

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self._arrays = {call: carve(buffers.scratch, requests) for call, requests in self._requests.items()}
        self._values = {**buffers.parameters, **buffers.shadows}
        for role, value in self._values.items():
            assert value.dtype == self.dtype, f"the {role} of a convolution in {self.dtype} is {value.dtype}"

    def forward(self, context: StepContext) -> None:
        self._finished = False
        if self._forward is None:
            return
        workspace, *copies = self._arrays["forward"]
        weight, y = self._aligned("weight", copies[0]), self.buffers.output
        bias = self._aligned("bias", copies[1]) if self.conv.bias else None
        self._forward.run(self.runtime.stream, self.buffers.inputs[0], weight, y, workspace, bias)
        if self._relu and bias is None:
            width = pack_width(y.itemsize, y.size, (y,))
            self.runtime.launch_items("elementwise", f"relu_forward_{self.tag}_w{width}", y.size // width, y, y)

    def backward_parameters(self) -> None:
        self._finish_output_grad()
        workspace, rounded = self._arrays["weight"]
        gradient = self.buffers.gradients["weight"]
        if self._weight is None:
            self._arithmetic.fill(gradient, 0.0)
            return
        target = gradient if gradient.dtype == self.dtype and _is_aligned(gradient) else rounded
        self._weight.run(self.runtime.stream, self.buffers.inputs[0], self.output_grad, target, workspace)
        if target is rounded:
            self._arithmetic.copy(gradient, rounded)

    def backward_input(self) -> None:
        self._finish_output_grad()
        grad, (workspace, weight) = self.input_grad(), self._arrays["input"]
        if grad is not None and self._input is not None:
            self._input.run(self.runtime.stream, self.output_grad, self._aligned("weight", weight), grad, workspace)

    def _finish_output_grad(self) -> None:
        """Sum up the gradient of the bias, of the gradient before the ReLU: once, whichever half of backward comes first."""
        if self._sums is not None and not self._finished:
            sums, partial = self._arrays["sums"]
            if self.conv.bias:
                sums = self.buffers.gradients["bias"]
            self._sums.run(self.output_grad, sums, partial, relu=self.buffers.output if self._relu else None)
        self._finished = True

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
