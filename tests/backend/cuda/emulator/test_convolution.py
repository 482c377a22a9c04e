"""Convolutions of the emulated device against the NumPy kernel set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from hpctrain.backend.cuda.device import ConvolutionKey
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.cuda.emulator.rounding import read, write
from hpctrain.backend.dtypes import item_bytes
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import Conv2dSpec, Window
from hpctrain.errors import BackendError
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


KEY = ConvolutionKey("forward", (2, 4, 4, 4), (8, 3, 3, 4), (2, 4, 4, 8), (1, 1), (1, 1, 1, 1), (1, 1), 1, "float32", "tf32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": (0, 4, 4, 4), "y": (0, 4, 4, 8)}, "empty array"),
        ({"x": (2, 4, 4, 5)}, "do not fall into 1 groups"),
        ({"groups": 3, "w": (8, 3, 3, 4), "x": (2, 4, 4, 12)}, "do not fall into 3 groups"),
        ({"precision": "bfloat16"}, "in bfloat16 is of bfloat16, not of float32"),
        ({"dtype": "bfloat16"}, "in tf32 is of float32, not of bfloat16"),
        ({"fused": "bias", "kind": "input"}, "Only convolutions forward are fused"),
        ({"padding": (-1, 1, 1, 1), "y": (2, 2, 4, 8)}, "Padding is 0 or more"),
        ({"y": (2, 3, 4, 8)}, "has another shape"),
    ],
)
def test_keys_without_a_plan_are_refused(changes: dict[str, Any], message: str) -> None:
    EmulatedDevice().convolution(KEY)
    with pytest.raises(BackendError, match=message):
        EmulatedDevice().convolution(replace(KEY, **changes))


def test_arrays_are_those_of_the_key() -> None:
    device = EmulatedDevice()
    x, w, y = (device.allocate(1024 * 4).view("float32")[: int(np.prod(shape))].reshape(shape) for shape in (KEY.x, KEY.w, KEY.y))
    workspace, bias = device.allocate(300), device.allocate(32).view("float32")
    stream, plain = device.stream("compute"), device.convolution(KEY)
    fused = device.convolution(replace(KEY, fused="bias"))
    beside = device.allocate(4096).view("float32")[1 : 1 + x.size].reshape(x.shape)
    for convolution, arguments, message in (
        (plain, (w, x, y, workspace), "a of a convolution forward is float32"),
        (plain, (x, w.reshape(-1), y, workspace), "b of a convolution forward is float32"),
        (plain, (x.reshape(-1).view("bfloat16"), w, y, workspace), "a of a convolution"),
        (plain, (beside, w, y, workspace), "aligned to 16 bytes"),
        (plain, (x, w, y, None), "has a workspace of 256 aligned bytes"),
        (plain, (x, w, y, workspace[:200]), "has a workspace"),
        (plain, (x, w, y, workspace[16:]), "has a workspace"),
        (plain, (x, w, y, y.reshape(-1).view("uint8")), "lies where its inputs or its workspace are"),
        (plain, (x, w, y, workspace, bias), "A bias is given where the key says so"),
        (fused, (x, w, y, workspace), "A bias is given where the key says so"),
        (fused, (x, w, y, workspace, bias[:4]), "The bias of"),
    ):
        with pytest.raises(ValueError, match=message):
            convolution.run(stream, *arguments)


def test_a_bias_and_a_relu_are_rounded_with_the_sums_once() -> None:
    random, device = np.random.default_rng(1), EmulatedDevice()
    key = replace(KEY, dtype="bfloat16", precision="bfloat16", fused="bias_relu")
    x, w, bias = (_placed(device, random.standard_normal(shape), "bfloat16") for shape in (key.x, key.w, key.w[:1]))
    y = _placed(device, np.full(key.y, np.nan), "bfloat16")
    spec = Conv2dSpec(4, 8, Window((3, 3), (1, 1), (1, 1, 1, 1)), bias=False)
    bench = OperatorBench(NumpyKernelSet(), spec, [read(x).astype(float)], parameters={"weight": read(w).astype(float)})
    wanted = np.maximum(bench.forward() + read(bias), 0)
    stream = device.stream("compute")
    device.convolution(key).run(stream, x, w, y, device.allocate(256), bias)
    stream.synchronize()
    assert (np.abs(read(y) - wanted) <= wanted * 2.0**-8 + 1e-5).all()
    assert (read(y) == 0).any()


def test_nothing_is_left_in_the_workspace() -> None:
    device = EmulatedDevice()
    x, w, y = (_placed(device, np.ones(shape), "float32") for shape in (KEY.x, KEY.w, KEY.y))
    workspace = device.allocate(256)
    device.convolution(KEY).run(device.stream("compute"), x, w, y, workspace)
    assert np.isnan(read(workspace.view("float32"))).all()
