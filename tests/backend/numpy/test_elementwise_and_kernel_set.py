"""ReLU, sums, dropout and stochastic depth by their definitions; the whole kernel set, its dtypes and memory; columns."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.numpy.elementwise import sample_indices
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.numpy.operator import allocate, column_sums
from hpctrain.backend.numpy.windows import Columns
from hpctrain.backend.operators import Buffers, InputView, StepContext, carve, total_bytes
from hpctrain.backend.specs import (
    AdaptiveAveragePoolSpec,
    AddSpec,
    BatchNormSpec,
    Conv2dSpec,
    DropoutSpec,
    FlattenSpec,
    LinearSpec,
    PoolSpec,
    ReluSpec,
    Spec,
    TensorSpec,
    Window,
)
from hpctrain.core.errors import BackendError
from hpctrain.testing.operators import OperatorBench, assert_close, check_gradient, default_parameters
from tests.support.sampling import amount

KERNELS = NumpyKernelSet()

SHAPES = [(3, 7, 9, 5), (2, 225), (0, 7, 9, 5), (3, 0, 9, 5), (7, 91, 89, 3)]


def far_from_zero(*shape: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape)
    return x + 0.1 * np.sign(x)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_relu(shape: tuple[int, ...], in_place: bool, accumulate: bool, dtype: str) -> None:
    x, dy, start = (far_from_zero(*shape, seed=i).astype(dtype) for i in range(3))
    x.reshape(-1)[::7] = 0
    bench = OperatorBench(KERNELS, ReluSpec(), [x], in_place=in_place, accumulate=accumulate)
    np.testing.assert_array_equal(bench.forward(), np.maximum(x, 0))
    expected = dy * (x > 0) + (start if accumulate else 0)
    np.testing.assert_array_equal(bench.backward(dy, [start]).inputs[0], expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_add(shape: tuple[int, ...], relu: bool, in_place: bool, accumulate: bool) -> None:
    a, b, dy, *start = (far_from_zero(*shape, seed=i) for i in range(5))
    bench = OperatorBench(KERNELS, AddSpec(relu), [a, b], in_place=in_place, accumulate=accumulate)
    y = bench.forward()
    np.testing.assert_array_equal(y, np.maximum(a + b, 0) if relu else a + b)
    grads = bench.backward(dy, start).inputs
    passed = dy * (y > 0) if relu else dy
    for grad, first in zip(grads, start, strict=True):
        np.testing.assert_array_equal(grad, passed + first if accumulate else passed)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_add_computes_only_the_gradients_asked_for(wanted: tuple[bool, bool]) -> None:
    a, b, dy = (far_from_zero(3, 7, 5, seed=i) for i in range(3))
    bench = OperatorBench(KERNELS, AddSpec(), [a, b], wanted=wanted)
    bench.forward()
    for grad, asked in zip(bench.backward(dy).inputs, wanted, strict=True):
        assert (grad is not None) == asked
        if asked:
            np.testing.assert_array_equal(grad, dy)


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("relu", [False, True])
def test_either_gradient_may_share_the_buffer_of_the_outputs(shared: int, relu: bool) -> None:
    shape = (3, 7, 5)
    a, b, values = (far_from_zero(*shape, seed=i) for i in range(3))
    operator = KERNELS.make(AddSpec(relu), (TensorSpec(shape, "float64"),) * 2, training=True)
    dy, other, y = values.copy(), np.full(shape, np.nan), np.empty(shape)
    grads = (dy, other) if shared == 0 else (other, dy)
    scratch = KERNELS.allocate(operator.scratch_bytes)
    operator.bind(Buffers((a, b), y, grads, dy, (False, False), scratch=scratch))
    operator.forward(StepContext())
    operator.backward_input()
    for grad in grads:
        np.testing.assert_array_equal(grad, values * (a + b > 0) if relu else values)


def test_relu_keeps_nan() -> None:
    x = far_from_zero(3, 7)
    x[1, 2] = np.nan
    y = OperatorBench(KERNELS, ReluSpec(), [x]).forward()
    assert_close(np.isnan(y).astype(float), np.isnan(x).astype(float), 0, "NaN")


SHAPE = (7, 9, 5)


def forward(x: np.ndarray, ids: np.ndarray, *, step: int = 3, **options: object) -> np.ndarray:
    spec = DropoutSpec(0.4, "features.3", seed=11, **options)
    return OperatorBench(KERNELS, spec, [x]).forward(StepContext(step=step, sample_ids=ids))


def test_elements_are_dropped_or_scaled_at_the_rate() -> None:
    x = np.ones((64, *SHAPE))
    y = forward(x, np.arange(64))
    np.testing.assert_allclose(np.unique(y), [0.0, 1.0 / 0.6])
    deviation = np.sqrt(0.4 * 0.6 / y.size)
    assert abs((y == 0).mean() - 0.4) < 5 * deviation


def test_the_mask_follows_step_seed_layer_and_sample() -> None:
    x, ids = np.ones((3, 225)), np.arange(3)
    base = forward(x, ids)
    np.testing.assert_array_equal(forward(x, ids), base)
    assert (forward(x, ids, step=4) != base).any()
    assert (forward(x, ids + 1) != base).any()
    np.testing.assert_array_equal(forward(x, ids + 1)[:2], base[1:])
    for other in (DropoutSpec(0.4, "features.4", seed=11), DropoutSpec(0.4, "features.3", seed=12)):
        y = OperatorBench(KERNELS, other, [x]).forward(StepContext(step=3, sample_ids=ids))
        assert (y != base).any()


@settings(max_examples=50, deadline=None)
@given(st.tuples(*[st.integers(0, size) for size in SHAPE]), st.tuples(*[st.integers(0, size) for size in SHAPE]))
def test_any_part_draws_its_part_of_the_mask(first: tuple[int, ...], last: tuple[int, ...]) -> None:
    low, high = tuple(map(min, first, last)), tuple(map(max, first, last))
    ids = np.array([5, 2, 9])
    whole = forward(np.ones((3, *SHAPE)), ids)
    corner = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    part = np.ones((3, *(b - a for a, b in zip(low, high, strict=True))))
    y = forward(part, ids, unsplit_shape=SHAPE, origin=low)
    np.testing.assert_array_equal(y, whole[:, *corner])


@given(st.integers(0, 6), st.integers(1, 7))
def test_rows_of_an_image_are_a_range(first: int, count: int) -> None:
    """The cheap case stays cheap: a split by height needs no index array."""
    count = min(count, 7 - first)
    assert sample_indices((count, 9, 5), SHAPE, (first, 0, 0)) == range(first * 45, (first + count) * 45)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("per_sample", [False, True])
def test_gradient_of_dropout(accumulate: bool, in_place: bool, per_sample: bool) -> None:
    x = np.random.default_rng(0).standard_normal((3, 7, 3, 2))
    context = StepContext(step=2, sample_ids=np.array([4, 8, 1]))
    check_gradient(
        KERNELS, DropoutSpec(0.3, "a", per_sample=per_sample), [x], context=context, accumulate=accumulate, in_place=in_place
    )


def test_many_samples_are_drawn_in_parts_alike() -> None:
    x = np.ones((130, 4099), np.float32)
    ids = np.random.default_rng(0).permutation(130)
    y = forward(x, ids)
    np.testing.assert_array_equal(y[77:78], forward(x[77:78], ids[77:78]))


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_where_nothing_is_dropped_no_data_moves(rate: float) -> None:
    operator = KERNELS.make(DropoutSpec(rate, "a"), (TensorSpec((3, 5)),), training=rate == 0)
    assert isinstance(operator, InputView)


def forward_of_samples(x: np.ndarray, ids: np.ndarray, **options: object) -> np.ndarray:
    spec = DropoutSpec(0.4, "layer1.0.stochastic_depth", seed=11, per_sample=True, **options)
    return OperatorBench(KERNELS, spec, [x]).forward(StepContext(step=3, sample_ids=ids))


def test_samples_are_dropped_or_scaled_whole_at_the_rate() -> None:
    x = np.random.default_rng(0).standard_normal((4000, 3))
    factors = forward_of_samples(x, np.arange(4000)) / x
    np.testing.assert_array_equal(np.ptp(factors, axis=1) < 1e-12, True)
    np.testing.assert_allclose(np.unique(np.round(factors, 9)), [0.0, np.round(1 / 0.6, 9)])
    assert abs((factors[:, 0] == 0).mean() - 0.4) < 5 * np.sqrt(0.4 * 0.6 / 4000)


def test_parts_of_a_sample_have_its_mask_wherever_they_are() -> None:
    ids = np.random.default_rng(1).permutation(40)
    kept = forward_of_samples(np.ones((40, *SHAPE)), ids)[:, 0, 0, 0] != 0
    assert 0 < kept.sum() < 40
    rows = forward_of_samples(np.ones((38, 2, 9, 5)), ids, first_sample=2)
    np.testing.assert_array_equal(rows.reshape(38, -1) != 0, np.repeat(kept[2:, None], 90, axis=1))


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_gradient_of_large_samples_is_forward_of_the_gradient(accumulate: bool) -> None:
    """A sample fills a block of an added gradient. The map is linear and diagonal, so it is its own adjoint."""
    random = np.random.default_rng(0)
    x, dy, start = (random.standard_normal((3, 40_000)) for _ in range(3))
    spec, context = DropoutSpec(0.5, "a", per_sample=True), StepContext(step=2, sample_ids=np.arange(3))
    bench = OperatorBench(KERNELS, spec, [x], accumulate=accumulate)
    bench.forward(context)
    (gradient,) = bench.backward(dy, [start]).inputs
    assert gradient is not None
    expected = np.array(OperatorBench(KERNELS, spec, [dy]).forward(context))
    np.testing.assert_allclose(gradient, expected + start if accumulate else expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("per_sample", [False, True])
def test_evaluation_is_the_identity_and_no_samples_are_no_error(per_sample: bool) -> None:
    spec, x = DropoutSpec(0.5, "a", per_sample=per_sample), np.random.default_rng(0).standard_normal((3, 5))
    bench = OperatorBench(KERNELS, spec, [x])
    np.testing.assert_array_equal(bench.forward(StepContext(training=False, sample_ids=np.arange(3))), x)
    bench = OperatorBench(KERNELS, spec, [np.zeros((0, 7))])
    assert bench.forward().shape == (0, 7)
    assert bench.backward(np.zeros((0, 7))).inputs[0].shape == (0, 7)


WINDOW = Window((3, 3), (2, 2), (1, 1, 1, 1))

SPECS: list[tuple[Spec, int]] = [
    (Conv2dSpec(8, 16, WINDOW), 1),
    (Conv2dSpec(8, 16, Window((3, 3), (1, 1), (1, 1, 1, 1)), groups=2), 1),
    (Conv2dSpec(8, 16, Window((1, 1), (1, 1), (0, 0, 0, 0))), 1),
    (BatchNormSpec(8), 1),
    (BatchNormSpec(8, relu=True, add=True), 2),
    (PoolSpec("max", WINDOW), 1),
    (PoolSpec("average", WINDOW), 1),
    (AdaptiveAveragePoolSpec((2, 3)), 1),
    (ReluSpec(), 1),
    (AddSpec(), 2),
    (AddSpec(relu=True), 2),
    (DropoutSpec(0.5, "a"), 1),
    (DropoutSpec(0.5, "a", per_sample=True), 1),
    (FlattenSpec(), 1),
    (LinearSpec(225, 9), 1),
]

INPUT_SHAPES = {LinearSpec: (7, 225)}


def inputs(spec: Spec, count: int, shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(dtype) for _ in range(count)]


@pytest.mark.parametrize(("spec", "count"), SPECS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("training", [False, True])
def test_every_spec_in_both_dtypes(spec: Spec, count: int, dtype: str, training: bool) -> None:
    """float32 within 1e-5 of float64, in training and evaluation; the hostile memory of the bench must not show."""
    results = {}
    for kind in {dtype, "float64"}:
        xs = [x.astype(kind) for x in inputs(spec, count, INPUT_SHAPES.get(type(spec), (3, 7, 9, 8)), "float64")]
        statistics = {"running_mean": np.zeros(8, kind), "running_var": np.ones(8, kind)}
        parameters = default_parameters(spec, kind)
        bench = OperatorBench(KERNELS, spec, xs, parameters=parameters, statistics=statistics, training=training)
        y = bench.forward()
        results[kind] = [y]
        if training:
            gradients = bench.backward(np.random.default_rng(1).standard_normal(y.shape).astype(kind))
            results[kind] += [*gradients.inputs, *gradients.parameters.values()]
        assert {array.dtype for array in results[kind]} == {np.dtype(kind)}
    for ours, wanted in zip(results[dtype], results["float64"], strict=True):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5 * max(10.0, float(np.abs(wanted).max())))


@pytest.mark.parametrize(("spec", "count"), SPECS)
def test_a_second_step_computes_the_same(spec: Spec, count: int) -> None:
    """Operators keep no state from step to step but their buffers."""
    xs = inputs(spec, count, INPUT_SHAPES.get(type(spec), (3, 7, 9, 8)), "float64")
    bench = OperatorBench(KERNELS, spec, xs, parameters=default_parameters(spec, "float64"))
    first = bench.forward()
    dy = np.random.default_rng(1).standard_normal(first.shape)
    before = bench.backward(dy)
    np.testing.assert_array_equal(bench.forward(), first)
    after = bench.backward(dy)
    for old, new in zip(before.inputs, after.inputs, strict=True):
        np.testing.assert_array_equal(new, old)
    for role, grad in before.parameters.items():
        np.testing.assert_array_equal(after.parameters[role], grad)


@pytest.mark.parametrize(("spec", "count"), [case for case in SPECS if not isinstance(case[0], DropoutSpec | LinearSpec)])
def test_a_step_allocates_only_what_is_small(spec: Spec, count: int) -> None:
    """A tensor here has 3.6 MB; the masks of dropout are drawn by a generator with temporaries of its own."""
    xs = inputs(spec, count, (9, 112, 112, 8), "float32")
    bench = OperatorBench(KERNELS, spec, xs, parameters=default_parameters(spec, "float32"))
    context = StepContext(sample_ids=np.arange(9))
    bench.forward()
    operator = bench.operator
    tracemalloc.start()
    try:
        operator.forward(context)
        operator.backward_parameters()
        operator.backward_input()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 19


def test_flatten_only_renames_memory() -> None:
    x = np.random.default_rng(0).standard_normal((3, 7, 9, 2))
    bench = OperatorBench(KERNELS, FlattenSpec(), [x])
    assert isinstance(bench.operator, InputView)
    np.testing.assert_array_equal(bench.forward(), x.reshape(3, -1))
    dy = np.random.default_rng(1).standard_normal((3, 126))
    np.testing.assert_array_equal(bench.backward(dy).inputs[0], dy.reshape(x.shape))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(BackendError, match="float32 or float64 or bfloat16, not in float16"):
        KERNELS.make(ReluSpec(), (TensorSpec((3, 5), "float16"),), training=True)


class Strange(ReluSpec.__bases__[0]):
    """An operation that no set knows."""

    def output(self, x: TensorSpec) -> TensorSpec:
        return x

    def flops(self, x: TensorSpec) -> int:
        return 0


def test_unknown_specs_are_refused() -> None:
    with pytest.raises(BackendError, match="Strange"):
        KERNELS.make(Strange(), (TensorSpec((3, 5)),), training=True)


UP_TO_3 = st.integers(1, 3)


def gather(image: np.ndarray, window: Window, outputs: tuple[int, int], groups: int) -> np.ndarray:
    """(groups, N * Ho * Wo, R * S * C / groups) from the definition."""
    n, h, w, c = image.shape
    out = np.zeros((n, *outputs, *window.kernel, c))
    for o, p, r, s in np.ndindex(*outputs, *window.kernel):
        i = o * window.stride[0] - window.padding[0] + r * window.dilation[0]
        j = p * window.stride[1] - window.padding[2] + s * window.dilation[1]
        if 0 <= i < h and 0 <= j < w:
            out[:, o, p, r, s] = image[:, i, j]
    pixels, taps = n * outputs[0] * outputs[1], window.kernel[0] * window.kernel[1]
    out = out.reshape(pixels, taps, groups, c // groups)
    return out.transpose(2, 0, 1, 3).reshape(groups, pixels, taps * c // groups)


@settings(max_examples=amount(66, 200), deadline=None)
@given(
    st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(1, 8)), st.sampled_from([1, 2, 17]), UP_TO_3,
    st.tuples(UP_TO_3, UP_TO_3), st.tuples(UP_TO_3, UP_TO_3), st.tuples(UP_TO_3, UP_TO_3),
    st.tuples(st.integers(-2, 4), st.integers(-2, 4)), st.tuples(st.integers(1, 6), st.integers(1, 6)), st.integers(1, 4000),
)  # fmt: skip
def test_columns_are_the_windows(size, channels, groups, kernel, stride, dilation, padding, outputs, column_bytes) -> None:
    window = Window(kernel, stride, (padding[0], 0, padding[1], 0), dilation)
    image = np.random.default_rng(0).standard_normal((*size, groups * channels))
    columns = Columns(image.shape, "float64", window, outputs, groups=groups, column_bytes=column_bytes)
    scratch = np.full(total_bytes(columns.scratch), 0xFF, np.uint8)
    chunks = columns.bind(image, *carve(scratch, columns.scratch))
    expected = gather(image, window, outputs, groups)
    covered = 0
    assert len(chunks) == columns.count
    for chunk in chunks:
        scratch.fill(0xFF)
        chunk.fill()
        assert chunk.start == covered
        assert chunk.matrix.shape[1] == chunk.stop - chunk.start <= columns.largest
        np.testing.assert_array_equal(chunk.matrix, expected[:, chunk.pixels])
        covered = chunk.stop
    assert covered == columns.pixels == expected.shape[1]


@pytest.mark.parametrize("groups", [1, 3])
def test_a_plain_1x1_convolution_copies_nothing(groups: int) -> None:
    image = np.random.default_rng(0).standard_normal((2, 5, 7, 6))
    columns = Columns(image.shape, "float64", Window((1, 1), (1, 1), (0, 0, 0, 0)), (5, 7), groups=groups)
    assert total_bytes(columns.scratch) == 0
    (chunk,) = columns.bind(image, np.empty(0), np.empty(0))
    assert np.shares_memory(chunk.matrix, image)
    np.testing.assert_array_equal(chunk.matrix, image.reshape(70, groups, -1).transpose(1, 0, 2))


@pytest.mark.parametrize("size", [0, 1, 4097, 5 << 20])
def test_buffers_are_zeroed_aligned_and_writable(size: int) -> None:
    buffer = allocate(size)
    assert buffer.dtype == np.uint8
    assert buffer.shape == (size,)
    assert not buffer.any()
    assert size == 0 or buffer.ctypes.data % 64 == 0
    buffer[...] = 1


def test_carved_arrays_are_aligned_and_apart() -> None:
    requests = [((3, 5), "float32"), ((7,), "bool"), ((0, 4), "float64"), ((2, 9), "float64"), ((1,), "uint8")]
    buffer = allocate(total_bytes(requests))
    arrays = carve(buffer, requests)
    for i, (array, (shape, dtype)) in enumerate(zip(arrays, requests, strict=True)):
        assert array.shape == shape
        assert array.dtype == dtype
        assert array.ctypes.data % 64 == 0 or array.size == 0
        array[...] = i % 2
    for i, array in enumerate(arrays):
        assert (array == i % 2).all()


def test_nothing_is_carved_from_no_buffer() -> None:
    (array,) = carve(None, [((0, 3), "float32")])
    assert array.shape == (0, 3)


def test_float32_does_not_lose_small_terms() -> None:
    """A running float32 sum of 2**25 ones stops at 2**24."""
    out = np.empty(1, np.float32)
    column_sums(np.broadcast_to(np.float32(1), (1 << 25, 1)), out)
    assert out[0] == 1 << 25
