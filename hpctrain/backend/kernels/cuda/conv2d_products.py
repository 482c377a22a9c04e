"""Convolutions as matrix products: of pixels if a window is one pixel, of patches if pixels have few channels."""

from __future__ import annotations

import math

import numpy as np

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.dtypes import item_bytes
from hpctrain.backend.operators import Buffers, StepContext
from hpctrain.backend.kernels.cuda.box_copy import copy_box
from hpctrain.backend.cuda.operator import CudaOperator
from hpctrain.backend.kernels.cuda.runtime import THREADS, CudaRuntime
from hpctrain.backend.specs import Conv2dSpec, Spec, TensorSpec

_PACK_BYTES = 16
_BLOCKS = 32  # per multiprocessor
_MOST_ELEMENTS = 2**31 - 1  # that patches.cu counts with 32 bits


class _Products(CudaOperator):
    """A convolution without bias as y (rows, K) = a (rows, width) @ weight (K, width)^T; a row is a pixel of the output.

    Products sum in the dtype of parameters, and the weight's gradient is written in it.
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

    def _multiply(self, a: DeviceArray, b: DeviceArray, c: DeviceArray, **options: bool) -> None:
        self.runtime.device.gemm(self.runtime.stream, a, b, c, precision=self.runtime.precision, **options)


class CudaPointwiseConv2d(_Products):
    """A convolution of single pixels: stride 1, no padding, one group.

    cuBLAS itself adds the input's gradient to what other readers of the input have written.
    """

    @staticmethod
    def fits(spec: Spec) -> bool:
        """Return whether this class computes the convolution."""
        if not isinstance(spec, Conv2dSpec) or spec.bias or spec.groups != 1:
            return False
        window = spec.window
        return window.kernel == window.stride == (1, 1) and not any(window.padding)

    def forward(self, context: StepContext) -> None:
        if self.output.size:
            self._multiply(_rows(self.buffers.inputs[0]), self._weight, _rows(self.buffers.output), transpose_b=True)

    def backward_parameters(self) -> None:
        gradient = self.buffers.gradients["weight"]
        if self.output.size:
            gradient = gradient.reshape(self.conv.channels_out, -1)
            self._multiply(_rows(self.output_grad), _rows(self.buffers.inputs[0]), gradient, transpose_a=True)
        else:
            self._arithmetic.fill(gradient, 0.0)

    def backward_input(self) -> None:
        grad = self.input_grad()
        if grad is not None and grad.size:
            self._multiply(_rows(self.output_grad), self._weight, _rows(grad), accumulate=self.accumulates())


class CudaPatchConv2d(_Products):
    """A convolution of pixels with so few channels that tensor cores would mostly multiply zeros: the first one of a network.

    A kernel copies the patch of x under each window to a row of `patches`, whose width is a multiple of a pack. Forward keeps the
    patches for the weight's gradient. They take the bytes of x times the area of the window over that of the stride: 3.8 MB for
    an image of 224 x 224 in bfloat16 and 7 x 7 windows of stride 2. The input gets no gradient.
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
        """Return whether this class computes the convolution: one group, no bias, no dilation, no gradient of the input.

        A block needs a thread for each pack of a row of patches. 32-bit integers must count the elements of the image's rows that
        a window covers.
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
        copy_box(self.runtime, padded, _whole(weight), weight, _whole(weight))
        self._multiply(self._patches, padded, _rows(self.buffers.output), transpose_b=True)

    def backward_parameters(self) -> None:
        gradient = self.buffers.gradients["weight"]
        if not self.output.size:
            self._arithmetic.fill(gradient, 0.0)
            return
        gradient, padded = gradient.reshape(self.conv.channels_out, -1), self.scratch[1]
        self._multiply(_rows(self.output_grad), self._patches, padded, transpose_a=True)
        copy_box(self.runtime, gradient, _whole(gradient), padded, _whole(gradient))

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
    """Return the box of all elements."""
    return tuple((0, size) for size in array.shape)
