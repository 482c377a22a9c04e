"""Convolutions with few pixels and many weights as matrix products, computed by the library's threads."""

from __future__ import annotations

import math

import numpy as np

from hpctrain.backend.alignment import aligned
from hpctrain.backend.operators import StepContext
from hpctrain.backend.numpy.conv2d import MANY_WEIGHTS, NumpyConv2d
from hpctrain.backend.onednn.binding import Engine
from hpctrain.backend.kernels.onednn.regions import Regions, part
from hpctrain.backend.specs import Conv2dSpec, TensorSpec

# With few output pixels in all images and many weights, a matrix product reads the weights once, in their own layout. The
# library's convolutions copy them into blocks and back in every step.
_FEW_PIXELS = 128


def products_pay(spec: Conv2dSpec, x: TensorSpec) -> bool:
    """Return whether im2col and matrix products beat the library's kernels in training.

    A fixed rule instead of a measurement, so that all ranks decide alike.
    """
    n, height, width, _ = spec.output(x.plain()).shape
    windows = spec.groups == 1 and math.prod(spec.window.kernel) > 1
    return windows and n * height * width <= _FEW_PIXELS and math.prod(spec.weight_shape) >= MANY_WEIGHTS


class ProductConv2d(NumpyConv2d):
    """Compute a convolution by im2col and the library's matrix products.

    The library's products use its own thread pool; NumPy's would start a second one. The forward product is computed transposed,
    since dnnl_sgemm is slow if the result has few rows and many columns.
    """

    def __init__(self, engine: Engine, spec: Conv2dSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, x, training=training, multiply=engine.multiply)
        regions = Regions(aligned(self.scratch_bytes))
        self._turned = regions.add(spec.channels_out * self.columns.largest * self.inputs[0].item_bytes)
        self.scratch_bytes = regions.total_bytes

    def forward(self, context: StepContext) -> None:
        k = self.conv.channels_out
        flat, room = self.buffers.output.reshape(-1, k), part(self.buffers.scratch, self._turned).view(self.dtype)
        for chunk in self.chunks:
            chunk.fill()
            turned = room[: k * (chunk.stop - chunk.start)].reshape(1, k, -1)
            self.multiply(self.weight, chunk.matrix.transpose(0, 2, 1), turned)
            if self.conv.bias:
                np.add(turned[0].T, self.buffers.parameters["bias"], out=flat[chunk.pixels])
            else:
                np.copyto(flat[chunk.pixels], turned[0].T)
