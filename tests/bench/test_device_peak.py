"""Devices of kernel sets, and the rate of their products."""

from __future__ import annotations

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.bench.device_peak import device_gemm_peak, device_of
from tests.support.emulated import CudaKernelsFactory


def test_the_device_is_that_of_the_kernel_set(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels("float32")
    assert device_of(kernels) is kernels.runtime.device
    assert device_of(NumpyKernelSet()) is None


def test_the_rate_is_that_of_ten_products_without_the_first(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels("bfloat16")
    device, calls = kernels.runtime.device, []
    gemm = device.gemm

    def counted(*arguments, **options) -> None:
        calls.append(options["precision"])
        gemm(*arguments, **options)

    device.gemm = counted  # type: ignore[method-assign]
    assert device_gemm_peak(kernels) > 0
    assert calls == ["bfloat16"] * 10
