"""Convolution and pooling: against loops over the definition, PyTorch's, itself in chunks, and images without pixels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.numpy import conv2d
from hpctrain.backend.numpy.conv2d import NumpyConv2d, _Flipped, _Scattered
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.specs import AdaptiveAveragePoolSpec, Conv2dSpec, PoolSpec, TensorSpec, Window
from hpctrain.testing.operators import OperatorBench, assert_close, check_gradient, default_parameters
from tests.support.sampling import amount

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


@settings(max_examples=amount(50, 150), deadline=None)
@given(cases(), st.booleans())
def test_equals_the_definition(case: tuple[Conv2dSpec, tuple[int, int, int, int]], training: bool) -> None:
    spec, shape = case
    x, parameters = arrays(spec, shape)
    bench = OperatorBench(KERNELS, spec, [x], parameters=parameters, training=training)
    expected = direct(spec, x, parameters["weight"], parameters.get("bias"))
    assert_close(bench.forward(), expected, 1e-12, str(spec))


@settings(max_examples=amount(50, 150), deadline=None)
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


def distinct(*shape: int, seed: int = 0) -> np.ndarray:
    """Values at least 0.01 apart, so that central differences do not change who is the largest."""
    return np.random.default_rng(seed).permutation(int(np.prod(shape))).reshape(shape) * 0.01 - 1.0


@st.composite
def pool_cases(draw: st.DrawFn, kinds: tuple[str, ...] = ("max", "average")) -> tuple[PoolSpec, tuple[int, int, int, int]]:
    kernel, stride = (draw(st.tuples(st.integers(1, 4), st.integers(1, 4))) for _ in range(2))
    dilation = draw(st.sampled_from([(1, 1), (1, 2), (3, 1)]))
    padding = tuple(draw(st.integers(0, kernel[dim // 2] // 2)) for dim in range(4))
    window = Window(kernel, stride, padding, dilation)
    spec = PoolSpec(draw(st.sampled_from(kinds)), window, draw(st.booleans()), draw(st.booleans()))
    size = [max(1, window.extent[d] - padding[2 * d] - padding[2 * d + 1]) + draw(st.integers(0, 6)) for d in (0, 1)]
    return spec, (draw(st.integers(0, 3)), *size, draw(st.integers(1, 4)))


def windows(spec: PoolSpec, shape: tuple[int, ...]):
    """Per output (o, p): the rows and columns of its taps inside the image, in row-major order, and its divisor."""
    window, size = spec.window, shape[1:3]
    for o, p in np.ndindex(*window.output_size(size, ceil_mode=spec.ceil_mode)):
        taps, divisor = [], 1
        for dim, index in enumerate((o, p)):
            start = index * window.stride[dim] - window.padding[2 * dim]
            positions = [start + t * window.dilation[dim] for t in range(window.kernel[dim])]
            inside = [position for position in positions if 0 <= position < size[dim]]
            limit = size[dim] + window.padding[2 * dim + 1]
            divisor *= len([q for q in positions if q < limit]) if spec.count_include_pad else len(inside)
            taps.append(inside)
        yield o, p, np.ix_(*taps), max(divisor, 1)


def direct_pool(spec: PoolSpec, x: np.ndarray) -> np.ndarray:
    y = np.empty((x.shape[0], *spec.window.output_size(x.shape[1:3], ceil_mode=spec.ceil_mode), x.shape[3]))
    for o, p, (rows, columns), divisor in windows(spec, x.shape):
        values = x[:, rows, columns].reshape(x.shape[0], rows.size * columns.size, x.shape[3])
        y[:, o, p] = values.max(axis=1, initial=-np.inf) if spec.kind == "max" else values.sum(axis=1) / divisor
    return y


def direct_gradient(spec: PoolSpec, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    dx = np.zeros_like(x)
    for o, p, (rows, columns), divisor in windows(spec, x.shape):
        if spec.kind == "average":
            dx[:, rows, columns] += dy[:, o, p][:, None, None] / divisor
            continue
        values = x[:, rows, columns].reshape(x.shape[0], -1, x.shape[3]) if rows.size * columns.size * len(x) else None
        for n, c in np.ndindex(x.shape[0], x.shape[3]):
            if values is not None:
                r, s = divmod(int(values[n, :, c].argmax()), columns.size)  # argmax returns the first of equals
                dx[n, rows[r, 0], columns[0, s], c] += dy[n, o, p, c]
    return dx


@settings(max_examples=amount(66, 200), deadline=None)
@given(pool_cases(), st.booleans())
def test_pool_equals_the_definition(case: tuple[PoolSpec, tuple[int, ...]], training: bool) -> None:
    spec, shape = case
    x = distinct(*shape)
    y = OperatorBench(KERNELS, spec, [x], training=training).forward()
    np.testing.assert_allclose(
        y, direct_pool(spec, x), rtol=1e-12, atol=1e-12
    )  # equal infinities where dilation misses the image


@settings(max_examples=amount(66, 200), deadline=None)
@given(pool_cases(), st.booleans(), st.booleans())
def test_gradient_equals_the_definition(case: tuple[PoolSpec, tuple[int, ...]], ties: bool, accumulate: bool) -> None:
    """With ties, too: only few values, as after a ReLU; the first of equals receives all."""
    spec, shape = case
    x = np.random.default_rng(0).integers(0, 3, shape).astype(np.float64) if ties else distinct(*shape)
    bench = OperatorBench(KERNELS, spec, [x], accumulate=accumulate)
    dy = np.random.default_rng(1).standard_normal(bench.forward().shape)
    start = np.random.default_rng(2).standard_normal(shape)
    expected = direct_gradient(spec, x, dy) + (start if accumulate else 0)
    assert_close(bench.backward(dy, [start]).inputs[0], expected, 1e-12, str(spec))


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["max", "average"])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", [(7, 9), (8, 6), (15, 5)])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [((3, 3), (2, 2), (1, 1)), ((2, 2), (2, 2), (0, 0)), ((3, 2), (1, 3), (1, 1)), ((5, 5), (3, 3), (2, 2))],
)
def test_pool_equals_torchs(kind: str, ceil_mode: bool, include: bool, size, kernel, stride, padding) -> None:
    """With few values, for the ties that follow a ReLU."""
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).integers(0, 3, (2, *size, 3)).astype(np.float64)
    theirs = torch.tensor(x.transpose(0, 3, 1, 2).copy(), requires_grad=True)
    if kind == "max":
        y = torch.nn.functional.max_pool2d(theirs, kernel, stride, padding, ceil_mode=ceil_mode)
    else:
        y = torch.nn.functional.avg_pool2d(theirs, kernel, stride, padding, ceil_mode, include)
    dy = np.random.default_rng(9).standard_normal(y.shape)
    y.backward(torch.tensor(dy))
    window = Window(kernel, stride, (padding[0], padding[0], padding[1], padding[1]))
    bench = OperatorBench(KERNELS, PoolSpec(kind, window, ceil_mode, include), [x])
    assert_close(bench.forward(), y.detach().numpy().transpose(0, 2, 3, 1), 1e-11, "output")
    found = bench.backward(dy.transpose(0, 2, 3, 1).copy()).inputs[0]
    assert_close(found, theirs.grad.numpy().transpose(0, 2, 3, 1), 1e-10, "input gradient")


@pytest.mark.parametrize("kind", ["max", "average"])
@pytest.mark.parametrize("shape", [(0, 7, 9, 3), (2, 0, 9, 3), (2, 7, 0, 3)])
def test_without_pixels_outputs_are_empty(kind: str, shape: tuple[int, ...]) -> None:
    bench = OperatorBench(KERNELS, PoolSpec(kind, Window((3, 3), (2, 2), (1, 1, 1, 1))), [np.zeros(shape)])
    y = bench.forward()
    assert y.size == 0
    assert bench.backward(np.zeros(y.shape)).inputs[0].shape == shape


@pytest.mark.parametrize("kind", ["max", "average"])
@pytest.mark.parametrize("window", [Window((3, 3), (2, 2), (1, 1, 1, 1)), Window((2, 2), (2, 2), (0, 0, 0, 0))])
def test_blocks_make_one_pooling(kind: str, window: Window) -> None:
    """Images large enough for several blocks of images, and of rows of an image."""
    for shape in ((9, 57, 59, 16), (2, 131, 129, 32)):
        spec, x = PoolSpec(kind, window), distinct(*shape)
        bench = OperatorBench(KERNELS, spec, [x])
        assert len(bench.operator.blocks) > 2
        y = bench.forward()
        assert_close(y, direct_pool(spec, x), 1e-12, "output")
        dy = np.random.default_rng(1).standard_normal(y.shape)
        dx = bench.backward(dy).inputs[0]
        assert np.vdot(y, dy) == pytest.approx(np.vdot(x, dx)), "pooling is homogeneous: <y, dy> = <x, dx>"
        reached = dx.any(axis=3)
        assert reached[:, ::2, ::2].any(axis=(1, 2)).all()


def test_a_window_of_256_taps_has_a_winner() -> None:
    spec = PoolSpec("max", Window((16, 17), (1, 1), (0, 0, 0, 0)))
    x = distinct(2, 17, 18, 2)
    bench = OperatorBench(KERNELS, spec, [x])
    y = bench.forward()
    assert_close(y, direct_pool(spec, x), 0, "output")
    dy = np.random.default_rng(1).standard_normal(y.shape)
    assert_close(bench.backward(dy).inputs[0], direct_gradient(spec, x, dy), 1e-12, "gradient")


@pytest.mark.parametrize("training", [False, True])
def test_nan_passes_a_maximum(training: bool) -> None:
    """A network that diverged must not look healthy after a pool."""
    x = distinct(1, 6, 6, 2)
    x[0, 3, 3, 1] = np.nan
    y = OperatorBench(KERNELS, PoolSpec("max", Window((2, 2), (2, 2), (0, 0, 0, 0))), [x], training=training).forward()
    assert np.isnan(y[0, 1, 1, 1])
    assert np.isnan(y).sum() == 1


SIZES = st.integers(1, 9)


def direct_adaptive_pool(x: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    y = np.empty((x.shape[0], *size, x.shape[3]))
    for i, j in np.ndindex(*size):
        rows, columns = (
            slice(k * length // outputs, -(-(k + 1) * length // outputs))
            for k, length, outputs in zip((i, j), x.shape[1:3], size, strict=True)
        )
        y[:, i, j] = x[:, rows, columns].mean(axis=(1, 2))
    return y


@settings(max_examples=amount(30, 80), deadline=None)
@given(SIZES, SIZES, SIZES, SIZES, st.integers(0, 3))
def test_adaptive_pool_equals_the_definition(h: int, w: int, ho: int, wo: int, n: int) -> None:
    x = np.random.default_rng(0).standard_normal((n, h, w, 3))
    y = OperatorBench(KERNELS, AdaptiveAveragePoolSpec((ho, wo)), [x]).forward()
    assert_close(y, direct_adaptive_pool(x, (ho, wo)), 1e-12, "output")


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (9, 7)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_gradient(size: tuple[int, int], accumulate: bool) -> None:
    x = np.random.default_rng(0).standard_normal((2, 7, 9, 3))
    check_gradient(KERNELS, AdaptiveAveragePoolSpec(size), [x], accumulate=accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
def test_blocks_of_images_make_one_pooling(accumulate: bool) -> None:
    x = np.random.default_rng(0).standard_normal((7, 41, 43, 65))
    spec = AdaptiveAveragePoolSpec((3, 2))
    bench = OperatorBench(KERNELS, spec, [x], accumulate=accumulate)
    assert bench.operator.images < 7
    y = bench.forward()
    assert_close(y, direct_adaptive_pool(x, (3, 2)), 1e-12, "output")
    dy, start = np.random.default_rng(1).standard_normal(y.shape), np.ones(x.shape)
    dx = bench.backward(dy, [start]).inputs[0] - (start if accumulate else 0)
    assert np.vdot(x, dx) == pytest.approx(np.vdot(y, dy))


@pytest.mark.parametrize("shape", [(0, 7, 9, 3), (2, 0, 9, 3), (2, 7, 0, 3)])
def test_an_image_without_pixels_averages_to_zero(shape: tuple[int, ...]) -> None:
    bench = OperatorBench(KERNELS, AdaptiveAveragePoolSpec((2, 3)), [np.zeros(shape)])
    y = bench.forward()
    assert y.shape == (shape[0], 2, 3, 3)
    assert not y.any()
    assert bench.backward(np.ones(y.shape)).inputs[0].shape == shape
