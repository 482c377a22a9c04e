"""Max, average and adaptive average pooling. Global pooling is adaptive pooling to one output."""

from __future__ import annotations

import math

import numpy as np

from hpctrain.backend.cuda.device import Argument, DeviceArray, Extent, pack_width
from hpctrain.backend.cuda.operator import CudaOperator, check_images, row_launch
from hpctrain.backend.cuda.runtime import CudaRuntime
from hpctrain.backend.operators import StepContext
from hpctrain.backend.specs import AdaptiveAveragePoolSpec, PoolSpec, TensorSpec
from hpctrain.core.errors import BackendError

_MOST_TAPS = 1 << 16
#: widths of windows for which training has special kernels, if channels fit packs
_COLUMNS = (2, 3)


class _Pool(CudaOperator):
    """Base of max and average pooling: forward launches over rows of the output, backward over rows of the input."""

    def __init__(self, spec: PoolSpec, x: TensorSpec, *, training: bool, runtime: CudaRuntime) -> None:
        super().__init__(spec, (x,), training=training, runtime=runtime)
        self.pool = spec
        check_images(f"{spec.kind} pooling", x.shape, self.output.shape)

    def _dim(self, dim: int) -> tuple[np.int32, ...]:
        """Return the arguments that describe a window in one dim: struct Dim of the kernels."""
        window, size = self.pool.window, self.inputs[0].shape[1 + dim]
        before, after = window.padding[2 * dim : 2 * dim + 2]
        counted = (-before, size + after) if self.pool.count_include_pad else (0, size)
        outputs, taps = self.output.shape[1 + dim], window.kernel[dim]
        return tuple(map(np.int32, (size, outputs, taps, window.stride[dim], before, window.dilation[dim], *counted)))

    def _launch(self, kernel: str, rows_of: TensorSpec, arrays: tuple[DeviceArray, ...], width: int, *last: Argument) -> None:
        images, height, columns, channels = rows_of.shape
        packs = channels // width
        grid, block = row_launch(images * height, columns * packs, self.runtime.device.multiprocessors)
        sizes = (np.int32(packs), np.int32(images * height))
        name = f"{kernel}_{self.tag}_w{width}"
        self.runtime.launch("pool", name, grid, block, *arrays, *self._dim(0), *self._dim(1), *sizes, *last)

    def _width(self, *arrays: DeviceArray) -> int:
        return pack_width(arrays[0].itemsize, self.inputs[0].shape[3], arrays)


class CudaMaxPool(_Pool):
    """Max pooling. The first maximum of a window in row-major order receives the gradient (as in torch).

    Forward saves the number of each output's winning tap, as uint8, or as uint16 for windows of more than 255 taps. NaN in a
    window makes the output NaN.
    """

    def __init__(self, spec: PoolSpec, x: TensorSpec, *, training: bool, runtime: CudaRuntime) -> None:
        super().__init__(spec, x, training=training, runtime=runtime)
        taps = math.prod(spec.window.kernel)
        if taps > _MOST_TAPS:
            rows, columns = spec.window.kernel
            raise BackendError(
                f"A max pooling window of {rows} x {columns} has {taps} taps; backend cuda supports at most {_MOST_TAPS}, for "
                "example 256 x 256."
            )
        self._code = "u8" if taps < 256 else "u16"
        self.declare(saved=[(self.output.shape, "uint8" if taps < 256 else "uint16")] if training else [])

    def _width(self, *arrays: DeviceArray) -> int:
        wide = self._code == "u8" or not self.training
        return super()._width(*arrays) if wide else 1

    def forward(self, context: StepContext) -> None:
        arrays: tuple[DeviceArray, ...] = (self.buffers.inputs[0], self.buffers.output)
        width, columns = self._width(*arrays), self.pool.window.kernel[1]
        if not self.training:
            self._launch("max_pool", self.output, arrays, width)
            return
        special = f"columns{columns}_" if width > 1 and columns in _COLUMNS else ""
        self._launch(f"max_pool_{special}{self._code}", self.output, (*arrays, self.saved[0]), width)

    def backward_input(self) -> None:
        grad = self.input_grad()
        if grad is not None:
            arrays = (self.output_grad, grad, self.saved[0])
            width, adds = self._width(*arrays[:2]), np.int32(self.accumulates())
            self._launch(f"max_pool_backward_{self._code}", self.inputs[0], arrays, width, adds)


