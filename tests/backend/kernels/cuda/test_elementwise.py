"""Rectified linear units and residual sums of the cuda set, in place and adding, against the formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.rounding import read, write
from hpctrain.backend.kernels.base import Buffers, StepContext
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.specs import AddSpec, ReluSpec, TensorSpec
from tests.support.emulated import CudaKernelsFactory
from tests.support.rounded import assert_rounded, dyadic

DTYPES = ["float64", "float32", "bfloat16"]
SHAPES = [(2, 3, 5, 16), (3, 5, 7), (1,), (0, 4, 4, 8), (700, 8)]
SPECS = {"relu": ReluSpec(), "add": AddSpec(), "add and relu": AddSpec(relu=True)}


def _array(kernels: CudaKernelSet, values: np.ndarray) -> DeviceArray:
    spec = TensorSpec(values.shape, kernels.runtime.dtype)
    array = kernels.allocate(spec.bytes).view(spec.dtype).reshape(spec.shape)
    write(array, values)
    return array


def _case(
    kernels: CudaKernelSet, name: str, shape: tuple[int, ...], *, wanted: tuple[bool, ...], adds: tuple[bool, ...], in_place: bool
) -> tuple[np.ndarray, list[np.ndarray | None], np.ndarray, list[np.ndarray]]:
    """Runs an operation; gives its output and gradients, and those by the formulas."""
    count = 1 if name == "relu" else 2
    inputs = [dyadic(*shape, seed=i) for i in range(count)]
    dy, starts = dyadic(*shape, seed=5), [dyadic(*shape, seed=7 + i) for i in range(count)]
    spec = TensorSpec(shape, kernels.runtime.dtype)
    operator = kernels.make(SPECS[name], (spec,) * count, training=True)
    xs = tuple(_array(kernels, x) for x in inputs)
    y = xs[0] if in_place else _array(kernels, np.full(shape, np.nan))
    d_output = _array(kernels, dy)
    grads = [
        None if not asked else d_output if in_place and i == 0 and not adds[i] else _array(kernels, starts[i])
        for i, asked in zip(range(count), wanted, strict=False)
    ]
    operator.bind(Buffers(inputs=xs, output=y, input_grads=tuple(grads), output_grad=d_output, accumulate=adds[:count]))
    operator.forward(StepContext())
    output = read(y).copy()
    operator.backward_parameters()
    operator.backward_input()
    aim = sum(inputs)
    if name != "add":
        aim = np.maximum(aim, 0)
        dy = np.where(aim > 0, dy, 0)
    aims = [dy + start if add else dy for start, add in zip(starts, adds, strict=False)]
    return output, [None if grad is None else read(grad).copy() for grad in grads], aim, aims


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_values_and_gradients(cuda_kernels: CudaKernelsFactory, name: str, dtype: str, in_place: bool) -> None:
    for seed, shape in enumerate(SHAPES):
        for wanted, adds in (((True, True), (False, False)), ((True, False), (True, False)), ((True, True), (False, True))):
            kernels = cuda_kernels(dtype, seed)
            output, grads, aim, aims = _case(kernels, name, shape, wanted=wanted, adds=adds, in_place=in_place)
            assert_rounded(output, aim, dtype)
            for grad, expected in zip(grads, aims, strict=True):
                if grad is not None:
                    assert_rounded(grad, expected, dtype)


def test_a_relu_hands_nan_on_and_stops_the_gradient_at_zero(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels("float32")
    operator = kernels.make(ReluSpec(), (TensorSpec((4,)),), training=True)
    x, y, dy, dx = (_array(kernels, np.array(values)) for values in ([np.nan, -1.0, 0.0, 2.0], [9.0] * 4, [5.0] * 4, [9.0] * 4))
    operator.bind(Buffers(inputs=(x,), output=y, input_grads=(dx,), output_grad=dy, accumulate=(False,)))
    operator.forward(StepContext())
    operator.backward_input()
    np.testing.assert_array_equal(read(y), [np.nan, 0.0, 0.0, 2.0])
    np.testing.assert_array_equal(read(dx), [0.0, 0.0, 0.0, 5.0])
