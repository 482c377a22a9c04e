"""Every residual block of the shipped ResNets, forward and backward through a program, equals the float64 reference.

Where a value before a ReLU lies within rounding of zero, float32 and float64 may take different sides, and the gradient behind it
is then another one: that is no error of a kernel. Each block is therefore compared at the first seed for which no value before
any ReLU of the reference is nearer to zero than `MARGIN`, some ten times the rounding of values of order one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hpctrain.backend.kernels.base import KernelSet, Operator, StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import ReluSpec, Spec, TensorSpec
from hpctrain.models import catalogue
from hpctrain.nn.layer import Layer
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.residual import Residual
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.network import Network
from tests.support.kernel_pairs import difference

MARGIN = 3e-6
SEEDS = range(30)
N, H, W = 2, 7, 5


def blocks() -> Iterator[tuple[str, Layer, int]]:
    """(name, block, channels in) of all residual blocks."""
    for model in ("resnet18", "resnet50", "resnet20"):
        for name, layer in catalogue.build(model, {}).walk():
            if isinstance(layer, Residual):
                yield f"{model}.{name}", layer, _channels_in(layer)


def _channels_in(block: Residual) -> int:
    first = next(iter(block.children().values()))
    return first.parameters()["weight"].shape[-1]


class Watching(NumpyKernelSet):
    """The reference, which notes how near to zero the inputs of its ReLUs come."""

    def __init__(self) -> None:
        super().__init__()
        self.nearest = np.inf

    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        operator = super().make(spec, inputs, training=training, input_gradient=input_gradient)
        if isinstance(spec, ReluSpec):
            forward = operator.forward

            def watched(context: StepContext) -> None:
                self.nearest = min(self.nearest, float(np.abs(operator.buffers.inputs[0]).min()))
                forward(context)

            operator.forward = watched
        return operator


def results(block: Layer, channels: int, kernels: KernelSet, dtype: str, seed: int) -> dict[str, np.ndarray]:
    """Output, batch statistics, gradient of the input and of all parameters."""
    network = Network(Sequential({"block": block, "flatten": Flatten()}), (H, W, channels), kernels, dtype=dtype)
    random = np.random.default_rng(seed)
    for parameter in network.parameters.values():
        noise = random.standard_normal(parameter.data.shape)
        parameter.data[...] = noise * np.abs(parameter.data).std() if parameter.data.ndim > 1 else 1 + 0.3 * noise
    program = network.program(N, training=True, input_gradient=True)
    program.x[...] = random.standard_normal(program.x.shape)
    found = {"output": np.array(program.forward(StepContext(global_count=N)))}
    program.d_logits[...] = random.standard_normal(program.d_logits.shape)
    program.backward()
    found["d input"] = np.array(program.x_grad)
    found |= {f"d {name}": np.array(parameter.grad) for name, parameter in network.parameters.items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("block", "channels"), [pytest.param(b, c, id=name) for name, b, c in blocks()])
def test_equals_the_reference(onednn: KernelSet, block: Layer, channels: int) -> None:
    for seed in SEEDS:
        watching = Watching()
        wanted = results(block, channels, watching, "float64", seed)
        if watching.nearest > MARGIN:
            break
    else:
        pytest.fail("no seed keeps the ReLUs away from zero")
    found = results(block, channels, onednn, "float32", seed)
    for name, array in wanted.items():
        assert difference(found[name], array) <= 1e-4, f"{name}: {difference(found[name], array):.2e}"
