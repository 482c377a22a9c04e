"""Sums over the pixels of images on a device, and values that are spread over them: means of images that several ranks hold."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.cuda.device import pack_width
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.dtypes import parameter_dtype
from hpctrain.backend.kernels.cuda.runtime import TAGS, CudaRuntime


def sum_pixels(runtime: CudaRuntime, target: DeviceArray, source: DeviceArray, scale: float) -> None:
    """Enqueue target (N, 1, 1, C) := scale * the sum over the pixels of source (N, H, W, C), rounded once; 0 without pixels.

    In the order of the pixels, whatever the launch: always the same bits.
    """
    _launch("sum_pixels", runtime, target, source, source, target, scale)


def spread_pixels(runtime: CudaRuntime, target: DeviceArray, source: DeviceArray, scale: float) -> None:
    """Enqueue target (N, H, W, C) := scale * source (N, 1, 1, C) at every pixel."""
    _launch("spread_pixels", runtime, target, source, target, source, scale)


def _launch(
    kernel: str,
    runtime: CudaRuntime,
    target: DeviceArray,
    source: DeviceArray,
    images: DeviceArray,
    means: DeviceArray,
    scale: float,
) -> None:
    """An item is a pack of the target."""
    n, height, width, channels = images.shape
    assert means.shape == (n, 1, 1, channels), f"{means!r} has not one pixel for each of {images!r}"
    assert target.dtype == source.dtype, f"{source!r} has not the dtype of {target!r}"
    wide = pack_width(target.itemsize, channels, (target, source))
    factor = np.dtype(parameter_dtype(target.dtype)).type(scale)
    sizes = np.int64(height * width), np.int32(channels // wide)
    name = f"{kernel}_{TAGS[target.dtype]}_w{wide}"
    runtime.launch_items("pixel_sums", name, target.size // wide, target, source, factor, *sizes)
