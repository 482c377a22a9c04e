"""ReLU and the residual sum: definition, central differences, in place, accumulated, shared buffers."""

import numpy as np
import pytest

from hpctrain.backend.kernels.base import Buffers, StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import AddSpec, ReluSpec, TensorSpec
from hpctrain.testing.operator_gradients import assert_close, check_gradient
from hpctrain.testing.operators import OperatorBench

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
def test_add_gives_only_the_gradients_asked_for(wanted: tuple[bool, bool]) -> None:
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


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradient(accumulate: bool, in_place: bool) -> None:
    options = {"accumulate": accumulate, "in_place": in_place}
    check_gradient(KERNELS, ReluSpec(), [far_from_zero(3, 7, 9, 2)], **options)
    check_gradient(KERNELS, AddSpec(), [far_from_zero(3, 7, 5), far_from_zero(3, 7, 5, seed=1)], **options)
    check_gradient(KERNELS, AddSpec(relu=True), [far_from_zero(3, 7, 5), far_from_zero(3, 7, 5) * 0.5], **options)


def test_relu_keeps_nan() -> None:
    x = far_from_zero(3, 7)
    x[1, 2] = np.nan
    y = OperatorBench(KERNELS, ReluSpec(), [x]).forward()
    assert_close(np.isnan(y).astype(float), np.isnan(x).astype(float), 0, "NaN")
