"""Convolution: against a direct loop, central differences, itself in chunks and in the other dtype; images without pixels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.kernels.numpy import conv2d
from hpctrain.backend.kernels.numpy.conv2d import NumpyConv2d, _Flipped, _Scattered
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import Conv2dSpec, TensorSpec, Window
from hpctrain.testing.operator_gradients import assert_close, check_gradient
from hpctrain.testing.operators import OperatorBench, default_parameters

KERNELS = NumpyKernelSet()


def direct(spec: Conv2dSpec, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """y, one output pixel and one tap at a time, from the definition."""
    n, h, w, _ = x.shape
    window, channels = spec.window, spec.channels_in // spec.groups
    ho, wo = window.output_size((h, w))
    y = np.zeros((n, ho, wo, spec.groups, spec.channels_out // spec.groups))
    grouped_x = x.reshape(n, h, w, spec.groups, channels)
    grouped_w = weight.reshape(spec.groups, -1, *window.kernel, channels)
    for o, p, r, s in np.ndindex(ho, wo, *window.kernel):
        row = o * window.stride[0] - window.padding[0] + r * window.dilation[0]
        column = p * window.stride[1] - window.padding[2] + s * window.dilation[1]
        if 0 <= row < h and 0 <= column < w:
            y[:, o, p] += np.einsum("ngc,gkc->ngk", grouped_x[:, row, column], grouped_w[:, :, r, s])
    y = y.reshape(n, ho, wo, spec.channels_out)
    return y if bias is None else y + bias


def arrays(spec: Conv2dSpec, shape: tuple[int, ...], dtype: str = "float64", seed: int = 0):
    x = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return x, default_parameters(spec, dtype, seed)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Conv2dSpec, tuple[int, int, int, int]]:
    small = st.integers(1, 3)
    kernel, stride, dilation = (draw(st.tuples(small, small)) for _ in range(3))
    padding = draw(st.tuples(*[st.integers(0, 3)] * 4))
    window = Window(kernel, stride, padding, dilation)
    size = [max(0, window.extent[d] - padding[2 * d] - padding[2 * d + 1]) + draw(st.integers(0, 5)) for d in (0, 1)]
    groups = draw(small)
    spec = Conv2dSpec(groups * draw(small), groups * draw(small), window, groups, draw(st.booleans()))
    return spec, (draw(st.integers(0, 3)), *size, spec.channels_in)


@settings(max_examples=150, deadline=None)
@given(cases(), st.booleans())
def test_equals_the_definition(case: tuple[Conv2dSpec, tuple[int, int, int, int]], training: bool) -> None:
    spec, shape = case
    x, parameters = arrays(spec, shape)
    bench = OperatorBench(KERNELS, spec, [x], parameters=parameters, training=training)
    expected = direct(spec, x, parameters["weight"], parameters.get("bias"))
    assert_close(bench.forward(), expected, 1e-12, str(spec))


@settings(max_examples=150, deadline=None)
@given(cases(), st.booleans())
def test_backward_is_the_adjoint_of_forward(case: tuple[Conv2dSpec, tuple[int, int, int, int]], accumulate: bool) -> None:
    """<conv(x, w), dy> = <x, dx> = <w, dw>, since a convolution is linear in either; the bias is left out by subtracting it."""
    spec, shape = case
    x, parameters = arrays(spec, shape)
    bench = OperatorBench(KERNELS, spec, [x], parameters=parameters, accumulate=accumulate)
    y = bench.forward()
    random = np.random.default_rng(1)
    dy, start = random.standard_normal(y.shape), random.standard_normal(shape)
    grads = bench.backward(dy, [start])
    product = np.vdot(y - parameters.get("bias", 0.0), dy)
    dx = grads.inputs[0] - start if accumulate else grads.inputs[0]
    assert np.vdot(x, dx) == pytest.approx(product, abs=1e-9)
    assert np.vdot(parameters["weight"], grads.parameters["weight"]) == pytest.approx(product, abs=1e-9)
    if spec.bias:
        assert_close(grads.parameters["bias"], dy.sum(axis=(0, 1, 2)), 1e-12, "bias")


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (Conv2dSpec(4, 6, Window((5, 3), (2, 3), (1, 2, 0, 1), (1, 2)), groups=2), (2, 7, 9, 4)),
        (Conv2dSpec(2, 3, Window((5, 3), (1, 1), (0, 3, 2, 1), (1, 2))), (2, 7, 9, 2)),
        (Conv2dSpec(3, 6, Window((3, 3), (1, 1), (1, 1, 1, 1)), groups=3), (1, 7, 9, 3)),
        (Conv2dSpec(3, 4, Window((1, 1), (1, 1), (0, 0, 0, 0))), (2, 3, 5, 3)),
        (Conv2dSpec(3, 4, Window((1, 1), (2, 3), (0, 0, 0, 0)), bias=False), (2, 5, 7, 3)),
        (Conv2dSpec(3, 4, Window((1, 1), (1, 1), (2, 0, 1, 3))), (1, 3, 5, 3)),
        (Conv2dSpec(17, 2, Window((3, 2), (1, 1), (1, 1, 0, 1))), (1, 4, 5, 17)),
    ],
)
def test_gradient(spec: Conv2dSpec, shape: tuple[int, ...], accumulate: bool) -> None:
    x, parameters = arrays(spec, shape)
    check_gradient(KERNELS, spec, [x], parameters=parameters, accumulate=accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("window", "groups"),
    [
        (Window((3, 3), (1, 1), (1, 1, 1, 1)), 1),
        (Window((5, 3), (1, 1), (0, 3, 2, 1), (1, 2)), 1),
        (Window((3, 3), (1, 1), (1, 1, 1, 1)), 2),
        (Window((1, 1), (1, 1), (0, 0, 0, 0)), 1),
    ],
)
def test_gradient_of_the_input_without_turning_the_weights(
    window: Window, groups: int, accumulate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where weights are many and pixels few: central differences, and the convolution with turned weights."""
    spec, shape = Conv2dSpec(4, 40, window, groups), (2, 5, 3, 4)
    x, parameters = arrays(spec, shape)
    dy, start = (
        np.random.default_rng(k).standard_normal(size) for k, size in enumerate((spec.output(TensorSpec(shape)).shape, shape))
    )
    gradients = []
    for many, kind in ((1, _Scattered), (1 << 18, _Flipped)):
        monkeypatch.setattr(conv2d, "MANY_WEIGHTS", many)
        bench = OperatorBench(KERNELS, spec, [x], parameters=parameters, accumulate=accumulate)
        assert isinstance(bench.operator, NumpyConv2d)
        assert isinstance(bench.operator.back, kind)
        bench.forward()
        gradients.append(bench.backward(dy, [start]).inputs[0])
        check_gradient(KERNELS, spec, [x], parameters=parameters, accumulate=accumulate)
    assert_close(gradients[0], gradients[1], 1e-12, str(spec))


