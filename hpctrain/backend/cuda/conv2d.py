"""Convolution by plans of the device (cuDNN's on a GPU), or as matrix products.

A convolution is a product of pixels if its window is one pixel, and of patches if pixels have few channels.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.cuda.device import PLAN_ALIGNMENT_BYTES, ConvolutionKey, DeviceArray, DeviceConvolution, pack_width
from hpctrain.backend.cuda.operator import ColumnSums, CudaOperator, CudaOperatorBase, carve, total_bytes
from hpctrain.backend.cuda.runtime import THREADS, CudaRuntime
from hpctrain.backend.operators import Buffers, OutputReadOnce, Request, StepContext
from hpctrain.backend.specs import Conv2dSpec, Spec, TensorSpec, WithRelu, item_bytes


class CudaConv2d(OutputReadOnce, CudaOperatorBase):
    """Convolution y (N, Ho, Wo, K) of x (N, H, W, C) with weight (K, R, S, C / groups) and bias (K), in the dtype of activations.

    The plan that adds the bias also computes a ReLU after it. Backward then reads the output. In one pass it replaces the
    output's gradient by the gradient before the ReLU, and sums it for the bias.

    Plans overwrite their results, so the operator is not `Accumulating`. Adding to the input's gradient would need scratch as
    large as x in every convolution. A program instead has partial gradients only for tensors with several readers, with the same
    memory traffic.

    For bfloat16 activations, the weight's gradient is written in bfloat16 and then cast, because cuDNN 9.19 has no plan from
    bfloat16 to float32. Plans require arrays aligned to 16 bytes, but parameters are packed without gaps. Parameters that are not
    aligned are copied to or from scratch. If the output has no elements, there is no plan, and the gradients of parameters are
    zero.
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
        """Return the operations that the forward plan includes after the convolution.

        A ReLU alone is not fused: cuDNN 9.19 would compile it at run time.
        """
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
        """Compute the gradient before the ReLU, and its sum (the bias's gradient), unless this backward has already done so."""
        if self._sums is not None and not self._finished:
            sums, partial = self._arrays["sums"]
            if self.conv.bias:
                sums = self.buffers.gradients["bias"]
            self._sums.run(self.output_grad, sums, partial, relu=self.buffers.output if self._relu else None)
        self._finished = True

    def _aligned(self, role: str, copy: DeviceArray) -> DeviceArray:
        """Return an aligned array with a parameter's values: the parameter itself, or `copy`."""
        value = self._values[role]
        if _is_aligned(value):
            return value
        self._arithmetic.copy(copy, value)
        return copy


def _is_aligned(array: DeviceArray) -> bool:
    return array.pointer % PLAN_ALIGNMENT_BYTES == 0


def _workspace(plan: DeviceConvolution | None) -> Request:
    return ((0 if plan is None else plan.workspace_bytes,), "uint8")


_PACK_BYTES = 16
_BLOCKS = 32  # blocks per multiprocessor
_MOST_ELEMENTS = 2**31 - 1  # limit of the 32-bit counts of patches.cu


class _Products(CudaOperator):
    """A convolution without bias as y (rows, K) = a (rows, width) @ weight (K, width)^T, with one row per output pixel.

    Products are summed in the dtype of parameters, which is also the dtype of the weight's gradient.
    """

    def __init__(self, spec: Conv2dSpec, x: TensorSpec, *, training: bool, runtime: CudaRuntime, arithmetic: Arithmetic) -> None:
        super().__init__(spec, (x,), training=training, runtime=runtime)
        self.conv, self._arithmetic = spec, arithmetic
        self.needs_inputs = (training,)
        self._values: DeviceArray | None = None

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self._values = {**buffers.parameters, **buffers.shadows}["weight"]
        assert self._values.dtype == self.dtype, f"the weight of a convolution in {self.dtype} is {self._values.dtype}"

    @property
    def _weight(self) -> DeviceArray:
        assert self._values is not None
        return self._values.reshape(self.conv.channels_out, -1)


class CudaPointwiseConv2d(_Products):
    """1x1 convolution without bias, with stride 1, no padding and one group.

    cuBLAS can add the input's gradient to the gradients of other readers of the input.
    """

    @staticmethod
    def fits(spec: Spec) -> bool:
        """Return whether this class can compute the convolution."""
        if not isinstance(spec, Conv2dSpec) or spec.bias or spec.groups != 1:
            return False
        window = spec.window
        return window.kernel == window.stride == (1, 1) and not any(window.padding)

    def forward(self, context: StepContext) -> None:
        if self.output.size:
            self.runtime.multiply(_rows(self.buffers.inputs[0]), self._weight, _rows(self.buffers.output), transpose_b=True)

    def backward_parameters(self) -> None:
        gradient = self.buffers.gradients["weight"]
        if self.output.size:
            gradient = gradient.reshape(self.conv.channels_out, -1)
            self.runtime.multiply(_rows(self.output_grad), _rows(self.buffers.inputs[0]), gradient, transpose_a=True)
        else:
            self._arithmetic.fill(gradient, 0.0)

    def backward_input(self) -> None:
        grad = self.input_grad()
        if grad is not None and grad.size:
            self.runtime.multiply(_rows(self.output_grad), self._weight, _rows(grad), accumulate=self.accumulates())


