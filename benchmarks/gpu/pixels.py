"""Stage `pixels`: input that the device makes from the host's pixels: the host's bits, and images per second."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from benchmarks.gpu.kernels import kernel_set
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.stage_report import StageReport
from hpctrain.backend.cuda.device import bfloat16_bits, bfloat16_values
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.pixels import WINDOW, PixelBatch, Resampling
from hpctrain.backend.specs import parameter_dtype


@dataclass(frozen=True)
class Sizes:
    """stored, size: height and width of stored images and of their windows, in pixels. batch: images. repeats: timed batches."""

    stored: int
    size: int
    batch: int
    repeats: int


#: those of ResNet-50 on ImageNet, and smaller ones for the emulated device
_SIZES, _SMALL_SIZES = Sizes(232, 224, 256, 50), Sizes(20, 16, 6, 3)
_CHECKED = 12  # images of a batch whose bits are compared; the host, which makes them too, would take too long for more


def run(settings: Settings, report: StageReport) -> None:
    """Check bits and measure rates in all precisions."""
    device, sizes = settings.make_device(), _SMALL_SIZES if settings.emulated else _SIZES
    for precision in settings.precisions():
        kernels = kernel_set(device, precision)
        check_bits(kernels, replace(sizes, batch=min(sizes.batch, _CHECKED)), report)
        add_rate(kernels, sizes, report)


def pixel_batch(sizes: Sizes, seed: int, dtype: str) -> PixelBatch:
    """Return random pixels with windows in random places, every second one mirrored, each with a filled rectangle."""
    random = np.random.default_rng(seed)
    windows = np.zeros(sizes.batch, WINDOW)
    windows["top"], windows["left"] = random.integers(0, sizes.stored - sizes.size + 1, (2, sizes.batch))
    windows["step"] = 1
    mirrored = windows[::2]
    mirrored["left"] += sizes.size - 1
    mirrored["step"] = -1
    windows["shown"] = (0, sizes.size)
    windows["filled"] = np.sort(random.integers(0, sizes.size + 1, (sizes.batch, 2, 2)), axis=-1)
    pixels = random.integers(0, 256, (sizes.batch, sizes.stored, sizes.stored, 3), np.uint8)
    scale, shift = (random.standard_normal(3).astype(dtype) for _ in range(2))
    return PixelBatch(pixels, windows, (sizes.size, sizes.size), scale, shift, 0.5)


def resized_batch(sizes: Sizes, seed: int, dtype: str) -> PixelBatch:
    """Return such images of which parts of random sizes are resized first: some shrink, others grow."""
    batch, random = pixel_batch(replace(sizes, stored=sizes.size), seed, dtype), np.random.default_rng(seed)
    extents = random.integers(sizes.stored // 4, sizes.stored + 1, (sizes.batch, 2))
    corners = (random.random((sizes.batch, 2)) * (sizes.stored - extents + 1)).astype(np.int64)
    boxes = np.concatenate([corners, extents], axis=1).astype(np.int32)
    pixels = random.integers(0, 256, (sizes.batch, sizes.stored, sizes.stored, 3), np.uint8)
    return replace(batch, pixels=pixels, resampling=Resampling(boxes, batch.size, interpolates=True))


#: by what is left to the device
_BATCHES = {"windows": pixel_batch, "resized windows": resized_batch}


def check_bits(kernels: CudaKernelSet, sizes: Sizes, report: StageReport) -> None:
    """Check that the device makes the bits that the host makes, for batches that follow each other."""
    dtype = kernels.runtime.dtype
    for seed, (left, make) in product(range(3), _BATCHES.items()):
        batch = make(sizes, seed, parameter_dtype(dtype))
        target = kernels.arithmetic.zeros(int(np.prod(batch.shape)), dtype).reshape(batch.shape)
        kernels.make_input(target, batch)
        expected = np.asarray(batch)
        if dtype == "bfloat16":
            expected = bfloat16_values(bfloat16_bits(expected))
        wrong = int(np.count_nonzero(kernels.arithmetic.to_host(target) != expected))
        text = f"input {seed} of {left} in {kernels.runtime.precision}"
        report.check(text, wrong == 0, f"{wrong} of {expected.size} elements differ")


def add_rate(kernels: CudaKernelSet, sizes: Sizes, report: StageReport) -> None:
    """Measure images per second of one host thread that hands batches over; the device makes one while the next arrives."""
    dtype = kernels.runtime.dtype
    for left, make in _BATCHES.items():
        batch = make(sizes, 0, parameter_dtype(dtype))
        target = kernels.arithmetic.zeros(int(np.prod(batch.shape)), dtype).reshape(batch.shape)
        kernels.make_input(target, batch)
        kernels.wait()
        begin = time.perf_counter()
        for _ in range(sizes.repeats):
            kernels.make_input(target, batch)
        kernels.wait()
        rate = sizes.repeats * sizes.batch / (time.perf_counter() - begin)
        report.add(f"images per second of {left} {kernels.runtime.precision}", rate)
        report.note(f"{left} {kernels.runtime.precision} {rate:,.0f} images/s")
