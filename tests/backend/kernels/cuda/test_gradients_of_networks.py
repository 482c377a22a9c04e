"""A network of most layers on the emulated device: gradients are NumPy's, in bfloat16 as near as rounded activations allow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hpctrain.backend.cuda.half import bfloat16_bits, bfloat16_values
from hpctrain.backend.kernels.base import KernelSet, LossOperator, LossSums, Operator, StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.numpy.loss import SoftmaxCrossEntropy
from hpctrain.backend.kernels.specs import FlattenSpec, SoftmaxCrossEntropySpec, Spec, TensorSpec
from hpctrain.nn.layers.adaptive_average_pool import AdaptiveAveragePool
from hpctrain.nn.layers.average_pool import AveragePool
from hpctrain.nn.layers.batch_norm import BatchNorm
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.dropout import Dropout
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.max_pool import MaxPool
from hpctrain.nn.layers.pad_channels import PadChannels
from hpctrain.nn.layers.relu import ReLU
from hpctrain.nn.layers.residual import Residual
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.network import Network
from tests.support.emulated import CudaKernelsFactory

IMAGES = (17, 15, 3)
LABELS = np.array([3, 1, 4, 1, 5, 9, 2])
CONTEXT = StepContext(sample_ids=np.arange(len(LABELS)), global_count=len(LABELS))


def model() -> Sequential:
    """Residual blocks of both kinds, every pool, layers with biases; channels that fit packs and some that do not."""
    first = {"conv": Conv2d(8, 24, 3, padding=1, bias=False), "bn": BatchNorm(24), "relu": ReLU(), "last": Conv2d(24, 16, 1)}
    second = {"conv": Conv2d(16, 16, 3, padding=1, groups=2), "bn": BatchNorm(16)}
    return Sequential(
        {
            "conv": Conv2d(3, 8, 3, padding=1, bias=False),
            "bn": BatchNorm(8),
            "relu": ReLU(),
            "max": MaxPool(3, 2, padding=1),
            "padded": Residual(first, PadChannels(3, 5)),
            "plain": Residual(second),
            "average": AveragePool(2, 2),
            "adaptive": AdaptiveAveragePool(3),
            "flatten": Flatten(),
            "hidden": Linear(144, 37),
            "relu2": ReLU(),
            "dropout": Dropout(0.3),
            "logits": Linear(37, 10),
        }
    )


def rounded(values: np.ndarray) -> np.ndarray:
    return bfloat16_values(bfloat16_bits(values)).reshape(values.shape).astype(values.dtype)


class Rounding(NumpyKernelSet):
    """Computes in float64 and rounds outputs and their gradients to bfloat16."""

    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        operator = super().make(spec, inputs, training=training, input_gradient=input_gradient)
        if isinstance(spec, FlattenSpec):
            return operator
        operator.forward = _then_round(operator.forward, lambda: [operator.buffers.output])
        operator.backward_input = _then_round(operator.backward_input, lambda: operator.buffers.input_grads)
        return operator

    def make_loss(self, spec: SoftmaxCrossEntropySpec) -> LossOperator:
        return RoundingLoss(spec)


class RoundingLoss(SoftmaxCrossEntropy):
    """Rounds the logits' gradient."""

    def run(self, logits: np.ndarray, labels: np.ndarray, global_count: int, d_logits: np.ndarray | None) -> LossSums:
        sums = super().run(logits, labels, global_count, d_logits)
        if d_logits is not None:
            d_logits[...] = rounded(d_logits)
        return sums


def _then_round(compute: Callable, arrays: Callable) -> Callable:
    def both(*arguments: object) -> None:
        compute(*arguments)
        for array in arrays():
            if array is not None:
                array[...] = rounded(array)

    return both


def gradients(kernels: KernelSet, dtype: str) -> dict[str, np.ndarray]:
    """Of all parameters after one batch; and the loss. Weights and images are numbers of bfloat16."""
    network = Network(model(), IMAGES, kernels, dtype=dtype, seed=1)
    arithmetic = kernels.arithmetic
    for parameter in network.parameters.values():
        arithmetic.from_host(parameter.data, rounded(arithmetic.to_host(parameter.data)))
    network.parameters_changed()
    program = network.program(len(LABELS), training=True)
    x = rounded(np.random.default_rng(0).standard_normal((len(LABELS), *IMAGES)).astype(np.float32))
    program.set_input(x.astype(network.parameter_dtype))
    program.forward(CONTEXT)
    loss = program.loss(LABELS, len(LABELS))
    program.backward()
    results = {name: np.array(arithmetic.to_host(parameter.grad)) for name, parameter in network.parameters.items()}
    return {**results, "loss": np.array(loss.result().loss)}


def distances(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """By parameter, relative to its gradient's norm."""
    return {name: float(np.linalg.norm(actual[name] - g) / np.linalg.norm(g)) for name, g in expected.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """NumPy's, in float64, but for gradients that are 0 and thus nothing but rounding: of a bias before a batch norm."""
    results = gradients(NumpyKernelSet(), "float64")
    largest = max(np.linalg.norm(g) for g in results.values())
    return {name: g for name, g in results.items() if np.linalg.norm(g) > 1e-12 * largest}


@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-10), ("float32", 1e-4)])
def test_gradients_are_those_of_numpy(
    cuda_kernels: CudaKernelsFactory, expected: dict[str, np.ndarray], precision: str, tolerance: float
) -> None:
    worst = distances(gradients(cuda_kernels(precision, seed=3), precision), expected)
    assert max(worst.values()) < tolerance, worst


def test_bfloat16_rounds_activations_and_little_else(cuda_kernels: CudaKernelsFactory, expected: dict[str, np.ndarray]) -> None:
    """Against float64 that rounds each activation and its gradient, itself 10 to 20 % away from float64 that does not. Behind the
    convolutions nothing differs; before them weights' gradients by their own rounding, and activations in few last places."""
    actual, possible = gradients(cuda_kernels("bfloat16"), "bfloat16"), gradients(Rounding(), "float64")
    distance = distances(actual, {name: possible[name] for name in expected})
    assert max(distance.values()) < 2.0**-7, distance
    linear = {name: value for name, value in distance.items() if name.startswith(("hidden", "logits", "loss"))}
    assert max(linear.values()) < 1e-6, linear
    assert min(distances(possible, expected)[name] for name in ("conv.weight", "padded.bn.bias", "hidden.weight")) > 0.1


def test_all_orders_give_the_same_bits(cuda_kernels: CudaKernelsFactory) -> None:
    first, *others = (gradients(cuda_kernels("bfloat16", seed=seed), "bfloat16") for seed in (0, 1, 2))
    for other in others:
        for name, gradient in first.items():
            np.testing.assert_array_equal(gradient, other[name], err_msg=name)
