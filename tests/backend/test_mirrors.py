"""Which arithmetic has mirrors: that of a device. Those of the host need none."""

from __future__ import annotations

from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.mirrors import StagedBytes
from tests.support.emulated import CudaKernelsFactory


def test_the_host_has_none() -> None:
    assert HostArithmetic().mirrors() is None


def test_a_device_has_one_service(cuda_kernels: CudaKernelsFactory) -> None:
    arithmetic = cuda_kernels().arithmetic
    mirrors = arithmetic.mirrors()
    assert mirrors is not None
    assert arithmetic.mirrors() is mirrors
    assert (mirrors.copied, mirrors.pinned_bytes) == (StagedBytes(0, 0), 0)
