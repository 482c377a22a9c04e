"""The cuda set as a whole: operators of every model, and networks whose gradients and trainings are NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.cuda.device import ConvolutionKey, Precision
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.numpy.classifier import SoftmaxCrossEntropy
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import AnyArrays, KernelSet, LossOperator, LossSums, Operator, StepContext, ViewOperator
from hpctrain.backend.specs import FlattenSpec, SoftmaxCrossEntropySpec, Spec, TensorSpec
from hpctrain.core.errors import BackendError
from hpctrain.models import catalogue
from hpctrain.nn.compile.steps import make_steps
from hpctrain.nn.layers import (
    AdaptiveAveragePool,
    AveragePool,
    BatchNorm,
    Conv2d,
    Dropout,
    Flatten,
    Layer,
    Linear,
    MaxPool,
    PadChannels,
    ReLU,
    Residual,
    Sequential,
)
from hpctrain.nn.network import Lowering, Network
from hpctrain.optim.optimizers import Sgd
from hpctrain.testing.operators import put, take
from hpctrain_testing.virtual.run import lone_rank
from tests.backend.numpy.test_elementwise_and_kernel_set import Strange
from tests.support import nets
from tests.support.emulated import CudaKernelsFactory
from tests.support.rounded import assert_same_bits, rounded
from tests.support.training import Result, Task, assert_same_training, train


def test_an_unknown_operation_is_refused_by_name(cuda_kernels: CudaKernelsFactory) -> None:
    with pytest.raises(BackendError, match="no operator for Strange"):
        cuda_kernels().make(Strange(), (TensorSpec((2, 3)),), training=True)


def step(kernels: KernelSet, *, synchronised: bool) -> tuple[list[np.ndarray], set[str]]:
    """Logits and gradients of a residual network in float64, and the kinds of its operators."""
    network = Network(nets.residual(synchronised=synchronised), (9, 7, 3), kernels, dtype="float64")
    program = network.program(2, training=True)
    random = np.random.default_rng(0)
    put(kernels, program.x, random.standard_normal(program.x.shape))
    values = [take(kernels, program.forward(StepContext()))]
    put(kernels, program.d_logits, random.standard_normal(program.d_logits.shape))
    program.backward()
    values += [take(kernels, parameter.grad) for parameter in network.parameters.values()]
    return values, {type(planned.operator).__name__ for planned in program.plan.steps}


@pytest.mark.parametrize("synchronised", [False, True])
def test_a_fused_network_equals_numpys(cuda_kernels: CudaKernelsFactory, synchronised: bool) -> None:
    """Every ReLU joins the batch norm or the sum before it, but for batch norms that may have to merge their statistics."""
    values, kinds = step(cuda_kernels(seed=2), synchronised=synchronised)
    assert ("CudaRelu" in kinds) == ("CudaAdd" in kinds) == synchronised
    for value, expected in zip(values, step(NumpyKernelSet(), synchronised=synchronised)[0], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-10, atol=1e-10 * float(np.abs(expected).max()))


BATCH = 32


@dataclass(frozen=True)
class UnplannedConvolution:
    """Stands for a plan, which costs more than all else in here; `make gpu-plans` makes these."""

    key: ConvolutionKey
    workspace_bytes: int = 1000


def kernels_without_plans(cuda_kernels: CudaKernelsFactory, precision: Precision) -> CudaKernelSet:
    kernels = cuda_kernels(precision)
    kernels.runtime.device.convolution = UnplannedConvolution
    return kernels


@pytest.mark.slow
@pytest.mark.parametrize("name", catalogue.names())
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_layer_has_an_operator(cuda_kernels: CudaKernelsFactory, name: str, precision: Precision) -> None:
    kernels = kernels_without_plans(cuda_kernels, precision)
    model = catalogue.build(name, catalogue.options(name))
    graph = Lowering(model, dtype=kernels.runtime.dtype).graph(BATCH, catalogue.image_shape(name))
    for training in (False, True):
        steps = make_steps(kernels.fuse(graph, training=training), kernels, training=training, input_gradient=False)
        for step in steps.steps:
            operator, shapes = step.operator, [steps.tensors[tensor] for tensor in step.inputs]
            assert operator.output == operator.spec.output(*shapes), step.name
            assert operator.output.dtype == kernels.runtime.dtype
            assert list(operator.inputs) == shapes, "the set has one layout"
            assert operator.saved_bytes == 0 or training, f"{step.name} keeps memory for a backward pass that never comes"
            assert isinstance(operator, AnyArrays | ViewOperator) or type(operator).__module__.startswith(
                "hpctrain.backend.cuda."
            )


def _model(name: str, **options: object) -> Callable[[], Layer]:
    return lambda: catalogue.build(name, options)


TASKS = {
    "resnet20": Task(_model("resnet20"), NumpyKernelSet(), Sgd, (32, 32, 3), 10, samples=19, batch=4, steps=5),
    "resnet18": Task(
        _model("resnet18", width=0.125, classes=7), NumpyKernelSet(), Sgd, (48, 48, 3), 7, samples=13, batch=3, steps=5
    ),
    "vgg11_bn": Task(
        _model("vgg11_bn", width=0.0625, classes=6), NumpyKernelSet(), Sgd, (32, 32, 3), 6, samples=13, batch=3, steps=5
    ),
}


def _trained(task: Task, kernels: KernelSet) -> Result:
    return train(replace(task, kernels=kernels), *lone_rank(), Blocking, keep_gradients=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_five_steps_are_those_of_numpy(cuda_kernels: CudaKernelsFactory, name: str) -> None:
    result, expected = (_trained(TASKS[name], kernels) for kernels in (cuda_kernels("float64", 1), NumpyKernelSet()))
    assert_same_training(result, expected)
    assert_same_training(Result(result.gradients, {}), Result(expected.gradients, {}))


IMAGES = (17, 15, 3)

LABELS = np.array([3, 1, 4, 1, 5, 9, 2])

CONTEXT = StepContext(sample_ids=np.arange(len(LABELS)))


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

    def run(
        self,
        logits: np.ndarray,
        labels: np.ndarray,
        global_count: int,
        d_logits: np.ndarray | None,
        class_scale: float | None = None,
    ) -> LossSums:
        sums = super().run(logits, labels, global_count, d_logits, class_scale)
        if d_logits is not None:
            d_logits[...] = rounded(d_logits, "bfloat16")
        return sums


def _then_round(compute: Callable, arrays: Callable) -> Callable:
    def both(*arguments: object) -> None:
        compute(*arguments)
        for array in arrays():
            if array is not None:
                array[...] = rounded(array, "bfloat16")

    return both


def gradients(kernels: KernelSet, dtype: str) -> dict[str, np.ndarray]:
    """Of all parameters after one batch; and the loss. Weights and images are numbers of bfloat16."""
    network = Network(model(), IMAGES, kernels, dtype=dtype, seed=1)
    arithmetic = kernels.arithmetic
    for parameter in network.parameters.values():
        arithmetic.from_host(parameter.data, rounded(arithmetic.to_host(parameter.data), "bfloat16"))
    network.parameters_changed()
    program = network.program(len(LABELS), training=True)
    x = rounded(np.random.default_rng(0).standard_normal((len(LABELS), *IMAGES)), "bfloat16")
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
    """Against float64 that rounds each activation and its gradient, itself 10 to 20 % away from float64 that does not. After the
    convolutions nothing differs; before them weights' gradients by their own rounding, and activations in few last places."""
    actual, possible = gradients(cuda_kernels("bfloat16"), "bfloat16"), gradients(Rounding(), "float64")
    distance = distances(actual, {name: possible[name] for name in expected})
    assert max(distance.values()) < 2.0**-7, distance
    linear = {name: value for name, value in distance.items() if name.startswith(("hidden", "logits", "loss"))}
    assert max(linear.values()) < 1e-6, linear
    assert min(distances(possible, expected)[name] for name in ("conv.weight", "padded.bn.bias", "hidden.weight")) > 0.1


def test_all_orders_give_the_same_bits(cuda_kernels: CudaKernelsFactory) -> None:
    assert_same_bits([list(gradients(cuda_kernels("bfloat16", seed=seed), "bfloat16").values()) for seed in range(3)])
