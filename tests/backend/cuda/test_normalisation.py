"""Batch norm of the cuda set against the NumPy set: fused, in place, accumulated, over several ranks, in any order of threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.cuda.batch_norm import ChannelBlocks
from hpctrain.backend.cuda.device import bfloat16_bits, bfloat16_values
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import KernelSet, StepContext
from hpctrain.backend.specs import BatchNormSpec
from hpctrain.optim.optimizers import Sgd
from hpctrain.testing.operators import Gradients, OperatorBench, default_parameters
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.emulated import CudaKernelsFactory
from tests.support.kernel_pairs import run
from tests.support.rounded import DTYPES, assert_same_bits
from tests.support.training import Result, Task, assert_same_training, batches, replica_of, train

REFERENCE = NumpyKernelSet()

#: relative to the largest element, before the one rounding to bfloat16
BAR = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1e-5}

FUSED = {"alone": {}, "relu": {"relu": True}, "add": {"add": True}, "add and relu": {"relu": True, "add": True}}

#: with packs and without, several blocks of channels, several stretches of rows, one row
SHAPES = [(3, 7, 9, 5), (33, 16), (1, 3, 3, 264), (1, 8), (5, 13, 11, 24), (4, 1, 35)]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """float64 values that bfloat16 holds, so that all dtypes have the same inputs."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return bfloat16_values(bfloat16_bits(values)).astype(np.float64)


def make_bench(
    kernels: CudaKernelSet | NumpyKernelSet, spec: BatchNormSpec, inputs: list[np.ndarray], dtype: str, **options: object
) -> OperatorBench:
    """A bench with random parameters and running statistics, the same for all dtypes."""
    host = "float64" if dtype == "float64" else "float32"
    channels = spec.channels
    parameters = {role: value.astype(np.float32).astype(host) for role, value in default_parameters(spec, "float64").items()}
    running = {"running_mean": normal(channels, seed=8), "running_var": normal(channels, seed=9) ** 2 + 0.5}
    statistics = {role: value.astype(host) for role, value in running.items()}
    xs = [x.astype(host) for x in inputs]
    return OperatorBench(kernels, spec, xs, parameters=parameters, statistics=statistics, dtype=dtype, **options)


def assert_near(actual: np.ndarray, expected: np.ndarray, dtype: str, name: str, *, rounded: bool) -> None:
    """Within the bar of the largest element, and, where it is rounded to bfloat16, half a unit in its last place more."""
    assert actual.shape == expected.shape, name
    bound = BAR[dtype] * max(1.0, float(np.abs(expected).max(initial=0.0)))
    rounding = np.abs(expected) * 2.0**-8 if rounded and dtype == "bfloat16" else 0.0
    assert (np.abs(actual - expected) <= bound + rounding).all(), f"{name}: {np.abs(actual - expected).max()} above {bound}"


def results(
    bench: OperatorBench, dy: np.ndarray, start: list[np.ndarray] | None
) -> tuple[np.ndarray, Gradients, dict[str, np.ndarray]]:
    y = bench.forward()
    return y, bench.backward(dy, start), bench.statistics


def assert_same(
    results_here: tuple[np.ndarray, Gradients, dict[str, np.ndarray]],
    expected: tuple[np.ndarray, Gradients, dict[str, np.ndarray]],
    dtype: str,
) -> None:
    """The output, all gradients and the batch's statistics, near those of the reference."""
    (output, gradients, statistics), (y, aims, aimed_statistics) = results_here, expected
    assert_near(output, y, dtype, "output", rounded=True)
    for grad, want in zip(gradients.inputs, aims.inputs, strict=True):
        assert_near(grad, want, dtype, "gradient of an input", rounded=True)
    for role, want in (aims.parameters | aimed_statistics).items():
        assert_near((gradients.parameters | statistics)[role], want, dtype, role, rounded=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED.keys())
