"""Adaptive average pooling of the cuda set against the NumPy set in float64, in any order of blocks and threads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import AdaptiveAveragePoolSpec, TensorSpec
from hpctrain.errors import BackendError
from hpctrain.testing.operators import OperatorBench
from tests.support.rounded import DTYPES, assert_rounded, assert_same_bits, device_bench, dyadic, emulated_kernels

SIZES = st.integers(1, 9)


def compare(size: tuple[int, int], x: np.ndarray, dtype: str, *, accumulate: bool = False, seed: int = 0) -> None:
    spec = AdaptiveAveragePoolSpec(size)
    expected = OperatorBench(NumpyKernelSet(), spec, [x], accumulate=accumulate)
    start = [dyadic(*x.shape, seed=2)]
    bench = device_bench(emulated_kernels(dtype, seed), spec, x, accumulate=accumulate)
    y = expected.forward()
    assert_rounded(bench.forward(), y, dtype)
    dy = dyadic(*y.shape, seed=1)
    assert_rounded(bench.backward(dy, start).inputs[0], expected.backward(dy, start).inputs[0], dtype)


@pytest.mark.usefixtures("emulated_device")
@settings(max_examples=60)
@given(SIZES, SIZES, SIZES, SIZES, st.integers(0, 3), st.sampled_from([1, 3, 8]), st.sampled_from(DTYPES), st.booleans(), SIZES)
def test_equals_numpy(h: int, w: int, ho: int, wo: int, n: int, channels: int, dtype: str, accumulate: bool, seed: int) -> None:
    compare((ho, wo), dyadic(n, h, w, channels), dtype, accumulate=accumulate, seed=seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "shape"), [((1, 1), (2, 7, 7, 264)), ((1, 1), (3, 8, 5, 35)), ((2, 1), (1, 9, 8, 40))])
def test_large_windows_are_shared_by_a_block(emulated_device, dtype: str, size: tuple[int, int], shape: tuple[int, ...]) -> None:
    compare(size, dyadic(*shape), dtype, seed=3)


def test_more_outputs_than_blocks(emulated_device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.backend.kernels.cuda.adaptive_pool._MOST_BLOCKS", 2)
    monkeypatch.setattr("hpctrain.backend.kernels.cuda.images._WAVES", 1)
    compare((1, 1), dyadic(5, 4, 4, 3), "float32", seed=4)
    compare((7, 5), dyadic(3, 11, 9, 40), "float32", seed=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [(1, 1), (3, 4)])
def test_all_orders_give_the_same_bits(emulated_device, dtype: str, size: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    x, dy = random.standard_normal((2, 7, 7, 16)), random.standard_normal((2, *size, 16))
    results = []
    for seed in (0, 1, 2, 3):
        bench = device_bench(emulated_kernels(dtype, seed), AdaptiveAveragePoolSpec(size), x)
        results.append([bench.forward(), *bench.backward(dy).inputs])
    assert_same_bits(results)


@pytest.mark.parametrize("shape", [(0, 7, 9, 3), (2, 0, 9, 3), (2, 7, 0, 3)])
def test_an_image_without_pixels_averages_to_zero(emulated_device, shape: tuple[int, ...]) -> None:
    bench = device_bench(emulated_kernels("float32"), AdaptiveAveragePoolSpec((2, 3)), np.zeros(shape))
    y = bench.forward()
    assert y.shape == (shape[0], 2, 3, 3)
    assert not y.any()
    assert bench.backward(np.ones(y.shape)).inputs[0].shape == shape


def test_a_gradient_that_nobody_wants_is_not_computed(emulated_device) -> None:
    bench = device_bench(emulated_kernels("float32"), AdaptiveAveragePoolSpec((1, 1)), np.zeros((1, 5, 5, 4)), wanted=[False])
    assert bench.backward(np.ones(bench.forward().shape)).inputs == (None,)


def test_outputs_that_kernels_cannot_count_are_refused(emulated_device) -> None:
    with pytest.raises(BackendError, match=r"of 4000000 pixels has fewer than 536 outputs, not 1000\.$"):
        emulated_kernels("float32").make(AdaptiveAveragePoolSpec((1000, 1)), (TensorSpec((1, 4_000_000, 1, 1)),), training=True)
