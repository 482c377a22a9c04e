"""Dropout on a device draws the very masks of the NumPy set, in all dtypes and for every split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.backend.counter_random import key, words
from hpctrain.backend.cuda.half import bfloat16_bits, bfloat16_values
from hpctrain.backend.dtypes import parameter_dtype
from hpctrain.backend.kernels.abilities import InputView
from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.cuda.dropout import SamplePlace
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import DropoutSpec, TensorSpec
from hpctrain.errors import BackendError
from hpctrain.testing.operators import OperatorBench
from tests.support.emulated import CudaKernelsFactory

DTYPES = ("float64", "float32", "bfloat16")
IDS = np.array([3, 1 << 33, 7, (1 << 62) + 5, 0, -1])

#: (spec, shape of the activation)
CASES: dict[str, tuple[DropoutSpec, tuple[int, ...]]] = {
    "features": (DropoutSpec(0.5, "classifier.2", seed=4), (3, 40)),
    "an image": (DropoutSpec(0.3, "a"), (2, 4, 3, 16)),
    "no whole packs": (DropoutSpec(0.3, "a", seed=1 << 40), (3, 3, 5, 3)),
    "rows of an image": (DropoutSpec(0.3, "a", unsplit_shape=(9, 3, 16), origin=(4, 0, 0)), (2, 4, 3, 16)),
    "channels": (DropoutSpec(0.3, "a", unsplit_shape=(4, 3, 32), origin=(0, 0, 8)), (2, 4, 3, 16)),
    "channels that are no packs": (DropoutSpec(0.3, "a", unsplit_shape=(4, 3, 9), origin=(0, 0, 3)), (2, 4, 3, 2)),
    "a corner": (DropoutSpec(0.3, "a", unsplit_shape=(9, 8, 7), origin=(1, 2, 3)), (2, 4, 3, 4)),
    "some features": (DropoutSpec(0.3, "a", unsplit_shape=(64,), origin=(24,)), (3, 8)),
    "samples from the third on": (DropoutSpec(0.9, "a", first_sample=2), (4, 24)),
    "four dims": (DropoutSpec(0.1, "a"), (2, 3, 2, 2, 4)),
    "more than all threads at once": (DropoutSpec(0.3, "a"), (3, 9000)),
    "more than all threads at once, no packs": (DropoutSpec(0.3, "a"), (3, 41, 37, 1)),
    "whole samples": (DropoutSpec(0.4, "a", per_sample=True), (6, 4, 3, 16)),
    "whole samples, no packs": (DropoutSpec(0.4, "a", seed=9, per_sample=True), (6, 3, 5, 3)),
    "whole samples from the third on": (DropoutSpec(0.6, "a", first_sample=2, per_sample=True), (4, 24)),
    "whole samples, more than all threads at once": (DropoutSpec(0.5, "a", per_sample=True), (3, 41, 37, 1)),
    "no samples": (DropoutSpec(0.5, "a"), (0, 7)),
    "no rows": (DropoutSpec(0.5, "a", unsplit_shape=(9, 3, 16), origin=(4, 0, 0)), (2, 0, 3, 16)),
}


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return bfloat16_values(bfloat16_bits(values)) if dtype == "bfloat16" else values.astype(dtype)


def _bench(kernels: CudaKernelSet, spec: DropoutSpec, x: np.ndarray, dtype: str, **options: bool) -> OperatorBench:
    bench = OperatorBench(kernels, spec, [x], dtype=dtype, **options)
    assert bench.operator.saved_bytes == bench.operator.scratch_bytes == 0
    return bench


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_the_numpy_sets(cuda_kernels: CudaKernelsFactory, case: str, dtype: str) -> None:
    spec, shape = CASES[case]
    random = np.random.default_rng(0)
    x, dy, start = (_rounded(random.standard_normal(shape), dtype) for _ in range(3))
    host = OperatorBench(NumpyKernelSet(), spec, [x])
    assert host.inputs[0].dtype == parameter_dtype(dtype)
    for seed in range(3):
        kernels = cuda_kernels(seed=seed)
        plain, in_place, added = (
            _bench(kernels, spec, x, dtype, **options) for options in ({}, {"in_place": True}, {"accumulate": True})
        )
        context = StepContext(step=5 + seed, sample_ids=IDS)
        y = _rounded(host.forward(context), dtype)
        dx = host.backward(dy).inputs[0]
        assert dx is not None
        for bench in (plain, in_place):
            np.testing.assert_array_equal(bench.forward(context), y)
            np.testing.assert_array_equal(bench.backward(dy).inputs[0], _rounded(dx, dtype))
        added.forward(context)
        np.testing.assert_array_equal(added.backward(dy, [start]).inputs[0], _rounded(start + dx, dtype))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_part_draws_its_part_of_the_mask(cuda_kernels: CudaKernelsFactory, data: st.DataObject) -> None:
    unsplit = data.draw(st.tuples(*[st.sampled_from([1, 3, 4, 8, 9])] * data.draw(st.integers(1, 3))))
    corners = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in unsplit]
    context = StepContext(step=3, sample_ids=IDS)
    dtype = data.draw(st.sampled_from(DTYPES))
    whole = _bench(cuda_kernels(seed=2), DropoutSpec(0.5, "a"), np.ones((3, *unsplit)), dtype).forward(context)
    shape = (3, *(stop - start for start, stop in corners))
    spec = DropoutSpec(0.5, "a", unsplit_shape=unsplit, origin=tuple(start for start, _ in corners))
    y = _bench(cuda_kernels(seed=3), spec, np.ones(shape), dtype).forward(context)
    np.testing.assert_array_equal(y, whole[:, *(slice(*corner) for corner in corners)])


def test_the_rate_and_the_scale(cuda_kernels: CudaKernelsFactory) -> None:
    bench = _bench(cuda_kernels(), DropoutSpec(0.4, "a"), np.ones((6, 4000)), "float32")
    y = bench.forward(StepContext(step=1, sample_ids=IDS))
    np.testing.assert_array_equal(np.unique(y), np.array([0, 1 / 0.6], np.float32))
    assert abs((y == 0).mean() - 0.4) < 5 * np.sqrt(0.4 * 0.6 / y.size)


def test_evaluation_is_the_identity_with_the_same_arguments(cuda_kernels: CudaKernelsFactory) -> None:
    random = np.random.default_rng(0)
    x, dy = random.standard_normal((2, 3, 9))
    bench = _bench(cuda_kernels(), DropoutSpec(0.5, "a"), x, "float64")
    np.testing.assert_array_equal(bench.forward(StepContext(training=False)), x)
    np.testing.assert_array_equal(bench.backward(dy).inputs[0], dy)


def test_what_is_not_finite_is_seen(cuda_kernels: CudaKernelsFactory) -> None:
    """As in the NumPy set a dropped NaN or infinity is NaN, not 0: nothing is hidden."""
    x = np.full((2, 64), np.inf, np.float32)
    x[1] = np.nan
    y = _bench(cuda_kernels(), DropoutSpec(0.5, "a"), x, "float32").forward(StepContext(sample_ids=IDS))
    assert not np.isfinite(y).any()
    assert np.isinf(y[0]).any()


def test_a_step_without_the_ids_of_all_samples_is_refused(cuda_kernels: CudaKernelsFactory) -> None:
    bench = _bench(cuda_kernels(), DropoutSpec(0.5, "a", first_sample=4), np.zeros((3, 9)), "float32")
    with pytest.raises(AssertionError, match="ids of 7 samples, not 6"):
        bench.forward(StepContext(sample_ids=IDS))


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_where_nothing_is_dropped_no_data_moves(cuda_kernels: CudaKernelsFactory, rate: float) -> None:
    operator = cuda_kernels().make(DropoutSpec(rate, "a"), (TensorSpec((3, 5)),), training=rate == 0)
    assert isinstance(operator, InputView)


def test_aligned_runs_are_found() -> None:
    place = SamplePlace.of(DropoutSpec(0.5, "a", unsplit_shape=(9, 3, 16), origin=(4, 0, 8)), TensorSpec((2, 4, 3, 8)))
    assert (place.first, place.step0, place.step1, place.run) == (200, 48, 16, 8)
    with pytest.raises(BackendError, match="up to 3 dims beside the batch, not 4"):
        SamplePlace.of(DropoutSpec(0.5, "a", unsplit_shape=(2, 2, 2, 2), origin=(0,) * 4), TensorSpec((2, 1, 2, 2, 2)))


def test_a_word_that_equals_the_threshold_is_kept(cuda_kernels: CudaKernelsFactory) -> None:
    context = StepContext(step=2, sample_ids=IDS)
    drawn = words(key("dropout", 0, 2, "a"), IDS[:3], range(16))
    for place in ((0, 0), (1, 7), (2, 15)):
        spec = DropoutSpec(int(drawn[place]) / 2**32, "a")
        y = _bench(cuda_kernels(), spec, np.ones((3, 16)), "float64").forward(context)
        np.testing.assert_array_equal(y != 0, drawn >= drawn[place])
