"""Updates and dropout of the cuda set with the bits of the host, and numbers of a step."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.backend.arithmetic import Corrections, MomentRule, UpdateRun
from hpctrain.backend.counter_random import key, words
from hpctrain.backend.cuda.arithmetic import DESCENT_TILE
from hpctrain.backend.cuda.device import ALIGNMENT_BYTES, DeviceArray, bfloat16_bits, bfloat16_values
from hpctrain.backend.cuda.elementwise import SamplePlace
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.cuda.operator import carve, check_images, row_launch, total_bytes
from hpctrain.backend.cuda.runtime import KEYS, LEAST_IDS, StepBlock, StepPlaces
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import InputView, StepContext
from hpctrain.backend.specs import DropoutSpec, TensorSpec, parameter_dtype
from hpctrain.core.errors import BackendError
from hpctrain.testing.operators import OperatorBench
from tests.support.emulated import CudaKernelsFactory
from tests.support.rounded import DTYPES, rounded

HOST = HostArithmetic()

SIZE = 2 * DESCENT_TILE + 77

#: (factor, nesterov)
RULES = [(0.0, False), (0.9, False), (0.9, True)]


def _runs(step: int) -> list[UpdateRun]:
    """Runs with gaps; places that are no whole packs; an offset that is none; an empty run."""
    scale = 1 / (step + 1)
    return [
        UpdateRun(0, 3, 1.0, 0.0),
        UpdateRun(3, 8, scale, 1e-4),
        UpdateRun(10, 10, scale, 1e-4),
        UpdateRun(16, DESCENT_TILE + 16, scale, 1e-4, -8),
        UpdateRun(DESCENT_TILE + 20, SIZE - 5, 0.5 * scale, 0.0, -11),
    ]


def _train(
    kernels: CudaKernelSet, dtype: str, factor: float, nesterov: bool, *, start: int = 0, shadowed: bool = False
) -> tuple[np.ndarray, ...]:
    """Three steps on a device and on the host, which must agree. start: of the buffers in their memory."""
    random = np.random.default_rng(5)
    arithmetic = kernels.arithmetic
    host = [random.standard_normal(SIZE).astype(dtype) for _ in range(2)] + [np.zeros(SIZE if factor else 0, dtype)]
    device = [arithmetic.zeros(x.size + start, dtype)[start:] for x in host]
    for array, values in zip(device, host, strict=True):
        arithmetic.from_host(array, values)
    shadow = arithmetic.zeros(SIZE + start, "bfloat16")[start:] if shadowed else None
    descent = arithmetic.descent(*device, factor=factor, nesterov=nesterov, shadow=shadow)
    for step in range(3):
        gradient = random.standard_normal(SIZE).astype(dtype)
        arithmetic.from_host(device[1], gradient)
        descent.update(iter(_runs(step)), 0.1 / (step + 1))
        HOST.descent(host[0], gradient, host[2], factor=factor, nesterov=nesterov).update(_runs(step), 0.1 / (step + 1))
    for array, values in zip((device[0], device[2]), (host[0], host[2]), strict=True):
        np.testing.assert_array_equal(arithmetic.to_host(array), values)
    return host[0], arithmetic.to_host(device[0] if shadow is None else shadow)


@pytest.mark.parametrize(("factor", "nesterov"), RULES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(3))
def test_the_bits_are_the_hosts(cuda_kernels: CudaKernelsFactory, dtype: str, factor: float, nesterov: bool, seed: int) -> None:
    _train(cuda_kernels(seed=seed), dtype, factor, nesterov)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_cut_into_runs_has_the_hosts_bits(cuda_kernels: CudaKernelsFactory, data: st.DataObject) -> None:
    """Places in the state are packed in the order of the runs, as those of an owner's are."""
    cuts = sorted(data.draw(st.sets(st.integers(0, SIZE), min_size=2, max_size=12)))
    numbers = st.floats(0, 4, width=32)
    runs, size = [], 0
    for start, stop in pairwise(cuts):
        if data.draw(st.booleans()):
            runs.append(UpdateRun(start, stop, data.draw(numbers), data.draw(numbers), size - start))
            size += stop - start
    random = np.random.default_rng(len(runs))
    host = [random.standard_normal(n).astype(np.float32) for n in (SIZE, SIZE, size)]
    arithmetic = cuda_kernels(seed=data.draw(st.integers(0, 9))).arithmetic
    device = [arithmetic.zeros(x.size, "float32") for x in host]
    for array, values in zip(device, host, strict=True):
        arithmetic.from_host(array, values)
    for service, arrays in ((arithmetic, device), (HOST, host)):
        service.descent(*arrays, factor=0.9, nesterov=False).update(runs, 0.1)
    for array, values in zip(device, host, strict=True):
        np.testing.assert_array_equal(arithmetic.to_host(array), values)


