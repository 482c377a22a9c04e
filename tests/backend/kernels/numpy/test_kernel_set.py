"""The set: every spec in both dtypes, what it refuses, and that operators keep to the memory they declared."""

import tracemalloc

import numpy as np
import pytest

from hpctrain.backend.kernels.abilities import InputView
from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import (
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
from hpctrain.errors import BackendError
from hpctrain.testing.operators import OperatorBench, default_parameters

KERNELS = NumpyKernelSet()
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
]


def inputs(spec: Spec, count: int, shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(dtype) for _ in range(count)]


@pytest.mark.parametrize(("spec", "count"), SPECS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("training", [False, True])
def test_every_spec_in_both_dtypes(spec: Spec, count: int, dtype: str, training: bool) -> None:
    """float32 within 1e-5 of float64, in training and evaluation; the hostile memory of the bench must not show."""
    xs = inputs(spec, count, (3, 7, 9, 8), "float64")
    statistics = {"running_mean": np.zeros(8), "running_var": np.ones(8)}
    y = {}
    for kind in {dtype, "float64"}:
        bench = OperatorBench(
            KERNELS,
            spec,
            [x.astype(kind) for x in xs],
            parameters=default_parameters(spec, kind),
            statistics={role: value.astype(kind) for role, value in statistics.items()},
            training=training,
        )
        y[kind] = bench.forward()
        assert y[kind].dtype == kind
    assert np.isfinite(y[dtype]).all()
    np.testing.assert_allclose(y[dtype], y["float64"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("spec", "count"), SPECS)
def test_a_second_step_gives_the_same(spec: Spec, count: int) -> None:
    """Operators keep no state from step to step but their buffers."""
    xs = inputs(spec, count, (3, 7, 9, 8), "float64")
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


@pytest.mark.parametrize(("spec", "count"), [case for case in SPECS if not isinstance(case[0], DropoutSpec)])
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


def test_flatten_only_names_memory_anew() -> None:
    x = np.random.default_rng(0).standard_normal((3, 7, 9, 2))
    bench = OperatorBench(KERNELS, FlattenSpec(), [x])
    assert isinstance(bench.operator, InputView)
    np.testing.assert_array_equal(bench.forward(), x.reshape(3, -1))
    dy = np.random.default_rng(1).standard_normal((3, 126))
    np.testing.assert_array_equal(bench.backward(dy).inputs[0], dy.reshape(x.shape))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(BackendError, match="float32 or float64, not in float16"):
        KERNELS.make(ReluSpec(), (TensorSpec((3, 5), "float16"),), training=True)


def test_unknown_specs_are_refused() -> None:
    class Strange(ReluSpec.__bases__[0]):
        def output(self, x: TensorSpec) -> TensorSpec:
            return x

        def flops(self, x: TensorSpec) -> int:
            return 0

    with pytest.raises(BackendError, match="Strange"):
        KERNELS.make(Strange(), (TensorSpec((3, 5)),), training=True)


def test_the_linear_layer_is_made_too() -> None:
    operator = KERNELS.make(LinearSpec(5, 7), (TensorSpec((3, 5)),), training=False)
    assert operator.output.shape == (3, 7)
    assert operator.needs_inputs == (False,)
