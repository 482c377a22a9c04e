"""The same models in PyTorch, and one training step of both on the same weights and batch.

The modules are written from torchvision's published structure, so that its names come out and a state dictionary of ours loads
strictly. Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain.backend.kernels.base import KernelSet, StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.models import catalogue, interchange
from hpctrain.nn.network import Network

# Channels of VGG-16's convolutions over those of the first one, in stages that end with a pool.
_VGG16 = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))


class _BasicBlock(nn.Module):  # type: ignore[misc]
    def __init__(self, inside: int, outside: int, stride: int, downsample: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = downsample

    def forward(self, x: Any) -> Any:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class _Bottleneck(nn.Module):  # type: ignore[misc]
    def __init__(self, inside: int, planes: int, stride: int, downsample: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, 4 * planes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * planes)
        self.downsample = downsample

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class _OptionA(nn.Module):  # type: ignore[misc]
    """Every second pixel, and as many channels of zeros on both sides as double them."""

    def forward(self, x: Any) -> Any:
        extra = x.shape[1] // 2
        return nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, extra, extra))


class _ResNet(nn.Module):  # type: ignore[misc]
    """Stem, stages "layer1" ..., mean over the image, "fc"."""

    def __init__(self, stem: int, pool: bool, stages: list[Any], classes: int, features: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, stem, 7, 2, 3, bias=False) if pool else nn.Conv2d(3, stem, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if pool else nn.Identity()
        self.stages = [f"layer{i + 1}" for i in range(len(stages))]
        for name, stage in zip(self.stages, stages, strict=True):
            self.add_module(name, stage)
        self.fc = nn.Linear(features, classes)

    def forward(self, x: Any) -> Any:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return self.fc(x.mean((2, 3)))


def _projection(inside: int, outside: int, stride: int) -> Any:
    return nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))


def _resnet18(classes: int, base: int) -> Any:
    stages, inside = [], base
    for planes in (base, 2 * base, 4 * base, 8 * base):
        stride = 1 if planes == base else 2
        first = _BasicBlock(inside, planes, stride, None if stride == 1 else _projection(inside, planes, stride))
        stages.append(nn.Sequential(first, _BasicBlock(planes, planes, 1, None)))
        inside = planes
    return _ResNet(base, True, stages, classes, 8 * base)


def _resnet50(classes: int, base: int) -> Any:
    stages, inside = [], base
    for planes, count in ((base, 3), (2 * base, 4), (4 * base, 6), (8 * base, 3)):
        stride = 1 if planes == base else 2
        first = _Bottleneck(inside, planes, stride, _projection(inside, 4 * planes, stride))
        stages.append(nn.Sequential(first, *(_Bottleneck(4 * planes, planes, 1, None) for _ in range(count - 1))))
        inside = 4 * planes
    return _ResNet(base, True, stages, classes, 32 * base)


def _resnet20(classes: int, base: int) -> Any:
    stages, inside = [], base
    for planes in (base, 2 * base, 4 * base):
        stride = 1 if planes == base else 2
        first = _BasicBlock(inside, planes, stride, None if stride == 1 else _OptionA())
        stages.append(nn.Sequential(first, *(_BasicBlock(planes, planes, 1, None) for _ in range(2))))
        inside = planes
    return _ResNet(base, False, stages, classes, 4 * base)


def _vgg16(classes: int, base: int) -> Any:
    layers: list[Any] = []
    channels = 3
    for stage in _VGG16:
        for factor in stage:
            layers += [nn.Conv2d(channels, factor * base, 3, padding=1), nn.ReLU()]
            channels = factor * base
        layers.append(nn.MaxPool2d(2, 2))
    model = nn.Sequential()
    model.add_module("features", nn.Sequential(*layers))
    model.add_module("avgpool", nn.AdaptiveAvgPool2d((7, 7)))
    model.add_module("flatten", nn.Flatten())
    hidden = 64 * base
    first = [nn.Linear(channels * 49, hidden), nn.ReLU(), nn.Dropout(0.0), nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.0)]
    model.add_module("classifier", nn.Sequential(*first, nn.Linear(hidden, classes)))
    return model


_MODULES: Mapping[str, Callable[[int, int], Any]] = {
    "vgg16": _vgg16,
    "resnet18": _resnet18,
    "resnet50": _resnet50,
    "resnet20": _resnet20,
}

MODELS = tuple(_MODULES)
_FIRST = {"vgg16": "features.0.weight"}  # the first convolution: its channels out set the width of all others


@dataclass(frozen=True)
class StepResult:
    """The results of one training step: the mean loss, and arrays by name in torchvision's layouts.

    arrays: "logits", "grad/..." for every parameter, "running/..." for every running statistic after the step, and
    "evaluation", the logits in evaluation mode with those statistics.
    """

    loss: float
    arrays: Mapping[str, np.ndarray] = field(repr=False)


@dataclass(frozen=True)
class Batch:
    """x: float32 (N, H, W, 3) standard normal; labels: int64 (N,)."""

    x: np.ndarray
    labels: np.ndarray


def make_batch(samples: int, pixels: int, classes: int, seed: int) -> Batch:
    """A batch of `pixels` x `pixels` images, the same for the same arguments."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((samples, pixels, pixels, 3), np.float32)
    return Batch(x, random.integers(0, classes, samples))


