"""Pooling: against windows taken one by one, central differences, who wins a tie, images without pixels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import PoolSpec, Window
from hpctrain.testing.operator_gradients import assert_close, check_gradient
from hpctrain.testing.operators import OperatorBench

KERNELS = NumpyKernelSet()


def distinct(*shape: int, seed: int = 0) -> np.ndarray:
    """Values at least 0.01 apart, so that central differences do not change who is the largest."""
    return np.random.default_rng(seed).permutation(int(np.prod(shape))).reshape(shape) * 0.01 - 1.0


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...] = ("max", "average")) -> tuple[PoolSpec, tuple[int, int, int, int]]:
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


def direct(spec: PoolSpec, x: np.ndarray) -> np.ndarray:
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
                r, s = divmod(int(values[n, :, c].argmax()), columns.size)  # argmax gives the first of equals
                dx[n, rows[r, 0], columns[0, s], c] += dy[n, o, p, c]
    return dx


@settings(max_examples=200, deadline=None)
@given(cases(), st.booleans())
def test_equals_the_definition(case: tuple[PoolSpec, tuple[int, ...]], training: bool) -> None:
    spec, shape = case
    x = distinct(*shape)
    y = OperatorBench(KERNELS, spec, [x], training=training).forward()
    np.testing.assert_allclose(y, direct(spec, x), rtol=1e-12, atol=1e-12)  # equal infinities where dilation misses the image


@settings(max_examples=200, deadline=None)
@given(cases(), st.booleans(), st.booleans())
def test_gradient_equals_the_definition(case: tuple[PoolSpec, tuple[int, ...]], ties: bool, accumulate: bool) -> None:
    """With ties, too: only few values, as after a ReLU; the first of equals receives all."""
    spec, shape = case
    x = np.random.default_rng(0).integers(0, 3, shape).astype(np.float64) if ties else distinct(*shape)
    bench = OperatorBench(KERNELS, spec, [x], accumulate=accumulate)
    dy = np.random.default_rng(1).standard_normal(bench.forward().shape)
    start = np.random.default_rng(2).standard_normal(shape)
    expected = direct_gradient(spec, x, dy) + (start if accumulate else 0)
    assert_close(bench.backward(dy, [start]).inputs[0], expected, 1e-12, str(spec))


@pytest.mark.parametrize("kind", ["max", "average"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    "window",
    [Window((3, 2), (2, 3), (1, 1, 1, 0)), Window((2, 2), (2, 2), (0, 0, 0, 0)), Window((5, 3), (1, 1), (2, 1, 0, 1))],
)
def test_gradient(kind: str, window: Window, accumulate: bool, include: bool) -> None:
    check_gradient(KERNELS, PoolSpec(kind, window, True, include), [distinct(2, 7, 9, 3)], accumulate=accumulate, step=1e-4)


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
        assert_close(y, direct(spec, x), 1e-12, "output")
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
    assert_close(y, direct(spec, x), 0, "output")
    dy = np.random.default_rng(1).standard_normal(y.shape)
    assert_close(bench.backward(dy).inputs[0], direct_gradient(spec, x, dy), 1e-12, "gradient")


@pytest.mark.parametrize("training", [False, True])
def test_nan_passes_a_maximum(training: bool) -> None:
    """A network that diverged must not look healthy behind a pool."""
    x = distinct(1, 6, 6, 2)
    x[0, 3, 3, 1] = np.nan
    y = OperatorBench(KERNELS, PoolSpec("max", Window((2, 2), (2, 2), (0, 0, 0, 0))), [x], training=training).forward()
    assert np.isnan(y[0, 1, 1, 1])
    assert np.isnan(y).sum() == 1


@pytest.mark.parametrize("kind", ["max", "average"])
def test_float32_is_near_float64(kind: str) -> None:
    spec, x = PoolSpec(kind, Window((3, 3), (2, 2), (1, 1, 1, 1))), distinct(3, 15, 17, 5)
    results = []
    for dtype in ("float32", "float64"):
        bench = OperatorBench(KERNELS, spec, [x.astype(dtype)])
        y = bench.forward()
        dx = bench.backward(np.random.default_rng(1).standard_normal(y.shape).astype(dtype)).inputs[0]
        assert y.dtype == dx.dtype == dtype
        results.append((y, dx))
    for single, double in zip(*results, strict=True):
        assert_close(single, double, 1e-5, "float32")
