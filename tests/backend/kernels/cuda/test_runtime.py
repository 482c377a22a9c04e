"""Launches on the stream of all computation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpctrain.backend.cuda.device import Precision
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.dtypes import item_bytes
from hpctrain.backend.kernels.cuda.runtime import TAGS, CudaRuntime


class _Recorder(EmulatedDevice):
    """Keeps what is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[Any, ...]] = []

    def kernel(self, source: str, name: str) -> Any:
        return lambda *arguments: self.launched.append((source, name, *arguments))


@pytest.mark.parametrize(
    ("precision", "dtype", "parameters"),
    [
        ("float64", "float64", "float64"),
        ("float32", "float32", "float32"),
        ("tf32", "float32", "float32"),
        ("bfloat16", "bfloat16", "float32"),
    ],
)
def test_dtypes_follow_from_the_precision(precision: Precision, dtype: str, parameters: str) -> None:
    device = EmulatedDevice()
    runtime = CudaRuntime(device, device.stream("compute"), precision)
    assert (runtime.dtype, runtime.parameter_dtype) == (dtype, parameters)
    assert int(TAGS[dtype].strip("bf")) == 8 * item_bytes(dtype)


def test_items_are_the_last_argument_and_the_grid_fits_them() -> None:
    device = _Recorder()
    stream = device.stream("compute")
    runtime = CudaRuntime(device, stream)
    runtime.launch_items("elementwise", "k", 1000, None)
    assert device.launched == [("elementwise", "k", stream, (4,), (256,), None, np.int64(1000))]
    assert isinstance(device.launched[0][-1], np.int64)


def test_an_empty_grid_is_not_launched() -> None:
    device = _Recorder()
    runtime = CudaRuntime(device, device.stream("compute"))
    runtime.launch_items("elementwise", "k", 0)
    runtime.launch("elementwise", "k", (3, 0), (256,))
    assert device.launched == []
