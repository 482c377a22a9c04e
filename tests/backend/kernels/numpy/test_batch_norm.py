"""Batch norm: definition, gradient, statistics, merging over ranks, large means, ranks without samples."""

import threading

import numpy as np
import pytest

from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import BatchNormSpec
from hpctrain.testing.operator_gradients import assert_close, check_gradient
from hpctrain.testing.operators import Gradients, OperatorBench, default_parameters

KERNELS = NumpyKernelSet()
SHAPES = [(3, 7, 9, 5), (9, 5), (1, 3, 3, 5), (2, 1, 1, 1)]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def affine(dtype: str = "float64") -> dict[str, np.ndarray]:
    return default_parameters(BatchNormSpec(5), dtype)


def definition(x: np.ndarray, spec: BatchNormSpec, parameters: dict[str, np.ndarray], *rest: np.ndarray) -> np.ndarray:
    dims = tuple(range(x.ndim - 1))
    y = (x - x.mean(dims)) / np.sqrt(x.var(dims) + spec.epsilon) * parameters["weight"] + parameters["bias"]
    y = y + rest[0] if rest else y
    return np.maximum(y, 0) if spec.relu else y


@pytest.mark.parametrize("shape", [*SHAPES, (5, 41, 43, 3), (2, 3, 2, 9001)])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_equals_the_definition(shape: tuple[int, ...], relu: bool, add: bool) -> None:
    spec = BatchNormSpec(shape[-1], relu=relu, add=add)
    inputs = [normal(*shape, seed=i) for i in range(1 + add)]
    parameters = default_parameters(spec, "float64")
    bench = OperatorBench(KERNELS, spec, inputs, parameters=parameters)
    assert_close(bench.forward(), definition(inputs[0], spec, parameters, *inputs[1:]), 1e-10, "output")
    flat = inputs[0].reshape(-1, shape[-1])
    assert_close(bench.statistics["batch_mean"], flat.mean(0), 1e-12, "mean")
    assert_close(bench.statistics["batch_var"], flat.var(0, ddof=1), 1e-12, "unbiased variance")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradient(shape: tuple[int, ...], accumulate: bool, in_place: bool) -> None:
    check_gradient(KERNELS, BatchNormSpec(shape[-1]), [normal(*shape)], accumulate=accumulate, in_place=in_place, tolerance=1e-6)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradient_of_fused(add: bool, accumulate: bool, in_place: bool) -> None:
    spec = BatchNormSpec(5, relu=True, add=add)
    inputs = [normal(3, 7, 3, 5, seed=i) for i in range(1 + add)]
    check_gradient(KERNELS, spec, inputs, accumulate=accumulate, in_place=in_place, tolerance=1e-6, step=1e-6)


@pytest.mark.parametrize("training", [False, True])
def test_evaluation_uses_running_statistics(training: bool) -> None:
    """Whether the operator was made for evaluation, or is a training one asked to evaluate."""
    spec, x, parameters = BatchNormSpec(5), normal(3, 7, 9, 5), affine()
    mean, variance = normal(5, seed=1), normal(5, seed=2) ** 2
    statistics = {"running_mean": mean.copy(), "running_var": variance.copy()}
    bench = OperatorBench(KERNELS, spec, [x], parameters=parameters, statistics=statistics, training=training)
    expected = (x - mean) / np.sqrt(variance + spec.epsilon) * parameters["weight"] + parameters["bias"]
    assert_close(bench.forward(StepContext(training=False)), expected, 1e-12, "output")
    np.testing.assert_array_equal(statistics["running_mean"], mean)


def test_training_leaves_running_statistics_alone() -> None:
    statistics = {"running_mean": np.full(5, 7.0), "running_var": np.full(5, 9.0)}
    parameters = affine()
    OperatorBench(KERNELS, BatchNormSpec(5), [normal(3, 7, 9, 5)], parameters=parameters, statistics=statistics).forward()
    assert (statistics["running_mean"] == 7).all()
    assert (statistics["running_var"] == 9).all()


def test_one_sample_has_a_biased_variance() -> None:
    bench = OperatorBench(KERNELS, BatchNormSpec(5), [normal(1, 5)], parameters=affine())
    bench.forward()
    assert not bench.statistics["batch_var"].any()


@pytest.mark.parametrize("shape", [(0, 7, 9, 5), (3, 0, 9, 5), (3, 7, 0, 5), (0, 5)])
def test_without_pixels_everything_is_zero(shape: tuple[int, ...]) -> None:
    bench = OperatorBench(KERNELS, BatchNormSpec(5), [np.zeros(shape)], parameters=affine())
    assert bench.forward().shape == shape
    grads = bench.backward(np.zeros(shape))
    assert grads.inputs[0].shape == shape
    assert not any(grad.any() for grad in grads.parameters.values())
    assert not bench.statistics["batch_mean"].any()
    assert not bench.statistics["batch_var"].any()