@pytest.mark.parametrize("shadowed", [True, False])  # a shadow has smaller elements, which are aligned elsewhere
@pytest.mark.parametrize("start", [1, 2, 4])
def test_buffers_may_begin_at_any_element(cuda_kernels: CudaKernelsFactory, start: int, shadowed: bool) -> None:
    _train(cuda_kernels(), "float32", 0.9, True, start=start, shadowed=shadowed)


def test_the_shadow_is_written_where_data_is(cuda_kernels: CudaKernelsFactory) -> None:
    data, shadow = _train(cuda_kernels(), "float32", 0.9, False, shadowed=True)
    rounded = bfloat16_values(bfloat16_bits(data))
    for run in _runs(0):
        np.testing.assert_array_equal(shadow[run.start : run.stop], rounded[run.start : run.stop])
    assert not shadow[8:16].any()
    assert not shadow[SIZE - 5 :].any()


def test_extreme_values_have_the_hosts_bits(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3e38, 1.0], np.float32)
    data, gradient = (values[pick.reshape(-1)] for pick in np.meshgrid(np.arange(9), np.arange(9)))
    arrays = [kernels.arithmetic.zeros(81, "float32") for _ in range(3)]
    kernels.arithmetic.from_host(arrays[0], data)
    kernels.arithmetic.from_host(arrays[1], gradient)
    runs = [UpdateRun(0, 40, 1.0, 0.0), UpdateRun(40, 81, 2.0, 0.5)]
    kernels.arithmetic.descent(*arrays, factor=0.9, nesterov=True).update(runs, 0.3)
    with np.errstate(all="ignore"):
        HOST.descent(data, gradient, np.zeros(81, np.float32), factor=0.9, nesterov=True).update(runs, 0.3)
    arrived = kernels.arithmetic.to_host(arrays[0])
    np.testing.assert_array_equal(arrived, data)
    np.testing.assert_array_equal(np.signbit(arrived[np.isfinite(data)]), np.signbit(data[np.isfinite(data)]))


