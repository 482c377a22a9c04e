"""hpctrain's models in PyTorch, and one training step of both on the same weights and batch.

A state dictionary of hpctrain loads strictly into the modules: torchvision's models and, for small images, those of
`torch_networks`. Importing this module imports torch and torchvision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import KernelSet, StepContext
from hpctrain.models import catalogue
from hpctrain.models.state_dict import export
from hpctrain.nn.network import Network
from hpctrain_testing import torch_networks, torchvision_models

MODELS = ("vgg16", "resnet18", "resnet50", "resnet20", "resnet9", "resnext50_32x4d", "preact_resnet18", "wrn_16_8", "vgg_small")


@dataclass(frozen=True)
class StepResult:
    """The results of one training step: the mean loss, and arrays by name in torchvision's layouts.

    Attributes:
        arrays: "logits", "grad/..." for every parameter, "running/..." for every running statistic after the step, and
            "evaluation", the logits in evaluation mode with these statistics.
    """

    loss: float
    arrays: Mapping[str, np.ndarray] = field(repr=False)


@dataclass(frozen=True)
class Batch:
    """A batch.

    Attributes:
        x: images, float32 (N, H, W, 3), standard normal.
        labels: labels, int64 (N,).
    """

    x: np.ndarray
    labels: np.ndarray


def make_batch(samples: int, pixels: int, classes: int, seed: int) -> Batch:
    """Return a batch of `pixels` x `pixels` images, determined by the arguments."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((samples, pixels, pixels, 3), np.float32)
    return Batch(x, random.integers(0, classes, samples))


def make_network(
    name: str, pixels: int, options: Mapping[str, object], dtype: str, seed: int, kernels: KernelSet | None = None
) -> Network:
    """Return hpctrain's network without dropout. Weights are rounded to float32, so they are equal in both precisions.

    Noise is added to the initial weights. Without it, some gradients would consist of rounding errors only, for example that of a
    batch norm whose output reaches the next batch norm through a convolution that is the identity.
    """
    off = {"dropout": 0.0} if "dropout" in catalogue.options(name) else {}
    model = catalogue.build(name, {**options, **off})
    network = Network(model, (pixels, pixels, 3), kernels or NumpyKernelSet(), dtype=dtype, seed=seed)
    random = np.random.default_rng(seed)
    for parameter in network.parameters.values():
        initial = parameter.data.astype(np.float64)
        noise = random.standard_normal(initial.shape) * (0.1 * (initial.std() or 1.0))
        parameter.data[...] = (initial + noise).astype(np.float32)
    return network


def our_step(network: Network, batch: Batch) -> StepResult:
    """Run forward, loss and backward in training mode, update running statistics, and compute logits in evaluation mode."""
    count = len(batch.labels)
    program = network.program(count, training=True)
    program.x[...] = batch.x
    arrays = {"logits": program.forward(_context(count, True)).copy()}
    loss = program.loss(batch.labels, count).result().loss / count
    program.backward()
    for name, parameter in network.parameters.items():
        arrays[f"grad/{name}"] = parameter.spec.interchange.export(parameter.grad)
    statistics = network.statistics
    statistics.blend(count * statistics.batch.astype(np.float64), count)
    arrays |= {f"running/{name}": view.copy() for name, view in statistics.views.items()}
    evaluation = network.program(count, training=False)
    evaluation.x[...] = batch.x
    arrays["evaluation"] = evaluation.forward(_context(count, False)).copy()
    return StepResult(loss, arrays)


def torch_step(name: str, width: float, state: Mapping[str, np.ndarray], batch: Batch, dtype: str) -> StepResult:
    """Run the same step in PyTorch, from the weights `state` (as `hpctrain.models.state_dict.export` returns them), in `dtype`.

    Raises:
        RuntimeError: names or shapes of torch and hpctrain differ.
    """
    module = torch_module(name, width, state, dtype)
    x = torch.from_numpy(np.ascontiguousarray(batch.x.transpose(0, 3, 1, 2)).astype(dtype))
    module.train()
    logits = module(x)
    loss = nn.functional.cross_entropy(logits, torch.from_numpy(batch.labels))
    loss.backward()
    arrays = {"logits": logits.detach().numpy()}
    arrays |= {f"grad/{key}": parameter.grad.numpy() for key, parameter in module.named_parameters()}
    arrays |= {f"running/{key}": buffer.numpy().copy() for key, buffer in module.named_buffers() if "running" in key}
    module.eval()
    with torch.no_grad():
        arrays["evaluation"] = module(x).numpy()
    return StepResult(float(loss.detach()), arrays)