def test_a_large_mean_costs_no_digits() -> None:
    """float32 with a mean of a thousand deviations, and images that differ in theirs: the variance keeps four digits."""
    x = (normal(16, 63, 65, 3) + 1000.0 + 3.0 * np.arange(16)[:, None, None, None]).astype(np.float32)
    bench = OperatorBench(KERNELS, BatchNormSpec(3), [x], parameters=default_parameters(BatchNormSpec(3), "float32"))
    bench.forward()
    flat = x.astype(np.float64).reshape(-1, 3)
    np.testing.assert_allclose(bench.statistics["batch_mean"], flat.mean(0), rtol=1e-6)
    np.testing.assert_allclose(bench.statistics["batch_var"], flat.var(0, ddof=1), rtol=1e-5)


def test_a_first_image_unlike_the_others_costs_no_digits() -> None:
    x = normal(64, 40, 40, 8).astype(np.float32)
    x[0] = -1000.0
    bench = OperatorBench(KERNELS, BatchNormSpec(8), [x], parameters=default_parameters(BatchNormSpec(8), "float32"))
    bench.forward()
    flat = x.astype(np.float64).reshape(-1, 8)
    np.testing.assert_allclose(bench.statistics["batch_mean"], flat.mean(0), rtol=1e-5)
    np.testing.assert_allclose(bench.statistics["batch_var"], flat.var(0, ddof=1), rtol=1e-5)


def test_float32_is_near_float64() -> None:
    x, dy = normal(4, 9, 7, 5), normal(4, 9, 7, 5, seed=3)
    results = {}
    for dtype in ("float32", "float64"):
        bench = OperatorBench(KERNELS, BatchNormSpec(5), [x.astype(dtype)], parameters=affine(dtype))
        y = bench.forward()
        grads = bench.backward(dy.astype(dtype))
        results[dtype] = [y, grads.inputs[0], *grads.parameters.values()]
        assert all(array.dtype == dtype for array in results[dtype])
    for single, double in zip(results["float32"], results["float64"], strict=True):
        assert_close(single, double, 1e-5, "float32")


class RankMerger:
    """Merges among threads that act as ranks, by the formulas of the protocol's docstring."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.parts: list = [None] * ranks

    def of(self, rank: int) -> "RankView":
        return RankView(self, rank)

    def exchange(self, rank: int, part: object) -> list:
        self.parts[rank] = part
        self.barrier.wait(timeout=20)
        parts = list(self.parts)
        self.barrier.wait(timeout=20)
        return parts


class RankView:
    def __init__(self, shared: RankMerger, rank: int) -> None:
        self.shared, self.rank, self.calls = shared, rank, []

    def merge(self, count: int, mean: np.ndarray, m2: np.ndarray) -> int:
        self.calls.append("merge")
        parts = self.shared.exchange(self.rank, (count, mean.copy(), m2.copy()))
        total = sum(part[0] for part in parts)
        mean[:] = sum(part[0] * part[1] for part in parts) / max(total, 1)
        m2[:] = sum(part[2] + part[0] * (part[1] - mean) ** 2 for part in parts)
        return total

    def sum(self, values: np.ndarray) -> None:
        self.calls.append("sum")
        values[:] = sum(self.shared.exchange(self.rank, values.copy()))


def run_ranks(spec: BatchNormSpec, parts: list[np.ndarray], grads: list[np.ndarray]) -> list[tuple]:
    shared, results = RankMerger(len(parts)), [None] * len(parts)

    def rank(i: int) -> None:
        merger = shared.of(i)
        bench = OperatorBench(KERNELS, spec, [parts[i]], parameters=default_parameters(spec, "float64"), merger=merger)
        y = bench.forward()
        results[i] = (y, bench.backward(grads[i]), bench.statistics, merger.calls)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(result is not None for result in results)
    return results


@pytest.mark.parametrize("counts", [(3, 4), (5, 0, 2), (0, 7, 0), (1, 1, 1, 4, 0)])
def test_synchronised_ranks_equal_one(counts: tuple[int, ...]) -> None:
    """Outputs, input gradients and statistics are those of all samples; parameter gradients are this rank's sums only."""
    x, dy = normal(sum(counts), 7, 3, 5), normal(sum(counts), 7, 3, 5, seed=1)
    whole = OperatorBench(KERNELS, BatchNormSpec(5), [x], parameters=affine())
    y = whole.forward()
    expected: Gradients = whole.backward(dy)
    ends = np.cumsum(counts)[:-1]
    results = run_ranks(BatchNormSpec(5, synchronised=True), np.split(x, ends), np.split(dy, ends))
    assert_close(np.concatenate([result[0] for result in results]), y, 1e-12, "outputs")
    assert_close(np.concatenate([result[1].inputs[0] for result in results]), expected.inputs[0], 1e-12, "input gradients")
    for role in ("weight", "bias"):
        assert_close(sum(result[1].parameters[role] for result in results), expected.parameters[role], 1e-12, role)
    for result in results:
        assert result[3] == ["merge", "sum"], "every rank calls the merger once in each direction"
        for role in ("batch_mean", "batch_var"):
            assert_close(result[2][role], whole.statistics[role], 1e-12, role)


def test_synchronised_gradient() -> None:
    """Alone, the synchronised operator is the local one: the identity merger changes nothing."""
    check_gradient(KERNELS, BatchNormSpec(5, synchronised=True), [normal(3, 7, 3, 5)], tolerance=1e-6)