class CudaPatchConv2d(_Products):
    """A convolution of pixels with so few channels that tensor cores would mostly multiply zeros: a network's first convolution.

    A kernel copies the patch of x under each window to a row of `patches`, whose width is a multiple of a pack. Forward saves the
    patches for the weight's gradient. Their size is about that of x times the ratio of the window's area to the stride's area:
    3.8 MB for an image of 224 x 224 in bfloat16, with 7 x 7 windows and stride 2. The input has no gradient.
    """

    def __init__(self, spec: Conv2dSpec, x: TensorSpec, *, training: bool, runtime: CudaRuntime, arithmetic: Arithmetic) -> None:
        super().__init__(spec, x, training=training, runtime=runtime, arithmetic=arithmetic)
        pack = _PACK_BYTES // item_bytes(self.dtype)
        self._packs = -(-math.prod(spec.weight_shape[1:]) // pack)
        width = self._packs * pack
        patches = ((math.prod(self.output.shape[:3]), width), self.dtype)
        padded = ((spec.channels_out, width), self.dtype)
        gradient = ((spec.channels_out, width), runtime.parameter_dtype)
        if training:
            self.declare(saved=[patches], scratch=[padded, gradient])
        else:
            self.declare(scratch=[patches, padded])

    @staticmethod
    def fits(spec: Spec, x: TensorSpec, *, input_gradient: bool) -> bool:
        """Return whether this class can compute the convolution: one group, few channels, no bias, dilation or input gradient.

        A pixel must have fewer channels than a pack of 16 bytes. A block needs a thread for each pack of a row of patches. 32-bit
        integers must suffice to count the elements of the image's rows that a window covers.
        """
        if not isinstance(spec, Conv2dSpec) or spec.bias or spec.groups != 1 or input_gradient:
            return False
        window, pack = spec.window, _PACK_BYTES // item_bytes(x.dtype)
        packs = -(-math.prod(spec.weight_shape[1:]) // pack)
        covered = window.kernel[0] * x.shape[2] * spec.channels_in
        return window.dilation == (1, 1) and spec.channels_in < pack and packs <= THREADS and covered <= _MOST_ELEMENTS

    def forward(self, context: StepContext) -> None:
        if not self.output.size:
            return
        self._copy_patches()
        padded = self.scratch[0] if self.training else self.scratch[1]
        self._arithmetic.fill(padded, 0.0)
        weight = self._weight
        self._arithmetic.copy_box(padded, _whole(weight), weight, _whole(weight))
        self.runtime.multiply(self._patches, padded, _rows(self.buffers.output), transpose_b=True)

    def backward_parameters(self) -> None:
        gradient = self.buffers.gradients["weight"]
        if not self.output.size:
            self._arithmetic.fill(gradient, 0.0)
            return
        gradient, padded = gradient.reshape(self.conv.channels_out, -1), self.scratch[1]
        self.runtime.multiply(_rows(self.output_grad), self._patches, padded, transpose_a=True)
        self._arithmetic.copy_box(gradient, _whole(gradient), padded, _whole(gradient))

    def backward_input(self) -> None:
        assert self.input_grad() is None, "the input of these convolutions has no gradient"

    @property
    def _patches(self) -> DeviceArray:
        return self.saved[0] if self.training else self.scratch[0]

    def _copy_patches(self) -> None:
        x, window = self.buffers.inputs[0], self.conv.window
        _, height, width, channels = x.shape
        images, rows, columns, _ = self.output.shape
        high = max(1, THREADS // self._packs)
        count = images * rows * columns
        grid = (min(-(-count // high), _BLOCKS * self.runtime.device.multiprocessors),)
        (step_y, step_x), (top, _, left, _) = window.stride, window.padding
        sizes = height, width * channels, rows, columns, step_y, step_x * channels, top, left * channels
        arguments = *sizes, window.kernel[0], window.kernel[1] * channels
        block = (self._packs, high)
        self.runtime.launch(
            "patches", f"patches_{self.tag}", grid, block, x, self._patches, *map(np.int32, arguments), np.int64(count)
        )


def _rows(array: DeviceArray) -> DeviceArray:
    """Return NHWC memory as (pixels, channels)."""
    return array.reshape(-1, array.shape[-1])


def _whole(array: DeviceArray) -> tuple[tuple[int, int], ...]:
    """Return the box that contains all elements."""
    return tuple((0, size) for size in array.shape)
