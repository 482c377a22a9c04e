"""Softmax cross entropy on a device: the NumPy set's losses and gradients within rounding, its very ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.cuda.half import bfloat16_bits, bfloat16_values
from hpctrain.backend.kernels.base import LossSums
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import SoftmaxCrossEntropySpec
from hpctrain.errors import DataError
from tests.support.emulated import CudaKernelsFactory

DTYPES = ("float64", "float32", "bfloat16")
#: relative to the largest value; bfloat16 has one rounding of the gradient
BARS = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 2.0**-8}


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return bfloat16_values(bfloat16_bits(values)) if dtype == "bfloat16" else values.astype(dtype)


def _host(logits: np.ndarray, labels: np.ndarray, smoothing: float, global_count: int) -> tuple[LossSums, np.ndarray]:
    """The NumPy set's, in float64."""
    d_logits = np.full(logits.shape, np.nan)
    loss = NumpyKernelSet().make_loss(SoftmaxCrossEntropySpec(smoothing))
    return loss.run(logits.astype(np.float64), labels, global_count, d_logits).result(), d_logits


def _device(
    kernels: CudaKernelSet, logits: np.ndarray, labels: np.ndarray, dtype: str, smoothing: float = 0.0, global_count: int = 7
) -> tuple[LossSums, np.ndarray]:
    arithmetic = kernels.arithmetic
    x, dx = (arithmetic.zeros(logits.size, dtype).reshape(logits.shape) for _ in range(2))
    arithmetic.from_host(x, logits)
    arithmetic.fill(dx, np.nan)
    sums = kernels.make_loss(SoftmaxCrossEntropySpec(smoothing)).run(x, labels, global_count, dx)
    return sums.result(), arithmetic.to_host(dx)