def test_tables_are_uploaded_where_runs_change_and_memory_is_kept(
    cuda_kernels: CudaKernelsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = cuda_kernels()
    device, uploads = kernels.runtime.device, []
    upload = device.upload

    def counted(*arguments: object) -> None:
        uploads.append(arguments)
        upload(*arguments)  # type: ignore[arg-type]

    arrays = [kernels.arithmetic.zeros(100, "float32") for _ in range(3)]
    descent = kernels.arithmetic.descent(*arrays, factor=0.9, nesterov=False)
    monkeypatch.setattr(device, "upload", counted)
    steps = [[UpdateRun(0, 60, 1.0, 0.1), UpdateRun(60, 70, 1.0, 0.0)], [UpdateRun(70, 100, 1.0, 0.0)]]
    for runs in steps:
        descent.update(runs, 0.1)
    used = device.memory_used()
    for _ in range(3):
        for runs in steps:
            descent.update(runs, 0.1)
    assert len(uploads) == 2
    descent.update([UpdateRun(0, 70, 0.5, 0.1)], 0.1)
    descent.update([UpdateRun(0, 70, 0.25, 0.1)], 0.1)
    descent.update([], 0.1)
    assert len(uploads) == 4
    assert device.memory_used() == used


def test_more_runs_in_the_same_place_get_a_larger_table(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    arrays = [kernels.arithmetic.zeros(64, "float32") for _ in range(3)]
    kernels.arithmetic.fill(arrays[1], 1)
    descent = kernels.arithmetic.descent(arrays[0], arrays[1], arrays[2][:0], factor=0.0, nesterov=False)
    expected = np.zeros(64, np.float32)
    for count in (1, 4, 2, 64, 8):
        step = 64 // count
        descent.update([UpdateRun(i * step, (i + 1) * step, i, 0.0) for i in range(count)], 1.0)
        expected -= np.arange(64) // step
    np.testing.assert_array_equal(kernels.arithmetic.to_host(arrays[0]), expected)


@pytest.mark.parametrize("kind", ["adam", "adamw", "lamb"])
@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_moments_have_the_hosts_bits(cuda_kernels: CudaKernelsFactory, dtype: str, start: int, kind: str) -> None:
    """Three steps: of numbers as they come, of very small and of large ones. start: of the buffers in their memory."""
    random, arithmetic = np.random.default_rng(7), cuda_kernels(seed=start).arithmetic
    rule, directs = MomentRule(0.9, 0.99, 1e-8, decoupled=kind != "adam"), kind == "lamb"
    host = [random.standard_normal(SIZE).astype(dtype) for _ in range(2)] + [np.zeros(SIZE, dtype) for _ in range(2)]
    device = [arithmetic.zeros(x.size + start, dtype)[start:] for x in host]
    shadow = arithmetic.zeros(SIZE + start, "bfloat16")[start:] if dtype == "float32" else None
    arithmetic.from_host(device[0], host[0])
    descents = HOST.moment_descent(*host, rule), arithmetic.moment_descent(*device, rule, shadow=shadow)
    for step, scale in enumerate((1.0, 1e-25, 1e10)):
        gradient = (scale * random.standard_normal(SIZE)).astype(dtype)
        host[1][:] = gradient
        arithmetic.from_host(device[1], gradient)
        corrections = Corrections(1 / (1 - 0.9 ** (step + 1)), 1 / (1 - 0.99 ** (step + 1)) ** 0.5)
        for descent in descents:
            if directs:
                descent.direct(iter(_runs(step)), corrections)
            else:
                descent.update(iter(_runs(step)), corrections, 0.01)
        for array, values in zip(device, host, strict=True):
            np.testing.assert_array_equal(arithmetic.to_host(array), values)
    if shadow is not None and not directs:
        written = arithmetic.to_host(shadow)[: _runs(0)[1].stop]
        np.testing.assert_array_equal(written, bfloat16_values(bfloat16_bits(host[0]))[: written.size])


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_averages_have_the_hosts_bits(cuda_kernels: CudaKernelsFactory, dtype: str, start: int) -> None:
    random, arithmetic = np.random.default_rng(3), cuda_kernels(seed=start).arithmetic
    average, values = (random.standard_normal(SIZE).astype(dtype) for _ in range(2))
    target, source = (arithmetic.zeros(SIZE + start, dtype)[start:] for _ in range(2))
    arithmetic.from_host(target, average)
    arithmetic.from_host(source, values)
    expected = 0.9 * average + 0.1 * values
    arithmetic.average_into(target, source, 0.9)
    HOST.average_into(average, values, 0.9)
    np.testing.assert_array_equal(arithmetic.to_host(target), average)
    np.testing.assert_allclose(average, expected, rtol=1e-5, atol=1e-6)


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


def _bench(kernels: CudaKernelSet, spec: DropoutSpec, x: np.ndarray, dtype: str, **options: bool) -> OperatorBench:
    bench = OperatorBench(kernels, spec, [x], dtype=dtype, **options)
    assert bench.operator.saved_bytes == bench.operator.scratch_bytes == 0
    return bench


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_the_numpy_sets(cuda_kernels: CudaKernelsFactory, case: str, dtype: str) -> None:
    spec, shape = CASES[case]
    random = np.random.default_rng(0)
    x, dy, start = (rounded(random.standard_normal(shape), dtype) for _ in range(3))
    host = OperatorBench(NumpyKernelSet(), spec, [x])
    assert host.inputs[0].dtype == parameter_dtype(dtype)
    for seed in range(3):
        kernels = cuda_kernels(seed=seed)
        plain, in_place, added = (
            _bench(kernels, spec, x, dtype, **options) for options in ({}, {"in_place": True}, {"accumulate": True})
        )
        context = StepContext(step=5 + seed, sample_ids=IDS)
        y = rounded(host.forward(context), dtype)
        dx = host.backward(dy).inputs[0]
        assert dx is not None
        for bench in (plain, in_place):
            np.testing.assert_array_equal(bench.forward(context), y)
            np.testing.assert_array_equal(bench.backward(dy).inputs[0], rounded(dx, dtype))
        added.forward(context)
        np.testing.assert_array_equal(added.backward(dy, [start]).inputs[0], rounded(start + dx, dtype))


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


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_where_nothing_is_dropped_no_data_moves(cuda_kernels: CudaKernelsFactory, rate: float) -> None:
    operator = cuda_kernels().make(DropoutSpec(rate, "a"), (TensorSpec((3, 5)),), training=rate == 0)
    assert isinstance(operator, InputView)


def test_aligned_runs_are_found() -> None:
    place = SamplePlace.of(DropoutSpec(0.5, "a", unsplit_shape=(9, 3, 16), origin=(4, 0, 8)), TensorSpec((2, 4, 3, 8)))
    assert (place.first, place.step0, place.step1, place.run) == (200, 48, 16, 8)
    with pytest.raises(BackendError, match="at most 3 dims in addition to the batch, not 4"):
        SamplePlace.of(DropoutSpec(0.5, "a", unsplit_shape=(2, 2, 2, 2), origin=(0,) * 4), TensorSpec((2, 1, 2, 2, 2)))


def test_a_word_that_equals_the_threshold_is_kept(cuda_kernels: CudaKernelsFactory) -> None:
    context = StepContext(step=2, sample_ids=IDS)
    drawn = words(key("dropout", 0, 2, "a"), IDS[:3], range(16))
    for place in ((0, 0), (1, 7), (2, 15)):
        spec = DropoutSpec(int(drawn[place]) / 2**32, "a")
        y = _bench(cuda_kernels(), spec, np.ones((3, 16)), "float64").forward(context)
        np.testing.assert_array_equal(y != 0, drawn >= drawn[place])


def _read(kernels: CudaKernelSet, places: StepPlaces, count: int) -> tuple[int, list[int], list[int]]:
    """(training, key, the first ids)."""
    training, words, ids = (kernels.arithmetic.to_host(array) for array in (places.training, places.key, places.ids[:count]))
    return int(training[0]), words.view(np.uint32).tolist(), ids.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_each_step_brings_its_numbers(cuda_kernels: CudaKernelsFactory, seed: int) -> None:
    kernels = cuda_kernels(seed=seed)
    block = StepBlock(kernels.runtime)
    block.begin(StepContext())
    places = {stream: block.register(*stream, 3) for stream in ((7, "a"), (7, "b"), (8, "a"))}
    for step in range(6):
        ids = np.array([step, 1 << 40, -step])
        block.begin(StepContext(step=step, training=step != 2, sample_ids=ids))
        for (stream_seed, layer), place in places.items():
            expected = int(step != 2), list(key("dropout", stream_seed, step, layer)), ids.tolist()
            assert _read(kernels, place, 3) == expected


def test_equal_streams_share_a_place(cuda_kernels: CudaKernelsFactory) -> None:
    block = StepBlock(cuda_kernels().runtime)
    first, again = (block.register(1, "a", count) for count in (5, 9))
    assert first.key.pointer == again.key.pointer
    assert block.register(2, "a", 5).key.pointer != first.key.pointer


def test_places_stay_when_later_operators_need_more_room(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    block = StepBlock(kernels.runtime)
    places = [block.register(1, str(i), 2) for i in range(KEYS + 3)]
    places.append(block.register(1, "0", LEAST_IDS + 5))
    assert len({place.key.pointer for place in places}) == len(places)
    ids = np.arange(LEAST_IDS + 5) * 3
    block.begin(StepContext(step=4, sample_ids=ids))
    for layer, place in zip((*range(KEYS + 3), 0), places, strict=True):
        count = min(place.ids.size, ids.size)
        assert _read(kernels, place, count) == (1, list(key("dropout", 1, 4, str(layer))), ids[:count].tolist())
    assert places[-1].ids.size == LEAST_IDS + 5


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 40), max_size=3).map(tuple), st.sampled_from(["float32", "bfloat16", "float64", "uint8"]))
)


