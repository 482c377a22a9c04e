"""Checks of layers and models: gradients of a layer against central differences in float64, and declarations of a model.

`check_gradients` puts a layer into a small network and compares the network's backward pass with differences of its forward pass.
`parameter_count` and `exported_shapes` read the declarations of a model without allocating its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import KernelSet, StepContext
from hpctrain.backend.specs import TensorSpec
from hpctrain.models.state_dict import declared_state
from hpctrain.nn.layers import Flatten, Layer, Linear, Sequential
from hpctrain.nn.network import Network


def parameter_count(model: Layer) -> int:
    """Return the number of trained values of a model."""
    return sum(math.prod(spec.shape) for _, layer in model.walk() for spec in layer.parameters().values())


def exported_shapes(model: Layer) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every parameter and running statistic in torchvision's layout, in a state dictionary's order."""
    return {name: entry.shape for name, entry in declared_state(model).items()}


_CLASSES = 3


def check_gradients(
    layer: Layer,
    image_shape: tuple[int, int, int],
    *,
    batch: int = 3,
    seed: int = 0,
    tolerance: float = 2e-7,
    step: float = 1e-5,
    elements: int = 24,
    kernels: KernelSet | None = None,
) -> None:
    """Check the gradients of a layer's parameters and input, in a network of the layer, a linear head and cross entropy.

    The gradient of each tensor is compared along a random direction and at random elements, relative to its largest element.

    Args:
        image_shape: shape (H, W, C) of its input.
        step: step of the differences. Deep networks need a smaller one, as a larger one may cross the kink of a ReLU.
        elements: maximum number of elements of each tensor that are checked.
        kernels: float64 kernel set; default: NumPy's.

    Raises:
        AssertionError: a gradient differs; the message names the tensor and both values.
    """
    random = np.random.default_rng(seed)
    network = head_network(layer, image_shape, kernels=kernels, seed=seed)
    for parameter in network.parameters.values():
        parameter.data[...] += 0.1 * random.standard_normal(parameter.data.shape)
    program = network.program(batch, training=True, input_gradient=True)
    x = random.standard_normal((batch, *image_shape))
    labels = random.integers(0, _CLASSES, batch)
    context = StepContext(sample_ids=np.arange(batch))

    def loss() -> float:
        program.x[...] = x
        network.parameters_changed()
        program.forward(context)
        return program.loss(labels, batch).result().loss / batch

    loss()
    program.backward()
    gradients = {name: (parameter.data, parameter.grad.copy()) for name, parameter in network.parameters.items()}
    assert program.x_grad is not None
    gradients["input"] = (x, program.x_grad.copy())
    for name, (values, gradient) in gradients.items():
        check = _GradientCheck(loss, step, tolerance * float(np.abs(gradient).max(initial=1e-3)))
        _check_tensor(check, name, values, gradient, random, elements)


def head_network(
    layer: Layer, image_shape: tuple[int, int, int], *, kernels: KernelSet | None = None, dtype: str = "float64", seed: int = 0
) -> Network:
    """Return a network of the layer, named "layer", and a linear classifier with three classes."""
    features = Sequential({"layer": layer, "flatten": Flatten()}).output(TensorSpec((1, *image_shape), dtype)).shape[1]
    model = Sequential({"layer": layer, "flatten": Flatten(), "head": Linear(features, _CLASSES)})
    return Network(model, image_shape, kernels or NumpyKernelSet(), dtype=dtype, seed=seed)


@dataclass(frozen=True)
class _GradientCheck:
    """Comparison of derivatives of `loss` with central differences of half-width `step`, to an absolute `tolerance`."""

    loss: Callable[[], float]
    step: float
    tolerance: float

    def __call__(self, what: str, computed: float, values: np.ndarray, direction: np.ndarray) -> None:
        kept = values.copy()
        values[...] = kept + self.step * direction
        above = self.loss()
        values[...] = kept - self.step * direction
        below = self.loss()
        values[...] = kept
        measured = (above - below) / (2.0 * self.step)
        message = f"gradient of {what}: computed {computed:.12g}, measured {measured:.12g}"
        assert abs(computed - measured) <= self.tolerance, message


def _check_tensor(
    check: _GradientCheck, name: str, values: np.ndarray, gradient: np.ndarray, random: np.random.Generator, elements: int
) -> None:
    direction = random.standard_normal(values.shape)
    direction /= max(float(np.linalg.norm(direction)), 1.0)
    check(f"{name} along a direction", float((gradient * direction).sum()), values, direction)
    for element in random.permutation(values.size)[:elements]:
        unit = np.zeros(values.shape)
        unit.flat[element] = 1.0
        place = tuple(int(i) for i in np.unravel_index(element, values.shape))
        check(f"{name}{list(place)}", float(gradient[place]), values, unit)
