"""Convolution equals the float64 reference, in whatever layout was chosen."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.kernels.abilities import Accumulating
from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.fused_specs import WithRelu
from hpctrain.backend.kernels.onednn.layouts import in_layout
from hpctrain.backend.kernels.specs import Conv2dSpec, TensorSpec, Window
from tests.support.kernel_pairs import Result, assert_close, difference, run


def conv(channels_in, channels_out, kernel, *, stride=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1), groups=1, bias=True):
    return Conv2dSpec(channels_in, channels_out, Window(kernel, stride, padding, dilation), groups, bias)


SAME = (1, 1, 1, 1)
CASES = {
    "first layer of one channel": conv(1, 20, (5, 5), padding=(2, 2, 2, 2)),
    "first layer of three channels": conv(3, 16, (3, 3), padding=SAME),
    "imagenet's first layer": conv(3, 64, (7, 7), stride=(2, 2), padding=(3, 3, 3, 3), bias=False),
    "odd channels": conv(5, 7, (3, 3), stride=(2, 2), padding=SAME),
    "few to many": conv(7, 48, (3, 3), padding=SAME),
    "many to one": conv(16, 1, (3, 3), padding=SAME),
    "one to one": conv(1, 1, (3, 3), padding=SAME),
    "1x1": conv(16, 20, (1, 1)),
    "1x1 without bias": conv(20, 64, (1, 1), bias=False),
    "1x1 strided": conv(16, 24, (1, 1), stride=(2, 2), bias=False),
    "3x3": conv(20, 16, (3, 3), padding=SAME, bias=False),
    "asymmetric padding": conv(16, 20, (3, 3), padding=(0, 1, 2, 1)),
    "no padding": conv(16, 16, (3, 3)),
    "unequal strides and kernel": conv(8, 16, (3, 2), stride=(2, 1), padding=(1, 0, 1, 0)),
    "dilated": conv(16, 16, (3, 3), padding=(2, 2, 2, 2), dilation=(2, 2)),
    "dilated and strided": conv(16, 16, (3, 3), stride=(2, 2), padding=(2, 2, 2, 2), dilation=(2, 2)),
    "two groups": conv(16, 32, (3, 3), padding=SAME, groups=2),
    "five groups": conv(20, 20, (3, 3), padding=SAME, groups=5),
    "depthwise": conv(16, 16, (3, 3), padding=SAME, groups=16),
    "wide": conv(64, 72, (3, 3), padding=SAME),
}  # fmt: skip


def arrays(spec: Conv2dSpec, shape: tuple[int, ...], seed: int = 0):
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape)
    fan_in = np.prod(spec.weight_shape[1:])
    parameters = {"weight": random.standard_normal(spec.weight_shape) / np.sqrt(fan_in)}
    if spec.bias:
        parameters["bias"] = random.standard_normal(spec.channels_out)
    dy = random.standard_normal(spec.output(TensorSpec(shape)).shape)
    return x, parameters, dy


@pytest.mark.parametrize("spec", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("size", [(9, 7), (15, 16)])
def test_equals_the_reference(onednn: KernelSet, reference: KernelSet, spec: Conv2dSpec, size: tuple[int, int]) -> None:
    x, parameters, dy = arrays(spec, (3, *size, spec.channels_in))
    ours = run(onednn, spec, [x], parameters=parameters, output_grad=dy)
    assert_close(ours, run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64"))
    evaluated = run(onednn, spec, [x], parameters=parameters)
    assert difference(evaluated.output, ours.output) <= 1e-6


@pytest.mark.parametrize("spec", CASES.values(), ids=CASES.keys())
def test_adds_to_the_gradient_where_it_says_so(onednn: KernelSet, reference: KernelSet, spec: Conv2dSpec) -> None:
    shape = (2, 9, 7, spec.channels_in)
    if not isinstance(onednn.make(spec, (TensorSpec(shape),), training=True), Accumulating):
        assert spec not in [CASES[name] for name in ("1x1", "1x1 without bias", "3x3", "asymmetric padding", "wide")]
        return
    x, parameters, dy = arrays(spec, shape)
    before = np.random.default_rng(1).standard_normal(shape)
    ours = run(onednn, spec, [x], parameters=parameters, output_grad=dy, accumulate=[before])
    wanted = run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64").input_grads[0] + before
    assert difference(ours.input_grads[0], wanted) <= 1e-5


@pytest.mark.parametrize("input_first", [False, True])
@pytest.mark.parametrize("name", ["3x3", "1x1", "few to many", "five groups"])
def test_relu_behind_it(onednn: KernelSet, reference: KernelSet, name: str, input_first: bool) -> None:
    spec = CASES[name]
    x, parameters, dy = arrays(spec, (3, 9, 7, spec.channels_in))
    ours = run(onednn, WithRelu(spec), [x], parameters=parameters, output_grad=dy, input_first=input_first)
    assert_close(ours, rectified(reference, spec, x, parameters, dy))


def rectified(reference: KernelSet, spec: Conv2dSpec, x: np.ndarray, parameters: dict[str, np.ndarray], dy: np.ndarray) -> Result:
    """With a ReLU behind it, in float64."""
    before = run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64").output
    wanted = run(reference, spec, [x], parameters=parameters, output_grad=dy * (before > 0), dtype="float64")
    wanted.output = np.maximum(before, 0)
    return wanted


def test_input_in_blocks_of_channels(onednn: KernelSet, reference: KernelSet) -> None:
    spec = CASES["3x3"]
    x, parameters, dy = arrays(spec, (3, 9, 7, 20))
    offered = in_layout(TensorSpec(x.shape), onednn.make(spec, (TensorSpec(x.shape),), training=True).output.layout)
    ours = run(onednn, spec, [x], parameters=parameters, output_grad=dy, layouts=[offered])
    assert_close(ours, run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64"))


def test_nobody_asks_for_the_images_gradient(onednn: KernelSet, reference: KernelSet) -> None:
    spec = CASES["first layer of three channels"]
    x, parameters, dy = arrays(spec, (3, 9, 7, 3))
    wanted = run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64", wants=[False])
    assert_close(run(onednn, spec, [x], parameters=parameters, output_grad=dy, wants=[False]), wanted)


def test_bitwise_the_same_every_time(onednn: KernelSet) -> None:
    spec = CASES["wide"]
    x, parameters, dy = arrays(spec, (5, 15, 9, 64))
    first, second = (run(onednn, spec, [x], parameters=parameters, output_grad=dy, steps=steps) for steps in (1, 2))
    for name, array in first.arrays().items():
        np.testing.assert_array_equal(array, second.arrays()[name])


FEW_PIXELS = {
    "3x3": conv(176, 176, (3, 3), padding=SAME, bias=False),
    "strided": conv(128, 256, (3, 3), stride=(2, 2), padding=SAME),
    "larger than the image": conv(128, 128, (5, 5), padding=(2, 2, 2, 2)),
}


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", FEW_PIXELS)
def test_few_pixels_and_many_weights_are_products(onednn: KernelSet, reference: KernelSet, name: str, relu: bool) -> None:
    inner = FEW_PIXELS[name]
    spec, shape = WithRelu(inner) if relu else inner, (5, 3, 2, inner.channels_in)
    assert onednn.make(spec, (TensorSpec(shape),), training=True).stands_in_because == "it has few pixels and many weights"
    assert not onednn.make(spec, (TensorSpec(shape),), training=False).stands_in_because, "evaluation copies weights once"
    x, parameters, dy = arrays(inner, shape)
    ours = run(onednn, spec, [x], parameters=parameters, output_grad=dy)
    wanted = run(reference, inner, [x], parameters=parameters, output_grad=dy, dtype="float64")
    assert_close(ours, rectified(reference, inner, x, parameters, dy) if relu else wanted)


@pytest.mark.parametrize(
    ("spec", "images"),
    [
        (FEW_PIXELS["3x3"], 129),
        (conv(512, 512, (1, 1)), 5),
        (conv(512, 512, (3, 3), padding=SAME, groups=2), 5),
        (conv(64, 64, (3, 3), padding=SAME), 5),
    ],
    ids=["many pixels", "1x1", "groups", "few weights"],
)
def test_other_convolutions_are_the_librarys(onednn: KernelSet, spec: Conv2dSpec, images: int) -> None:
    operator = onednn.make(spec, (TensorSpec((images, 1, 1, spec.channels_in)),), training=True)
    assert not operator.stands_in_because