@pytest.mark.parametrize("shape", SHAPES)
def test_training_equals_numpy(
    cuda_kernels: CudaKernelsFactory, shape: tuple[int, ...], fused: dict[str, bool], dtype: str
) -> None:
    spec = BatchNormSpec(shape[-1], **fused)
    inputs = [normal(*shape, seed=i) + 3 * (i == 0) for i in range(1 + spec.add)]
    inputs[0] = bfloat16_values(bfloat16_bits(inputs[0])).astype(np.float64)
    dy, start = normal(*shape, seed=4), [normal(*shape, seed=5 + i) for i in range(2)]
    kernels = cuda_kernels(dtype, seed=2)
    for options in ({}, {"in_place": True}, {"accumulate": True}):
        first = start if "accumulate" in options else None
        expected = results(make_bench(REFERENCE, spec, inputs, "float64", **options), dy, first)
        assert_same(results(make_bench(kernels, spec, inputs, dtype, **options), dy, first), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED.keys())
@pytest.mark.parametrize("training", [False, True])
def test_evaluation_uses_running_statistics(
    cuda_kernels: CudaKernelsFactory, fused: dict[str, bool], dtype: str, training: bool
) -> None:
    """Whether the operator was made for evaluation, or is a training one asked to evaluate."""
    kernels = cuda_kernels(dtype)
    for shape in SHAPES[:2]:
        spec = BatchNormSpec(shape[-1], **fused)
        inputs, options = [normal(*shape, seed=i) for i in range(1 + spec.add)], {"training": training, "in_place": not training}
        expected = make_bench(REFERENCE, spec, inputs, "float64", **options).forward(StepContext(training=False))
        bench = make_bench(kernels, spec, inputs, dtype, **options)
        assert_near(bench.forward(StepContext(training=False)), expected, dtype, "output", rounded=True)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_computes_only_the_gradients_asked_for(cuda_kernels: CudaKernelsFactory, wanted: tuple[bool, bool]) -> None:
    spec, inputs = BatchNormSpec(8, relu=True, add=True), [normal(3, 5, 8, seed=i) for i in range(2)]
    dy = normal(3, 5, 8, seed=4)
    _, expected, _ = results(make_bench(REFERENCE, spec, inputs, "float64"), dy, None)
    _, gradients, _ = results(make_bench(cuda_kernels(), spec, inputs, "float64", wanted=wanted), dy, None)
    for grad, want, asked in zip(gradients.inputs, expected.inputs, wanted, strict=True):
        assert (grad is not None) == asked
        if asked:
            assert_near(grad, want, "float64", "gradient", rounded=False)