def _sample(count: int, classes: int, dtype: str, scale: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(classes)
    return _rounded(random.standard_normal((count, classes)) * scale, dtype), random.integers(0, classes, count)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [2, 10, 129, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_numpy_sets(cuda_kernels: CudaKernelsFactory, dtype: str, classes: int, smoothing: float) -> None:
    logits, labels = _sample(5, classes, dtype)
    expected, gradient = _host(logits, labels, smoothing, 7)
    bits = set()
    for seed in range(3):
        sums, d_logits = _device(cuda_kernels(seed=seed), logits, labels, dtype, smoothing)
        assert sums.loss == pytest.approx(expected.loss, rel=BARS["float64" if dtype == "float64" else "float32"])
        assert (sums.top1, sums.top5, sums.count) == (expected.top1, expected.top5, 5)
        np.testing.assert_allclose(d_logits, gradient, rtol=0, atol=BARS[dtype] * np.abs(gradient).max())
        bits.add((sums.loss, d_logits.tobytes()))
    assert len(bits) == 1


def test_more_than_twenty_thousand_classes(cuda_kernels: CudaKernelsFactory) -> None:
    logits, labels = _sample(2, 21843, "float32")
    expected, gradient = _host(logits, labels, 0.1, 2)
    sums, d_logits = _device(cuda_kernels(seed=5), logits, labels, "float32", 0.1, 2)
    assert sums.loss == pytest.approx(expected.loss, rel=1e-6)
    np.testing.assert_allclose(d_logits, gradient, rtol=0, atol=1e-6 * np.abs(gradient).max())


def test_many_rows(cuda_kernels: CudaKernelsFactory) -> None:
    logits, labels = _sample(600, 7, "float32")
    expected, gradient = _host(logits, labels, 0.0, 600)
    sums, d_logits = _device(cuda_kernels(seed=3), logits, labels, "float32", 0.0, 600)
    assert (sums.top1, sums.top5, sums.count) == (expected.top1, expected.top5, 600)
    assert sums.loss == pytest.approx(expected.loss, rel=1e-6)
    np.testing.assert_allclose(d_logits, gradient, rtol=0, atol=1e-6 * np.abs(gradient).max())


def test_a_gradient_keeps_its_digits_where_the_model_is_sure(cuda_kernels: CudaKernelsFactory) -> None:
    """1 - p of p near 1 loses all digits of float32; loss and gradient do not."""
    logits, labels = np.zeros((3, 10), np.float32), np.array([2, 0, 9])
    logits[np.arange(3), labels] = 18.0
    expected, gradient = _host(logits, labels, 0.0, 3)
    sums, d_logits = _device(cuda_kernels(), logits, labels, "float32", 0.0, 3)
    assert expected.loss < 1e-6
    assert sums.loss == pytest.approx(expected.loss, rel=1e-6)
    np.testing.assert_allclose(d_logits, gradient, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e4, 1e30, 3e38])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extreme_logits_stay_finite(cuda_kernels: CudaKernelsFactory, dtype: str, scale: float) -> None:
    logits, labels = _rounded(np.array([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]]) * scale, dtype), np.array([0, 2])
    for smoothing in (0.0, 0.1):
        expected, gradient = _host(logits, labels, smoothing, 2)
        sums, d_logits = _device(cuda_kernels(), logits, labels, dtype, smoothing, 2)
        assert sums.loss == pytest.approx(expected.loss, rel=1e-6)
        np.testing.assert_allclose(d_logits, gradient, atol=BARS[dtype] * np.abs(gradient).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_are_ranked_by_index(cuda_kernels: CudaKernelsFactory, dtype: str) -> None:
    """Few values, so that most logits are equal to others."""
    random = np.random.default_rng(0)
    logits, labels = random.integers(0, 3, (60, 9)).astype(np.float64), random.integers(0, 9, 60)
    logits[0] = 0.0
    labels[0] = 4
    expected, _ = _host(logits, labels, 0.0, 60)
    assert 0 < expected.top1 < expected.top5 < 60
    for seed in range(3):
        sums, _ = _device(cuda_kernels(seed=seed), logits, labels, dtype)
        assert (sums.top1, sums.top5) == (expected.top1, expected.top5)


@pytest.mark.parametrize("classes", [3, 9, 300])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_as_in_the_numpy_set(cuda_kernels: CudaKernelsFactory, wrong: float, classes: int) -> None:
    for place in (0, 2, classes - 1):
        logits, labels = np.zeros((2, classes), np.float32), np.array([0, 0])
        logits[1, place] = wrong
        with np.errstate(all="ignore"):
            expected, gradient = _host(logits, labels, 0.0, 2)
        sums, d_logits = _device(cuda_kernels(), logits, labels, "float32", 0.0, 2)
        assert (sums.top1, sums.top5, sums.count) == (expected.top1, expected.top5, 2)
        np.testing.assert_allclose([sums.loss], [expected.loss], rtol=1e-6)
        np.testing.assert_allclose(d_logits, gradient, rtol=1e-6)


def test_labels_out_of_range_are_refused_before_anything_runs(cuda_kernels: CudaKernelsFactory) -> None:
    logits, labels = _sample(4, 9, "float32")
    labels[2] = 9
    with pytest.raises(DataError, match=r"Label 9 is outside .* 0 to 8; the nearest legal label is 8"):
        _device(cuda_kernels(), logits, labels, "float32")


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_labels_of_any_integer_type(cuda_kernels: CudaKernelsFactory, dtype: type) -> None:
    logits, labels = _sample(4, 9, "float32")
    assert (
        _device(cuda_kernels(), logits, labels.astype(dtype), "float32")[0]
        == _device(cuda_kernels(), logits, labels, "float32")[0]
    )


def test_without_samples(cuda_kernels: CudaKernelsFactory) -> None:
    sums, d_logits = _device(cuda_kernels(), np.zeros((0, 9)), np.zeros(0, np.int64), "float32", global_count=0)
    assert sums == LossSums(0.0, 0, 0, 0)
    assert d_logits.shape == (0, 9)


@pytest.mark.parametrize("seed", range(4))
def test_two_batches_may_be_on_their_way(cuda_kernels: CudaKernelsFactory, seed: int) -> None:
    kernels = cuda_kernels(seed=seed)
    loss = kernels.make_loss(SoftmaxCrossEntropySpec())
    logits = kernels.arithmetic.zeros(20, "float32").reshape(4, 5)
    waiting, expected = [], []
    for step in range(4):
        values, labels = np.random.default_rng(step).standard_normal((4, 5)).astype(np.float32), np.full(4, step)
        count = 4 - step % 2
        kernels.arithmetic.from_host(logits, values)
        waiting.append(loss.run(logits[:count], labels[:count], 4, None))
        labels[...] = -1
        expected.append(_host(values[:count], np.full(count, step), 0.0, 4)[0])
        if len(waiting) == 2:
            for sums, reference in zip(waiting, expected, strict=True):
                arrived = sums.result()
                assert (arrived.top1, arrived.top5, arrived.count) == (reference.top1, reference.top5, reference.count)
                assert arrived.loss == pytest.approx(reference.loss, rel=1e-6)
            waiting, expected = [], []


def test_later_batches_allocate_nothing(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    loss = kernels.make_loss(SoftmaxCrossEntropySpec())
    logits = kernels.arithmetic.zeros(20, "float32").reshape(4, 5)
    loss.run(logits, np.zeros(4, np.int64), 4, None)
    used, kernels.runtime.device.pinned = kernels.runtime.device.memory_used(), None  # type: ignore[method-assign, assignment]
    for count in (3, 4):
        assert loss.run(logits[:count], np.zeros(count, np.int64), 4, None).result().top1 == count
    assert kernels.runtime.device.memory_used() == used
