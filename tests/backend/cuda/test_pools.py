"""Pooling, ReLU, sums and views of the cuda set against the NumPy set in float64, in any order of blocks and threads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.specs import (
    AdaptiveAveragePoolSpec,
    AddSpec,
    PoolSpec,
    ReluSpec,
    TensorSpec,
    Window,
    parameter_dtype,
)
from hpctrain.core.errors import BackendError
from hpctrain.testing.operators import OperatorBench
from hpctrain_testing.emulator.memory import on_host
from tests.support.emulated import CudaKernelsFactory
from tests.support.kernel_pairs import run
from tests.support.rounded import DTYPES, assert_rounded, assert_same_bits, device_bench, dyadic, emulated_kernels
from tests.support.sampling import amount

STEM = Window((3, 3), (2, 2), (1, 1, 1, 1))

HALVES = Window((2, 2), (2, 2), (0, 0, 0, 0))

SIXTEEN_BY_SEVENTEEN = Window((16, 17), (1, 2), (0, 3, 1, 0))


@st.composite
def cases(draw: st.DrawFn) -> tuple[PoolSpec, tuple[int, ...]]:
    kernel, stride = (draw(st.tuples(st.integers(1, 4), st.integers(1, 4))) for _ in range(2))
    dilation = draw(st.sampled_from([(1, 1), (1, 2), (3, 1)]))
    padding = tuple(draw(st.integers(0, kernel[dim // 2] // 2)) for dim in range(4))
    window = Window(kernel, stride, padding, dilation)
    spec = PoolSpec(draw(st.sampled_from(["max", "average"])), window, draw(st.booleans()), draw(st.booleans()))
    size = [max(1, window.extent[d] - padding[2 * d] - padding[2 * d + 1]) + draw(st.integers(0, 6)) for d in (0, 1)]
    return spec, (draw(st.integers(0, 3)), *size, draw(st.sampled_from([1, 2, 3, 8, 12, 16])))


def compare(
    spec: PoolSpec | AdaptiveAveragePoolSpec,
    x: np.ndarray,
    dtype: str,
    *,
    accumulate: bool = False,
    seed: int,
    training: bool = True,
) -> None:
    expected = OperatorBench(NumpyKernelSet(), spec, [x], accumulate=accumulate, training=training)
    y = expected.forward()
    start = [dyadic(*x.shape, seed=2)]
    bench = device_bench(emulated_kernels(dtype, seed), spec, x, accumulate=accumulate, training=training)
    assert_rounded(bench.forward(), y, dtype)
    if training:
        dy = dyadic(*y.shape, seed=1)
        assert_rounded(bench.backward(dy, start).inputs[0], expected.backward(dy, start).inputs[0], dtype)


@pytest.mark.slow
@pytest.mark.usefixtures("emulated_device")
@settings(max_examples=amount(66, 200))
@given(cases(), st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 1, 2, 3]))
def test_equals_numpy(
    case: tuple[PoolSpec, tuple[int, ...]], dtype: str, ties: bool, accumulate: bool, training: bool, seed: int
) -> None:
    """With ties, too: few values, as after a ReLU; the first of equals receives all."""
    spec, shape = case
    x = dyadic(*shape)
    compare(spec, np.round(x / 2) if ties else x, dtype, accumulate=accumulate, seed=seed, training=training)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["max", "average"])
@pytest.mark.parametrize("window", [STEM, HALVES])
@pytest.mark.parametrize("shape", [(9, 34, 5, 3), (2, 9, 70, 8)])
def test_more_rows_and_columns_than_threads(
    emulated_device, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str, window: Window, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr("hpctrain.backend.cuda.operator._WAVES", 1)
    compare(PoolSpec(kind, window), dyadic(*shape), dtype, seed=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 16])
def test_a_window_of_many_taps_has_a_winner(emulated_device, dtype: str, channels: int) -> None:
    """Of 272 taps, which fill no byte."""
    x = np.random.default_rng(0).permutation(2 * 18 * 20 * channels).reshape(2, 18, 20, channels) % 251 / 1.0
    compare(PoolSpec("max", SIXTEEN_BY_SEVENTEEN), x, dtype, seed=2)


def winners(bench: OperatorBench, taps: int) -> np.ndarray:
    dtype = np.uint8 if taps < 256 else np.uint16
    shape = bench.operator.output.shape
    return on_host(bench.operator.buffers.saved).view(dtype)[: int(np.prod(shape))].reshape(shape)


@pytest.mark.parametrize("window", [STEM, HALVES, Window((3, 3), (1, 1), (1, 1, 1, 1), (2, 2)), SIXTEEN_BY_SEVENTEEN])
@pytest.mark.parametrize("channels", [3, 8])
def test_winners_are_those_of_numpy(emulated_device, window: Window, channels: int) -> None:
    """Among equals, infinities and NaN as well; the NumPy set counts taps down from their number."""
    random = np.random.default_rng(0)
    x = random.choice([0.0, 1.0, -1.0, -np.inf, np.nan], (3, 18, 19, channels), p=[0.3, 0.2, 0.2, 0.25, 0.05])
    spec = PoolSpec("max", window)
    reference = OperatorBench(NumpyKernelSet(), spec, [x])
    y = reference.forward()
    taps = window.kernel[0] * window.kernel[1]
    bench = device_bench(emulated_kernels("float32"), spec, x)
    np.testing.assert_array_equal(bench.forward(), y)
    np.testing.assert_array_equal(winners(bench, taps), taps - reference.operator.saved[0].astype(np.int64))


@pytest.mark.parametrize("kind", ["max", "average"])
def test_memory_that_does_not_fit_packs(emulated_device, kind: str) -> None:
    """Eight channels that do not begin at a multiple of 16 bytes."""
    spec, x = PoolSpec(kind, STEM), dyadic(2, 7, 9, 8)
    kernels = emulated_kernels("bfloat16")
    allocate = kernels.runtime.device.allocate
    kernels.allocate = lambda size_bytes: allocate(size_bytes + 2)[2:]
    bench = device_bench(kernels, spec, x)
    assert bench.operator.buffers.inputs[0].pointer % 16
    reference = OperatorBench(NumpyKernelSet(), spec, [x])
    y = reference.forward()
    assert_rounded(bench.forward(), y, "bfloat16")
    assert_rounded(bench.backward(dyadic(*y.shape)).inputs[0], reference.backward(dyadic(*y.shape)).inputs[0], "bfloat16")


def test_windows_that_codes_cannot_count_are_refused(emulated_device) -> None:
    spec = PoolSpec("max", Window((300, 300), (1, 1), (0, 0, 0, 0)))
    with pytest.raises(BackendError, match=r"300 x 300 has 90000 taps; .* supports at most 65536, for example 256 x 256\.$"):
        emulated_kernels("float32").make(spec, (TensorSpec((1, 300, 300, 1)),), training=True)


POOLS = {
    "max": PoolSpec("max", Window((3, 3), (2, 2), (1, 1, 1, 1))),
    "average": PoolSpec("average", Window((3, 3), (2, 2), (1, 1, 1, 1))),
    "to one": AdaptiveAveragePoolSpec((1, 1)),
    "to some": AdaptiveAveragePoolSpec((3, 4)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", POOLS)
def test_all_orders_give_the_same_bits(emulated_device, name: str, dtype: str) -> None:
    """Of sums that are rounded."""
    x = np.random.default_rng(0).standard_normal((2, 9, 11, 8))
    dy = np.random.default_rng(1).standard_normal(POOLS[name].output(TensorSpec(x.shape)).shape)
    results = []
    for seed in (0, 1, 2, 3):
        bench = device_bench(emulated_kernels(dtype, seed), POOLS[name], x)
        results.append([bench.forward(), *bench.backward(dy).inputs])
    assert_same_bits(results)


@pytest.mark.parametrize("name", POOLS)
def test_without_pixels_and_without_a_wanted_gradient(emulated_device, name: str) -> None:
    """Averages of nothing are zero; a window of nothing has no output."""
    kernels = emulated_kernels("float32")
    for shape in ((0, 7, 9, 3), (2, 0, 9, 3), (2, 7, 0, 3)):
        bench = device_bench(kernels, POOLS[name], np.zeros(shape))
        y = bench.forward()
        assert y.shape == POOLS[name].output(TensorSpec(shape)).shape
        assert not y.any()
        assert bench.backward(np.ones(y.shape)).inputs[0].shape == shape
    bench = device_bench(kernels, POOLS[name], np.zeros((1, 5, 5, 4)), wanted=[False])
    assert bench.backward(np.ones(bench.forward().shape)).inputs == (None,)


_SIZES = st.integers(1, 9)


@pytest.mark.usefixtures("emulated_device")
@settings(max_examples=amount(30, 60))
@given(
    _SIZES, _SIZES, _SIZES, _SIZES, st.integers(0, 3), st.sampled_from([1, 3, 8]), st.sampled_from(DTYPES), st.booleans(), _SIZES
)
def test_adaptive_pooling_equals_numpy(
    h: int, w: int, ho: int, wo: int, n: int, channels: int, dtype: str, accumulate: bool, seed: int
) -> None:
    compare(AdaptiveAveragePoolSpec((ho, wo)), dyadic(n, h, w, channels), dtype, accumulate=accumulate, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "shape"), [((1, 1), (2, 7, 7, 264)), ((1, 1), (3, 8, 5, 35)), ((2, 1), (1, 9, 8, 40))])
def test_large_windows_are_shared_by_a_block(emulated_device, dtype: str, size: tuple[int, int], shape: tuple[int, ...]) -> None:
    compare(AdaptiveAveragePoolSpec(size), dyadic(*shape), dtype, seed=3)


def test_more_outputs_than_blocks(emulated_device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.backend.cuda.pool._MOST_BLOCKS", 2)
    monkeypatch.setattr("hpctrain.backend.cuda.operator._WAVES", 1)
    compare(AdaptiveAveragePoolSpec((1, 1)), dyadic(5, 4, 4, 3), "float32", seed=4)
    compare(AdaptiveAveragePoolSpec((7, 5)), dyadic(3, 11, 9, 40), "float32", seed=4)


def test_outputs_that_kernels_cannot_count_are_refused(emulated_device) -> None:
    with pytest.raises(
        BackendError, match=r"of 4000000 pixels to 1000 is too large for backend cuda, which supports fewer than 536 outputs\.$"
    ):
        emulated_kernels("float32").make(AdaptiveAveragePoolSpec((1000, 1)), (TensorSpec((1, 4_000_000, 1, 1)),), training=True)


_SHAPES = [(2, 3, 5, 16), (3, 5, 7), (1,), (0, 4, 4, 8), (700, 8)]

ELEMENTWISE = {"relu": ReluSpec(), "add": AddSpec(), "add and relu": AddSpec(relu=True)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_values_and_gradients(cuda_kernels: CudaKernelsFactory, name: str, dtype: str) -> None:
    """In place and not, each gradient wanted or not, written and added to."""
    spec, count, host = ELEMENTWISE[name], 1 if name == "relu" else 2, parameter_dtype(dtype)
    for seed, shape in enumerate(_SHAPES):
        inputs, kernels = [dyadic(*shape, seed=i) for i in range(count)], cuda_kernels(dtype, seed)
        dy, starts = dyadic(*shape, seed=5), [dyadic(*shape, seed=7 + i) for i in range(count)]
        aim = sum(inputs) if name == "add" else np.maximum(sum(inputs), 0)
        passed = dy if name == "add" else np.where(aim > 0, dy, 0)
        for in_place, wanted in ((False, [True, True]), (True, [True, True]), (True, [True, False])):
            xs, options = [x.astype(host) for x in inputs], {"in_place": in_place, "wanted": wanted[:count]}
            bench = OperatorBench(kernels, spec, xs, dtype=dtype, **options)
            assert_rounded(bench.forward(), aim, dtype)
            for grad, asked in zip(bench.backward(dy).inputs, wanted, strict=False):
                assert (grad is not None) == asked
                assert grad is None or assert_rounded(grad, passed, dtype) is None
        for adds in ((True, False), (False, True)):
            held = [start if add else None for start, add in zip(starts, adds, strict=False)]
            grads = run(kernels, spec, inputs, dtype=dtype, output_grad=dy, accumulate=held).input_grads
            for grad, before in zip(grads, held, strict=True):
                assert_rounded(grad, passed if before is None else passed + before, dtype)


def test_a_relu_hands_nan_on_and_stops_the_gradient_at_zero(cuda_kernels: CudaKernelsFactory) -> None:
    bench = device_bench(cuda_kernels("float32"), ReluSpec(), np.array([[np.nan, -1.0, 0.0, 2.0]]))
    np.testing.assert_array_equal(bench.forward(), [[np.nan, 0.0, 0.0, 2.0]])
    np.testing.assert_array_equal(bench.backward(np.full((1, 4), 5.0)).inputs[0], [[0.0, 0.0, 0.0, 5.0]])
