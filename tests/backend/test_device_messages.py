"""The service for transports that reach a device's memory: marks follow the work of kernels, and the host has none."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.cuda.emulator.memory import borrowed, on_host
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.testing.transfers import empty
from tests.support.emulated import CudaKernelsFactory


def test_arrays_of_the_host_need_none() -> None:
    assert HostArithmetic().messages() is None


@pytest.mark.parametrize("seed", range(10))
def test_what_is_marked_as_done_is_in_memory(seed: int, cuda_kernels: CudaKernelsFactory) -> None:
    """Read without any wait but for the mark, as an MPI library reads."""
    kernels = cuda_kernels("float64", seed)
    messages, array = kernels.arithmetic.messages(), empty(kernels, (9,), "float64")
    assert messages is not None
    for value in (3.0, 4.0):
        kernels.arithmetic.fill(array, value)
        mark = messages.mark()
        kernels.arithmetic.fill(empty(kernels, (9,), "float64"), 7.0)
        while not mark.done:
            pass
        assert mark.done
        np.testing.assert_array_equal(on_host(borrowed(array)), np.full(9, value))


def test_devices_are_told_apart(cuda_kernels: CudaKernelsFactory) -> None:
    first, second = (cuda_kernels("float64", 0).arithmetic.messages() for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.identity != second.identity
    assert first.group_fault() is None