def make_network(
    name: str, pixels: int, options: Mapping[str, object], dtype: str, seed: int, kernels: KernelSet | None = None
) -> Network:
    """Our network with dropout off; weights are drawn in float32, so they are the same in both precisions."""
    off = {"dropout": 0.0} if "dropout" in catalogue.options(name) else {}
    model = catalogue.build(name, {**options, **off})
    return Network(model, (pixels, pixels, 3), kernels or NumpyKernelSet(), dtype=dtype, seed=seed)


def our_step(network: Network, batch: Batch) -> StepResult:
    """Forward, loss and backward in training mode, statistics moved, then logits in evaluation mode."""
    count = len(batch.labels)
    program = network.program(count, training=True)
    program.x[...] = batch.x
    arrays = {"logits": program.forward(_context(count, True)).copy()}
    loss = program.loss(batch.labels, count).loss / count
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


def torch_step(name: str, state: Mapping[str, np.ndarray], batch: Batch, dtype: str) -> StepResult:
    """The same in PyTorch, from weights `state` (as `interchange.export` gives them), in `dtype`.

    Raises:
        RuntimeError: torch's names or shapes differ from ours.
    """
    module = _module(name, state, dtype)
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
    """Relative L2 distance of every array, and of the loss, to the reference's.

    Raises:
        ValueError: the two do not hold the same names.
    """
    if result.arrays.keys() != reference.arrays.keys():
        raise ValueError(f"Names differ: {sorted(result.arrays.keys() ^ reference.arrays.keys())}.")
    found = {"loss": abs(result.loss - reference.loss) / abs(reference.loss)}
    for name, array in reference.arrays.items():
        wanted = array.astype(np.float64, copy=False)
        found[name] = float(np.linalg.norm(result.arrays[name] - wanted) / np.linalg.norm(wanted))
    return found


def gradient_median(*found: Mapping[str, float]) -> float:
    """Median distance over all gradients of one or more comparisons."""
    return median(distance for one in found for name, distance in one.items() if name.startswith("grad/"))


@dataclass(frozen=True)
class Comparison:
    """Distances of one model, batch and seed, all to torch's float64 step: ours in float64, ours and torch's in float32.

    Two float32 libraries round differently, now and then one of them to the other side of a ReLU's corner, and such a flip
    shows in every gradient below it. So float32 is judged by medians over tensors and seeds, against torch's own float32.
    """

    float64: Mapping[str, float]
    float32: Mapping[str, float]
    torch_float32: Mapping[str, float]

    @property
    def worst(self) -> tuple[float, str]:
        """Largest distance in float64, and whose it is."""
        return max((distance, name) for name, distance in self.float64.items())


def compare(
    name: str,
    *,
    pixels: int,
    samples: int,
    classes: int,
    seed: int,
    width: float = 1.0,
    kernels: KernelSet | None = None,
) -> Comparison:
    """Our step against torch's, in both precisions. `kernels` computes the float32 step; NumPy's by default."""
    options = {"classes": classes, "width": width}
    batch = make_batch(samples, pixels, classes, seed)
    network = make_network(name, pixels, options, "float64", seed)
    state = interchange.export(network)
    reference = torch_step(name, state, batch, "float64")
    double = distances(our_step(network, batch), reference)
    del network  # four copies of a large model are enough
    theirs = distances(torch_step(name, state, batch, "float32"), reference)
    del state
    single = make_network(name, pixels, options, "float32", seed, kernels)
    return Comparison(double, distances(our_step(single, batch), reference), theirs)


def _context(count: int, training: bool) -> StepContext:
    return StepContext(training=training, sample_ids=np.arange(count), global_count=count)


def _module(name: str, state: Mapping[str, np.ndarray], dtype: str) -> Any:
    """The module with our weights; built without memory first, since its own first values are not wanted."""
    classes = list(state.values())[-1].shape[0]  # the last layer's bias
    base = state[_FIRST.get(name, "conv1.weight")].shape[0]
    with torch.device("meta"):
        module = _MODULES[name](classes, base)
    counters = {key: torch.zeros((), dtype=torch.int64) for key in module.state_dict() if key.endswith("num_batches_tracked")}
    weights = {key: torch.from_numpy(array.astype(dtype)) for key, array in state.items()}
    module.load_state_dict(weights | counters, strict=True, assign=True)
    return module