@pytest.mark.parametrize("shape", [(0, 7, 9, 4), (3, 0, 9, 4), (3, 7, 0, 4)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1)])
def test_without_pixels_outputs_are_empty_and_gradients_zero(shape, stride, kernel) -> None:
    padding = (1, 1, 1, 1) if kernel == (3, 3) else (0, 0, 0, 0)
    spec = Conv2dSpec(4, 6, Window(kernel, stride, padding))
    x, parameters = arrays(spec, shape)
    bench = OperatorBench(KERNELS, spec, [x], parameters=parameters)
    y = bench.forward()
    assert y.size == 0
    grads = bench.backward(np.zeros(y.shape))
    assert grads.inputs[0].shape == shape
    assert not grads.parameters["weight"].any()
    assert not grads.parameters["bias"].any()


@pytest.mark.parametrize(
    ("shape", "stride", "groups"),
    [((5, 40, 41, 16), (1, 1), 1), ((2, 75, 71, 16), (1, 1), 2), ((2, 151, 153, 16), (2, 3), 1), ((7, 81, 79, 16), (2, 2), 4)],
)
def test_chunks_make_one_convolution(shape, stride, groups) -> None:
    """Images large enough for several chunks of images, and of rows of an image: the sum over the parts is the whole."""
    spec = Conv2dSpec(16, 8, Window((3, 3), stride, (1, 0, 2, 1)), groups)
    x, parameters = arrays(spec, shape)
    bench = OperatorBench(KERNELS, spec, [x], parameters=parameters)
    assert bench.operator.columns.count > 1
    y = bench.forward()
    dy = np.random.default_rng(2).standard_normal(y.shape)
    grads = bench.backward(dy)
    d_weight, d_input = np.zeros_like(parameters["weight"]), np.zeros_like(x)
    for i in range(shape[0]):
        rows = [OperatorBench(KERNELS, spec, [x[i : i + 1]], parameters=parameters)]
        assert_close(rows[0].forward(), y[i : i + 1], 1e-12, "output")
        one = rows[0].backward(dy[i : i + 1])
        d_weight += one.parameters["weight"]
        d_input[i] = one.inputs[0][0]
    assert_close(grads.parameters["weight"], d_weight, 1e-11, "weight")
    assert_close(grads.inputs[0], d_input, 1e-11, "input")
    weight = parameters["weight"].reshape(groups, 8 // groups, 3, 3, -1)
    o, p = y.shape[1] - 1, y.shape[2] // 2
    top, left = o * stride[0] - 1, p * stride[1] - 2
    window = x[:, top : top + 3, left : left + 3].reshape(shape[0], 3, 3, groups, -1)
    expected = np.einsum("nrsgc,gkrsc->ngk", window[:, : weight.shape[2]], weight[:, :, : window.shape[1]])
    assert_close(y[:, o, p], expected.reshape(shape[0], 8) + parameters["bias"], 1e-12, "one pixel of the last rows")


@pytest.mark.parametrize("stride", [(1, 1), (2, 1)])
@pytest.mark.parametrize("channels", [1, 32])
def test_float32_is_near_float64(stride, channels) -> None:
    spec = Conv2dSpec(channels, 8, Window((3, 3), stride, (1, 1, 1, 1)))
    x, parameters = arrays(spec, (3, 15, 17, channels))
    results = {}
    for dtype in ("float32", "float64"):
        cast = {role: value.astype(dtype) for role, value in parameters.items()}
        bench = OperatorBench(KERNELS, spec, [x.astype(dtype)], parameters=cast)
        y = bench.forward()
        assert y.dtype == dtype
        grads = bench.backward(np.random.default_rng(3).standard_normal(y.shape).astype(dtype))
        results[dtype] = [y, grads.inputs[0], *grads.parameters.values()]
    for single, double in zip(results["float32"], results["float64"], strict=True):
        assert_close(single, double, 1e-5, "float32")


def test_an_unwanted_input_gradient_is_not_computed() -> None:
    spec = Conv2dSpec(2, 3, Window((3, 3), (1, 1), (1, 1, 1, 1)))
    x, parameters = arrays(spec, (2, 5, 7, 2))
    bench = OperatorBench(KERNELS, spec, [x], parameters=parameters, wanted=[False])
    wanted = OperatorBench(KERNELS, spec, [x], parameters=parameters)
    dy = np.ones(bench.forward().shape)
    wanted.forward()
    grads = bench.backward(dy)
    assert grads.inputs == (None,)
    np.testing.assert_array_equal(grads.parameters["weight"], wanted.backward(dy).parameters["weight"])


def test_scratch_does_not_grow_with_the_batch() -> None:
    spec = Conv2dSpec(64, 64, Window((3, 3), (1, 1), (1, 1, 1, 1)))
    sizes = [
        OperatorBench(
            KERNELS, spec, [np.zeros((n, 56, 56, 64), np.float32)], parameters=default_parameters(spec, "float32")
        ).operator.scratch_bytes
        for n in (2, 5)
    ]
    assert sizes[0] == sizes[1] < 8 << 20
