"""Convolutions of the emulated device against the NumPy kernel set."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from hpctrain.backend.cuda.device import ConvolutionKey
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.cuda.emulator.rounding import read, write
from hpctrain.backend.dtypes import item_bytes
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import Conv2dSpec, Window
from hpctrain.testing.operators import OperatorBench
from tests.support.kernel_pairs import difference

SPEC = Conv2dSpec(4, 6, Window((3, 2), (2, 1), (1, 0, 1, 1), (1, 2)), 2, bias=False)
BOUNDS = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 2**-8}


def _placed(device: EmulatedDevice, values: np.ndarray, dtype: str) -> DeviceArray:
    array = device.allocate(values.size * item_bytes(dtype)).view(dtype).reshape(values.shape)
    write(array, values)
    return array


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["forward", "input", "weight"])
def test_it_is_the_convolution(kind: Literal["forward", "input", "weight"], dtype: str) -> None:
    random, device = np.random.default_rng(1), EmulatedDevice()
    x = _placed(device, random.standard_normal((2, 7, 6, 4)), dtype)
    w = _placed(device, random.standard_normal(SPEC.weight_shape), dtype)
    bench = OperatorBench(NumpyKernelSet(), SPEC, [read(x).astype(float)], parameters={"weight": read(w).astype(float)})
    y_wanted = bench.forward()
    dy = _placed(device, random.standard_normal(y_wanted.shape), dtype)
    gradients = bench.backward(read(dy).astype(float))
    a, b, wanted = {
        "forward": (x, w, y_wanted),
        "input": (dy, w, gradients.inputs[0]),
        "weight": (x, dy, gradients.parameters["weight"]),
    }[kind]
    assert wanted is not None
    out = _placed(device, np.full(wanted.shape, np.nan), dtype)
    window = SPEC.window
    key = ConvolutionKey(
        kind, x.shape, w.shape, dy.shape, window.stride, window.padding, window.dilation, SPEC.groups, dtype, dtype
    )
    convolution, stream = device.convolution(key), device.stream("compute")
    convolution.run(stream, a, b, out, device.allocate(convolution.workspace_bytes))
    stream.synchronize()
    assert difference(read(out), wanted) <= BOUNDS[dtype]
