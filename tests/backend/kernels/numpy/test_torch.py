"""Every operator against PyTorch in float64."""

import numpy as np
import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import (
    AdaptiveAveragePoolSpec,
    BatchNormSpec,
    Conv2dSpec,
    LinearSpec,
    PoolSpec,
    SoftmaxCrossEntropySpec,
    Window,
)
from hpctrain.testing.operator_gradients import assert_close
from hpctrain.testing.operators import OperatorBench, default_parameters

torch = pytest.importorskip("torch")
functional = torch.nn.functional
pytestmark = pytest.mark.torch
KERNELS = NumpyKernelSet()


def nchw(x: np.ndarray):
    return torch.tensor(x.transpose(0, 3, 1, 2).copy(), requires_grad=True)


def nhwc(x) -> np.ndarray:
    return x.detach().numpy().transpose(0, 2, 3, 1)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def compare(bench: OperatorBench, x, y, parameters: dict) -> None:
    """Outputs and all gradients; `parameters`: role -> (torch tensor, its permutation to ours)."""
    assert_close(bench.forward(), nhwc(y), 1e-11, "output")
    dy = normal(*nhwc(y).shape, seed=9)
    y.backward(torch.tensor(dy.transpose(0, 3, 1, 2).copy()))
    grads = bench.backward(dy)
    assert_close(grads.inputs[0], nhwc(x.grad), 1e-10, "input gradient")
    for role, (tensor, axes) in parameters.items():
        assert_close(grads.parameters[role], tensor.grad.numpy().transpose(axes), 1e-10, role)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
def test_conv2d(stride: tuple[int, int], dilation: tuple[int, int], groups: int) -> None:
    spec = Conv2dSpec(4, 6, Window((3, 5), stride, (1, 1, 2, 2), dilation), groups)
    x, ours = normal(3, 9, 11, 4), default_parameters(spec, "float64")
    weight = torch.tensor(ours["weight"].transpose(0, 3, 1, 2).copy(), requires_grad=True)
    bias = torch.tensor(ours["bias"], requires_grad=True)
    tx = nchw(x)
    y = functional.conv2d(tx, weight, bias, stride, (1, 2), dilation, groups)
    compare(OperatorBench(KERNELS, spec, [x], parameters=ours), tx, y, {"weight": (weight, (0, 2, 3, 1)), "bias": (bias, (0,))})


def test_linear() -> None:
    spec = LinearSpec(225, 7)
    x, ours, dy = normal(5, 225), default_parameters(spec, "float64"), normal(5, 7, seed=1)
    tensors = [torch.tensor(a.copy(), requires_grad=True) for a in (x, ours["weight"].T, ours["bias"])]
    y = functional.linear(*tensors)
    y.backward(torch.tensor(dy))
    bench = OperatorBench(KERNELS, spec, [x], parameters=ours)
    assert_close(bench.forward(), y.detach().numpy(), 1e-12, "output")
    grads = bench.backward(dy)
    assert_close(grads.inputs[0], tensors[0].grad.numpy(), 1e-12, "input")
    assert_close(grads.parameters["weight"], tensors[1].grad.numpy().T, 1e-12, "weight")
    assert_close(grads.parameters["bias"], tensors[2].grad.numpy(), 1e-12, "bias")


@pytest.mark.parametrize("shape", [(3, 7, 9, 5), (2, 1, 1, 5)])
def test_batch_norm(shape: tuple[int, ...]) -> None:
    """The running values of torch after one batch of momentum 1 are our batch statistics."""
    x, ours = normal(*shape), default_parameters(BatchNormSpec(5), "float64")
    tensors = {role: torch.tensor(value, requires_grad=True) for role, value in ours.items()}
    mean, variance, tx = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64), nchw(x)
    y = functional.batch_norm(tx, mean, variance, tensors["weight"], tensors["bias"], training=True, momentum=1.0)
    bench = OperatorBench(KERNELS, BatchNormSpec(5), [x], parameters=ours)
    compare(bench, tx, y, {role: (tensor, (0,)) for role, tensor in tensors.items()})
    assert_close(bench.statistics["batch_mean"], mean.numpy(), 1e-12, "mean")
    assert_close(bench.statistics["batch_var"], variance.numpy(), 1e-12, "variance")


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
    compare(OperatorBench(KERNELS, PoolSpec(kind, window, ceil_mode, include), [x]), tx, y, {})


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (7, 7), (9, 4)])
def test_adaptive_average_pool(size: tuple[int, int]) -> None:
    x = normal(2, 7, 9, 3)
    tx = nchw(x)
    compare(OperatorBench(KERNELS, AdaptiveAveragePoolSpec(size), [x]), tx, functional.adaptive_avg_pool2d(tx, size), {})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_cross_entropy(smoothing: float) -> None:
    logits, labels = normal(7, 9) * 5, np.random.default_rng(1).integers(0, 9, 7)
    tensor = torch.tensor(logits, requires_grad=True)
    loss = functional.cross_entropy(tensor, torch.tensor(labels), label_smoothing=smoothing, reduction="sum")
    (loss / 25).backward()
    d_logits = np.empty_like(logits)
    sums = KERNELS.make_loss(SoftmaxCrossEntropySpec(smoothing)).run(logits, labels, 25, d_logits)
    assert sums.loss == pytest.approx(loss.item(), rel=1e-13)
    assert_close(d_logits, tensor.grad.numpy(), 1e-13, "logits")
