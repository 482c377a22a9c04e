"""Windows that may leave the image against PyTorch's in float64; other operators are compared within whole models."""

import numpy as np
import pytest

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.specs import AdaptiveAveragePoolSpec, PoolSpec, Window
from hpctrain.testing.operators import OperatorBench, assert_close

torch = pytest.importorskip("torch")
functional = torch.nn.functional
pytestmark = pytest.mark.torch
KERNELS = NumpyKernelSet()


def nchw(x: np.ndarray):
    return torch.tensor(x.transpose(0, 3, 1, 2).copy(), requires_grad=True)


def nhwc(x) -> np.ndarray:
    return x.detach().numpy().transpose(0, 2, 3, 1)


def compare(bench: OperatorBench, x, y) -> None:
    """Outputs and gradients."""
    assert_close(bench.forward(), nhwc(y), 1e-11, "output")
    dy = np.random.default_rng(9).standard_normal(nhwc(y).shape)
    y.backward(torch.tensor(dy.transpose(0, 3, 1, 2).copy()))
    assert_close(bench.backward(dy).inputs[0], nhwc(x.grad), 1e-10, "input gradient")


@pytest.mark.parametrize("kind", ["max", "average"])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", [(7, 9), (8, 6), (15, 5)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (2, 2, 0), ((3, 2), (1, 3), (1, 1)), (5, 3, 2)])
def test_pool(kind: str, ceil_mode: bool, include: bool, size, kernel, stride, padding) -> None:
    kernel, stride, padding = ((v, v) if isinstance(v, int) else v for v in (kernel, stride, padding))
    window = Window(kernel, stride, (padding[0], padding[0], padding[1], padding[1]))
    # Few values, for the ties that follow a ReLU.
    x = np.random.default_rng(0).integers(0, 3, (2, *size, 3)).astype(np.float64)
    tx = nchw(x)
    if kind == "max":
        y = functional.max_pool2d(tx, kernel, stride, padding, ceil_mode=ceil_mode)
    else:
        y = functional.avg_pool2d(tx, kernel, stride, padding, ceil_mode, include)
    compare(OperatorBench(KERNELS, PoolSpec(kind, window, ceil_mode, include), [x]), tx, y)


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (7, 7), (9, 4)])
def test_adaptive_average_pool(size: tuple[int, int]) -> None:
    x = np.random.default_rng(0).standard_normal((2, 7, 9, 3))
    tx = nchw(x)
    compare(OperatorBench(KERNELS, AdaptiveAveragePoolSpec(size), [x]), tx, functional.adaptive_avg_pool2d(tx, size))
