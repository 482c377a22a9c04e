"""Adaptive average pooling; global pooling is its case of one output."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.cuda.device import Argument, Extent, pack_width
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.operators import StepContext
from hpctrain.backend.kernels.cuda.images import check_images, row_launch
from hpctrain.backend.cuda.operator import CudaOperator
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.specs import AdaptiveAveragePoolSpec, TensorSpec
from hpctrain.core.errors import BackendError

_LIMIT = 1 << 31
# Pixels of a window from which on the rows of threads of a block share it.
_SHARED_PIXELS = 16
_MOST_BLOCKS = 1 << 15  # in the second dim of a grid


class CudaAdaptiveAveragePool(CudaOperator):
    """y (N, Ho, Wo, C): means of x (N, H, W, C) over windows. An image without pixels averages to 0.

    Sums are made in one order whatever the launch: by a thread over its window, or over every eighth pixel of a large one.
    """

    def __init__(self, spec: AdaptiveAveragePoolSpec, x: TensorSpec, *, training: bool, runtime: CudaRuntime) -> None:
        super().__init__(spec, (x,), training=training, runtime=runtime)
        check_images("adaptive pooling", self.inputs[0].shape, self.output.shape)
        _, height, width, _ = x.shape
        for outputs, size in zip(spec.size, (height, width), strict=True):
            if (outputs + 1) * (size + 1) >= _LIMIT:
                raise BackendError(
                    f"The cuda kernel set's adaptive pooling of {size} pixels has fewer than {_LIMIT // (size + 1)} outputs, "
                    f"not {outputs}."
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