def distances(result: StepResult, reference: StepResult) -> dict[str, float]:
    """Return the relative L2 distance of every array, and of the loss, from the reference.

    Raises:
        ValueError: the names of the arrays differ.
    """
    if result.arrays.keys() != reference.arrays.keys():
        raise ValueError(f"Names differ: {sorted(result.arrays.keys() ^ reference.arrays.keys())}.")
    found = {"loss": abs(result.loss - reference.loss) / abs(reference.loss)}
    for name, array in reference.arrays.items():
        wanted = array.astype(np.float64, copy=False)
        found[name] = float(np.linalg.norm(result.arrays[name] - wanted) / np.linalg.norm(wanted))
    return found


def gradient_median(*found: Mapping[str, float]) -> float:
    """Return the median distance over all gradients of one or more comparisons."""
    return median(distance for one in found for name, distance in one.items() if name.startswith("grad/"))


@dataclass(frozen=True)
class Comparison:
    """Distances for one model, batch and seed from torch's float64 step: hpctrain in float64, hpctrain and torch in float32.

    Two float32 libraries round differently. Occasionally one of them rounds to the other side of a ReLU's kink, which changes
    every gradient of the layers below. So float32 is judged by medians over tensors and seeds, compared with torch's own float32.
    """

    float64: Mapping[str, float]
    float32: Mapping[str, float]
    torch_float32: Mapping[str, float]

    @property
    def worst(self) -> tuple[float, str]:
        """Return the largest distance in float64, and the name of its array."""
        return max((distance, name) for name, distance in self.float64.items())


def compare(
    name: str, *, pixels: int, samples: int, classes: int, seed: int, width: float = 1.0, kernels: KernelSet | None = None
) -> Comparison:
    """Return the distances of hpctrain's step from torch's, in both precisions.

    Args:
        kernels: kernel set of the float32 step; default: NumPy's.
    """
    options = {"classes": classes, "width": width}
    batch = make_batch(samples, pixels, classes, seed)
    network = make_network(name, pixels, options, "float64", seed)
    state = export(network)
    reference = torch_step(name, width, state, batch, "float64")
    double = distances(our_step(network, batch), reference)
    del network  # four copies of a large model are enough
    theirs = distances(torch_step(name, width, state, batch, "float32"), reference)
    del state
    single = make_network(name, pixels, options, "float32", seed, kernels)
    return Comparison(double, distances(our_step(single, batch), reference), theirs)


def _context(count: int, training: bool) -> StepContext:
    return StepContext(training=training, sample_ids=np.arange(count))


def torch_module(name: str, width: float, state: Mapping[str, np.ndarray], dtype: str) -> Any:
    """Return the module in PyTorch with hpctrain's weights. Its initial values are not used, so it is first built without memory.

    torchvision's ResNets have the published width only.
    """
    classes = list(state.values())[-1].shape[0]  # the last layer's bias
    with torch.device("meta"):
        if name == "vgg16":
            module = torchvision_models.narrow_vgg(name, classes, width)
        elif name in torchvision_models.NAMES:
            module = torchvision_models.models.get_model(torchvision_models.NAMES[name], num_classes=classes)
        else:
            module = torch_networks.build(name, classes, width)
    counters = {key: torch.zeros((), dtype=torch.int64) for key in module.state_dict() if key.endswith("num_batches_tracked")}
    weights = {key: torch.from_numpy(array.astype(dtype)) for key, array in state.items()}
    module.load_state_dict(weights | counters, strict=True, assign=True)
    return module