class CudaAveragePool(_Pool):
    """Average pooling. The divisor is the number of window elements inside the image, padding included if `count_include_pad`."""

    def __init__(self, spec: PoolSpec, x: TensorSpec, *, training: bool, runtime: CudaRuntime) -> None:
        super().__init__(spec, x, training=training, runtime=runtime)
        self.declare()

    def forward(self, context: StepContext) -> None:
        arrays = (self.buffers.inputs[0], self.buffers.output)
        self._launch("average_pool", self.output, arrays, self._width(*arrays))

    def backward_input(self) -> None:
        grad = self.input_grad()
        if grad is not None:
            arrays = (self.output_grad, grad)
            adds = np.int32(self.accumulates())
            self._launch("average_pool_backward", self.inputs[0], arrays, self._width(*arrays), adds)


_LIMIT = 1 << 31
# Minimum number of input pixels per output pixel for which several threads share a window.
_SHARED_PIXELS = 16
_MOST_BLOCKS = 1 << 15  # maximum in the second dim of a grid


class CudaAdaptiveAveragePool(CudaOperator):
    """Adaptive average pooling: y (N, Ho, Wo, C) are means of x (N, H, W, C). An image without pixels averages to 0.

    The order of summation does not depend on the launch: one thread sums a window, or eight threads sum every eighth pixel of a
    large window each.
    """

    def __init__(self, spec: AdaptiveAveragePoolSpec, x: TensorSpec, *, training: bool, runtime: CudaRuntime) -> None:
        super().__init__(spec, (x,), training=training, runtime=runtime)
        check_images("adaptive pooling", self.inputs[0].shape, self.output.shape)
        _, height, width, _ = x.shape
        for outputs, size in zip(spec.size, (height, width), strict=True):
            if (outputs + 1) * (size + 1) >= _LIMIT:
                raise BackendError(
                    f"Adaptive pooling of {size} pixels to {outputs} is too large for backend cuda, which supports fewer than "
                    f"{(_LIMIT - 1) // (size + 1)} outputs."
                )
        self._shared = height * width >= _SHARED_PIXELS * spec.size[0] * spec.size[1]
        self._sizes = tuple(map(np.int32, (height, spec.size[0], width, spec.size[1])))
        self.declare()

    def _launch(
        self, kernel: str, grid: Extent, block: Extent, arrays: tuple[DeviceArray, ...], rows: int, *last: Argument
    ) -> None:
        channels = self.inputs[0].shape[3]
        width = pack_width(arrays[0].itemsize, channels, arrays)
        arguments = (*arrays, *self._sizes, np.int32(channels // width), np.int32(rows), *last)
        self.runtime.launch("adaptive_pool", f"{kernel}_{self.tag}_w{width}", grid, block, *arguments)

    def _rows(self, kernel: str, rows_of: TensorSpec, arrays: tuple[DeviceArray, ...], *last: Argument) -> None:
        images, height, columns, channels = rows_of.shape
        packs = columns * channels // pack_width(arrays[0].itemsize, channels, arrays)
        grid, block = row_launch(images * height, packs, self.runtime.device.multiprocessors)
        self._launch(kernel, grid, block, arrays, images * height, *last)

    def forward(self, context: StepContext) -> None:
        arrays = (self.buffers.inputs[0], self.buffers.output)
        if not self._shared:
            self._rows("adaptive_pool", self.output, arrays)
            return
        images, height, columns, channels = self.output.shape
        outputs, tile = images * height * columns, 32 * pack_width(arrays[0].itemsize, channels, arrays)
        grid = (-(-channels // tile), min(outputs, _MOST_BLOCKS))
        self._launch("adaptive_pool_shared", grid, (32, 8), arrays, outputs)

    def backward_input(self) -> None:
        grad = self.input_grad()
        if grad is not None:
            self._rows("adaptive_pool_backward", self.inputs[0], (self.output_grad, grad), np.int32(self.accumulates()))
