"""The numerical gradient check: a layer's backward against central differences of its forward, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpctrain.backend.kernels.base import KernelSet, StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.nn.layer import Layer
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.network import Network

_CLASSES = 3
_STEP = 1e-5  # of the differences: truncation and rounding both stay below 1e-9 of the loss
_ELEMENTS = 24  # of each tensor that are checked one by one; a random direction covers them all


def check_gradients(
    layer: Layer,
    image_shape: tuple[int, int, int],
    *,
    batch: int = 3,
    seed: int = 0,
    tolerance: float = 2e-7,
    kernels: KernelSet | None = None,
) -> None:
    """Check the gradients of all of `layer`'s parameters and of its input, through a network of the layer, a linear head and
    the cross entropy.

    Each tensor's gradient is compared along a random direction, and at up to 24 random elements, relative to its largest element.

    Args:
        layer: under test. image_shape: (H, W, C) of its input. kernels: a float64 kernel set; NumPy's by default.

    Raises:
        AssertionError: a gradient that differs; the message names the tensor and gives both values.
    """
    random = np.random.default_rng(seed)
    network = head_network(layer, image_shape, kernels=kernels, seed=seed)
    for parameter in network.parameters.values():
        parameter.data += 0.1 * random.standard_normal(parameter.data.shape)
    program = network.program(batch, training=True, input_gradient=True)
    x = random.standard_normal((batch, *image_shape))
    labels = random.integers(0, _CLASSES, batch)
    context = StepContext(sample_ids=np.arange(batch), global_count=batch)

    def loss() -> float:
        program.x[...] = x
        network.parameters_changed()
        program.forward(context)
        return program.loss(labels, batch).loss / batch

    loss()
    program.backward()
    gradients = {name: (parameter.data, parameter.grad.copy()) for name, parameter in network.parameters.items()}
    assert program.x_grad is not None
    gradients["input"] = (x, program.x_grad.copy())
    for name, (values, gradient) in gradients.items():
        _check_tensor(name, values, gradient, loss, random, tolerance)


def head_network(
    layer: Layer, image_shape: tuple[int, int, int], *, kernels: KernelSet | None = None, dtype: str = "float64", seed: int = 0
) -> Network:
    """A network of `layer`, named "layer", and a linear classifier of three classes."""
    features = Sequential({"layer": layer, "flatten": Flatten()}).output(TensorSpec((1, *image_shape), dtype)).shape[1]
    model = Sequential({"layer": layer, "flatten": Flatten(), "head": Linear(features, _CLASSES)})
    return Network(model, image_shape, kernels or NumpyKernelSet(), dtype=dtype, seed=seed)


def _check_tensor(
    name: str,
    values: np.ndarray,
    gradient: np.ndarray,
    loss: Callable[[], float],
    random: np.random.Generator,
    tolerance: float,
) -> None:
    scale = float(np.abs(gradient).max(initial=1e-3))
    direction = random.standard_normal(values.shape)
    direction /= max(float(np.linalg.norm(direction)), 1.0)
    _compare(f"{name} along a direction", float((gradient * direction).sum()), values, direction, loss, scale * tolerance)
    for element in random.permutation(values.size)[:_ELEMENTS]:
        unit = np.zeros(values.shape)
        unit.flat[element] = 1.0
        place = np.unravel_index(element, values.shape)
        _compare(f"{name}[{place}]", float(gradient[place]), values, unit, loss, scale * tolerance)


def _compare(
    what: str, computed: float, values: np.ndarray, direction: np.ndarray, loss: Callable[[], float], tolerance: float
) -> None:
    kept = values.copy()
    values[...] = kept + _STEP * direction
    above = loss()
    values[...] = kept - _STEP * direction
    below = loss()
    values[...] = kept
    measured = (above - below) / (2.0 * _STEP)
    assert abs(computed - measured) <= tolerance, f"gradient of {what}: computed {computed:.12g}, measured {measured:.12g}"