@pytest.mark.parametrize("adds", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_either_gradient_is_added_to(cuda_kernels: CudaKernelsFactory, adds: tuple[bool, bool], dtype: str) -> None:
    """And that of x, where it is not, lies in the memory of the output's."""
    spec, shape = BatchNormSpec(16, relu=True, add=True), (3, 5, 7, 16)
    inputs, before = ([normal(*shape, seed=seed + i) for i in range(2)] for seed in (0, 5))
    statistics = {"batch_mean": np.zeros(16), "batch_var": np.zeros(16)}
    parameters = {"weight": normal(16, seed=7), "bias": normal(16, seed=8)}
    common = {"parameters": parameters, "statistics": statistics, "output_grad": normal(*shape, seed=4)}
    held = [value if add else None for value, add in zip(before, adds, strict=True)]
    expected = run(REFERENCE, spec, inputs, dtype="float64", accumulate=held, **common)
    result = run(cuda_kernels(dtype), spec, inputs, dtype=dtype, accumulate=held, in_place=not adds[0], **common)
    for name, value in expected.arrays().items():
        assert_near(result.arrays()[name], value, dtype, name, rounded=name == "output" or name.startswith("d input"))


@pytest.mark.parametrize("shape", [(0, 7, 9, 5), (3, 0, 9, 8), (0, 5)])
def test_without_pixels_everything_is_zero(cuda_kernels: CudaKernelsFactory, shape: tuple[int, ...]) -> None:
    bench = make_bench(cuda_kernels("float32"), BatchNormSpec(shape[-1], relu=True), [np.zeros(shape)], "float32")
    y, gradients, statistics = results(bench, np.zeros(shape), None)
    assert y.shape == gradients.inputs[0].shape == shape
    assert not any(value.any() for value in (*gradients.parameters.values(), statistics["batch_mean"], statistics["batch_var"]))


@pytest.mark.parametrize("mean", [1000.0, -1000.0])
def test_a_large_mean_costs_no_digits(cuda_kernels: CudaKernelsFactory, mean: float) -> None:
    """Deviations are taken from a row, stretch by stretch; the first image may be unlike the others."""
    x = normal(16, 13, 17, 3) + mean + 3.0 * np.arange(16)[:, None, None, None]
    x[0] = -mean
    x = x.astype(np.float32).astype(np.float64)
    spec = BatchNormSpec(3)
    bench = make_bench(cuda_kernels("float32"), spec, [x], "float32")
    bench.forward()
    np.testing.assert_allclose(bench.statistics["batch_mean"], x.reshape(-1, 3).mean(0), rtol=1e-6)
    np.testing.assert_allclose(bench.statistics["batch_var"], x.reshape(-1, 3).var(0, ddof=1), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [3, 16])
def test_any_order_of_blocks_and_threads_has_the_same_bits(cuda_kernels: CudaKernelsFactory, channels: int, dtype: str) -> None:
    shape = (4, 9, 13, channels)
    inputs, dy = [normal(*shape, seed=i) for i in range(2)], normal(*shape, seed=4)

    def values_of(seed: int) -> list[np.ndarray]:
        kernels, values = cuda_kernels(dtype, seed), []
        for fused in FUSED.values():
            spec = BatchNormSpec(channels, **fused)
            y, gradients, statistics = results(make_bench(kernels, spec, inputs[: 1 + spec.add], dtype), dy, None)
            values += [y, *gradients.inputs, *gradients.parameters.values(), *statistics.values()]
        return values

    assert_same_bits([values_of(seed) for seed in range(4)])


def test_normalised_values_are_accurate_with_a_large_mean(cuda_kernels: CudaKernelsFactory) -> None:
    """With a mean of ten thousand deviations, whose own rounding would be felt in the fourth digit."""
    x, dy, spec = (normal(257, 24) + 1e4).astype(np.float32).astype(np.float64), normal(257, 24, seed=1) + 1, BatchNormSpec(24)
    y, expected, _ = results(make_bench(REFERENCE, spec, [x], "float64"), dy, None)
    output, gradients, _ = results(make_bench(cuda_kernels("float32"), spec, [x], "float32"), dy, None)
    assert_near(output, y, "float32", "output", rounded=False)
    assert_near(gradients.inputs[0], expected.inputs[0], "float32", "gradient", rounded=False)
    for role, want in expected.parameters.items():
        assert_near(gradients.parameters[role], want, "float32", role, rounded=False)


def affine(bench: OperatorBench, *, beta: np.ndarray) -> OperatorBench:
    """The bench with weights of one."""
    bench.parameters["weight"][...] = 1
    bench.parameters["bias"][...] = beta
    return bench


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_gradient_passes_at_zero(cuda_kernels: CudaKernelsFactory, dtype: str) -> None:
    """The mean is exactly zero, and so is every third output."""
    spec, x = BatchNormSpec(8, relu=True), np.tile(np.array([-1.0, 0.0, 1.0])[:, None], (5, 8))
    bench = affine(make_bench(cuda_kernels(dtype), spec, [x], dtype), beta=np.zeros(8))
    np.testing.assert_array_equal(bench.forward() > 0, x > 0)
    np.testing.assert_array_equal(bench.backward(np.ones_like(x)).parameters["bias"], np.full(8, 5.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_knows_what_the_relu_stopped_to_the_bit(cuda_kernels: CudaKernelsFactory, dtype: str) -> None:
    """A row of outputs that are nothing but rounding errors: the gradient passes where they happen to be positive."""
    kernels, x, channels = cuda_kernels(dtype), normal(9, 512), 512
    centred = affine(make_bench(kernels, BatchNormSpec(channels), [x], dtype), beta=np.zeros(channels)).forward()
    bench = affine(make_bench(kernels, BatchNormSpec(channels, relu=True), [x], dtype), beta=-centred[0])
    passed = bench.forward()[0] > 0
    assert 0.2 < passed.mean() < 0.8
    dy = np.zeros_like(x)
    dy[0] = 1
    np.testing.assert_array_equal(bench.backward(dy).parameters["bias"], passed)


def test_not_a_number_stays_so(cuda_kernels: CudaKernelsFactory) -> None:
    x = normal(9, 8)
    x[3, 2] = np.nan
    y = make_bench(cuda_kernels("float32"), BatchNormSpec(8, relu=True), [x], "float32").forward()
    assert np.isnan(y[:, 2]).all()
    assert np.isfinite(np.delete(y, 2, axis=1)).all()


class _Merger:
    """As if another rank had three times as many rows, of another mean and spread; its sums are twice this rank's."""

    alone = False

    def merge(self, count: int, mean: np.ndarray, m2: np.ndarray) -> int:
        shift = 0.25
        mean += 0.75 * shift
        m2 *= 5.0
        m2 += count * 0.75 * shift**2
        return 4 * count

    def sum(self, values: np.ndarray) -> None:
        values *= 3.0


@pytest.mark.slow
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_of_several_ranks_are_merged(
    cuda_kernels: CudaKernelsFactory, dtype: str, shape: tuple[int, ...], fused: str
) -> None:
    spec = BatchNormSpec(shape[-1], synchronised=True, **FUSED[fused])
    inputs = [normal(*shape, seed=seed) for seed in range(1 + spec.add)]
    dy = normal(*shape, seed=5)
    expected = results(make_bench(REFERENCE, spec, inputs, "float64", merger=_Merger()), dy, None)
    bench = make_bench(cuda_kernels(dtype, seed=3), spec, inputs, dtype, merger=_Merger())
    assert_same(results(bench, dy, None), expected, dtype)


TASK = Task(nets.residual, NumpyKernelSet(), Sgd, steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])  # the last batch has 5 samples: shares are uneven, with one on the last rank
def test_the_numbers_are_those_of_numpy(ranks: int, cuda_kernels: CudaKernelsFactory) -> None:
    def trained(comm: ThreadCommunicator, kernels: KernelSet) -> Result:
        return train(replace(TASK, kernels=kernels), comm, virtual_engine(comm), Sharded)

    expected = run_virtual(1, lambda comm: trained(comm, NumpyKernelSet()))[0]
    for result in run_virtual(ranks, lambda comm: trained(comm, cuda_kernels(seed=comm.rank)), seed=ranks):
        assert_same_training(result, expected)


@pytest.mark.slow
def test_a_batch_norm_has_one_round_trip_in_each_direction(cuda_kernels: CudaKernelsFactory) -> None:
    def program(comm: ThreadCommunicator) -> None:
        kernels = cuda_kernels(seed=comm.rank)
        assert isinstance(kernels, CudaKernelSet)
        replica = replica_of(replace(TASK, kernels=kernels), comm, virtual_engine(comm), Sharded)
        counts = []
        for batch in batches(TASK, comm.rank, comm.size):
            counter = kernels.runtime.device.counters.synchronisations
            counter.clear()
            replica.step(batch, TASK.lr)
            counts.append(sum(times for (_, function), times in counter.items() if function.endswith("Staging._take")))
        assert set(counts) == {2 * sum(name.endswith("running_mean") for name in replica.network.statistics.views)}

    run_virtual(2, program)


@pytest.mark.parametrize("rows", [0, 1, 7, 49, 12544, 802816])
@pytest.mark.parametrize("channels", [1, 3, 8, 64, 72, 264, 1001, 2048])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_cover_all_rows_and_channels_once(rows: int, channels: int, dtype: str) -> None:
    blocks = ChannelBlocks.of(rows, channels, dtype, 132)
    wide, high = blocks.block
    assert 0 < wide * high <= 256
    for (tiles, parts), waves in ((blocks.sums, 3), (blocks.passes, 32)):
        assert (tiles - 1) * wide * blocks.width < channels <= tiles * wide * blocks.width
        assert (parts > 0) == (rows > 0)
        assert (parts - 1) * high < max(1, rows), "every block has a row"
        assert parts * tiles <= max(waves * 132, tiles)
