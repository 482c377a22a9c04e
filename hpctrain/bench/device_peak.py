"""The device of a kernel set, and its rate of large matrix products: what the rates of operators are compared with."""

from __future__ import annotations

import time

from hpctrain.backend.cuda.device import Device
from hpctrain.backend.dtypes import item_bytes
from hpctrain.backend.operators import KernelSet
from hpctrain.backend.cuda.kernel_set import CudaKernelSet

_PEAK_SIZE = 8192
_SLOW_SIZE = 128  # where the device is the CPU
_REPEATS = 9


def device_of(kernels: KernelSet) -> Device | None:
    """The device that a kernel set computes on; None for sets of the host."""
    return kernels.runtime.device if isinstance(kernels, CudaKernelSet) else None


def device_gemm_peak(kernels: KernelSet) -> float:
    """GFLOP/s of matrix products of the set's device, in its dtype and precision, one behind the other."""
    assert isinstance(kernels, CudaKernelSet)
    runtime = kernels.runtime
    size = _SLOW_SIZE if runtime.device.name == "emulated" else _PEAK_SIZE
    a, b, c = (
        runtime.device.allocate(size * size * item_bytes(runtime.dtype)).view(runtime.dtype).reshape(size, size) for _ in range(3)
    )
    runtime.device.gemm(runtime.stream, a, b, c, precision=runtime.precision)
    kernels.wait()
    begin = time.perf_counter()
    for _ in range(_REPEATS):
        runtime.device.gemm(runtime.stream, a, b, c, precision=runtime.precision)
    kernels.wait()
    return _REPEATS * 2 * size**3 / (time.perf_counter() - begin) / 1e9