@given(requests=REQUESTS)
def test_arrays_are_aligned_apart_and_inside_the_buffer(requests: list[tuple[tuple[int, ...], str]]) -> None:
    buffer = DeviceArray(1 << 20, (total_bytes(requests),), "uint8", object())
    arrays = carve(buffer, requests)
    assert [(array.shape, array.dtype) for array in arrays] == requests
    end = buffer.pointer
    for array in arrays:
        assert array.pointer % ALIGNMENT_BYTES == 0
        assert array.pointer >= end
        assert array.owner is buffer.owner
        end = array.pointer + array.nbytes
    assert end <= buffer.pointer + buffer.nbytes


def test_nothing_is_carved_out_of_nothing() -> None:
    assert carve(None, []) == []
    with pytest.raises(AssertionError, match="smaller than the declared arrays"):
        carve(None, [((1,), "float32")])


@given(st.integers(0, 10**6), st.integers(1, 10**5), st.sampled_from([1, 2, 132]))
def test_blocks_are_as_wide_as_rows(rows: int, packs: int, multiprocessors: int) -> None:
    (blocks,), (width, height) = row_launch(rows, packs, multiprocessors)
    assert width * height == 256
    assert width in (32, 256) or width >= packs > width // 2
    assert 0 <= blocks <= rows, "no block is without a row"
    assert blocks * height >= rows or blocks == 256 * multiprocessors


def test_nothing_to_do_is_an_empty_grid() -> None:
    assert row_launch(0, 5, 2)[0] == (0,)
    assert row_launch(5, 0, 2)[0] == (0,)


def test_images_that_32_bits_cannot_count_are_refused() -> None:
    check_images("pooling", (2**10, 2**20 - 1, 1, 2**30 - 1))
    with pytest.raises(BackendError, match=r"fewer than 1073741824 rows .*; train with smaller micro-batches or images"):
        check_images("pooling", (1, 1, 1, 1), (2**10, 2**20, 1, 1))
    with pytest.raises(BackendError):
        check_images("pooling", (1, 1, 2**10, 2**20))
