"""The catalogue's networks in PyTorch, with torchvision's names, for comparisons of speed and results with PyTorch.

The module runs in any Python with PyTorch, with or without hpctrain, and therefore imports nothing from hpctrain.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

_VGG = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_RESNET = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


#: wide ResNets and ResNeXts: depth, groups, channels per group in the first stage
_BOTTLENECKS = {
    "wide_resnet50_2": (50, 1, 128),
    "wide_resnet101_2": (101, 1, 128),
    "resnext50_32x4d": (50, 32, 4),
    "resnext101_32x8d": (101, 32, 8),
    "resnext101_64x4d": (101, 64, 4),
}
#: channels of the first convolution, channels of each stage, blocks per stage
_PREACTIVATION = {
    "preact_resnet18": (64, (64, 128, 256, 512), 2),
    "wrn_16_8": (16, (128, 256, 512), 2),
    "wrn_28_10": (16, (160, 320, 640), 4),
}


class ResidualBlock(nn.Module):  # type: ignore[misc]
    """relu(convolutions(x) + shortcut(x)), with batch norm after each convolution.

    Args:
        channels: number of channels of the input and of each convolution's output.
        kernels: kernel size of each convolution.
        strides: stride of each convolution.
        downsample: shortcut; None: the identity.
        groups: number of groups of each convolution of more than one pixel.
    """

    def __init__(
        self,
        channels: Sequence[int],
        kernels: Sequence[int],
        strides: Sequence[int],
        downsample: nn.Module | None,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self._pairs: list[tuple[nn.Module, nn.Module]] = []  # plain references, because lookups of modules by name take time
        for number, ((inside, outside), kernel, stride) in enumerate(zip(pairwise(channels), kernels, strides, strict=True), 1):
            split = groups if kernel > 1 else 1
            conv = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=split, bias=False)
            norm = nn.BatchNorm2d(outside)
            self.add_module(f"conv{number}", conv)
            self.add_module(f"bn{number}", norm)
            self._pairs.append((conv, norm))
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, C, H, W) to (N, C', H', W')."""
        *first, (last_conv, last_norm) = self._pairs
        y = x
        for conv, norm in first:
            y = self.relu(norm(conv(y)))
        return self.relu(last_norm(last_conv(y)) + (x if self.downsample is None else self.downsample(x)))


class PreactivationBlock(nn.Module):  # type: ignore[misc]
    """conv2(relu(bn2(conv1(a)))) + shortcut, with a = relu(bn1(x)) (He et al. 2016b; Zagoruyko and Komodakis 2016).

    The shortcut is a 1x1 convolution of a if the shape changes, a itself in the network's first block, and otherwise x.
    The names of parameters and statistics are bn1, conv1, bn2, conv2 and downsample.
    """

    def __init__(self, inside: int, outside: int, stride: int, *, first: bool) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inside)
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        changes = stride > 1 or inside != outside
        self.downsample = nn.Conv2d(inside, outside, 1, stride, bias=False) if changes else None
        self.shares = first or changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, C, H, W) to (N, C', H', W')."""
        a = self.relu(self.bn1(x))
        y = self.relu(self.bn2(self.conv1(a)))
        shortcut = a if self.shares else x
        return self.conv2(y) + (shortcut if self.downsample is None else self.downsample(shortcut))


class ZeroPadShortcut(nn.Module):  # type: ignore[misc]
    """Shortcut that takes every second pixel and pads the channels with zeros on both sides to twice their number.

    He et al. 2016, option A.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, C, H, W) to (N, 2 C, ceil(H / 2), ceil(W / 2))."""
        half = x.shape[1] // 2
        return nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, half))


def scaled(channels: int, width: float) -> int:
    """Return the number of channels multiplied by the width factor and rounded; at least 1."""
    return max(1, round(channels * width))


def _named(*layers: tuple[str, nn.Module]) -> nn.Module:
    model = nn.Sequential()
    for name, layer in layers:
        model.add_module(name, layer)
    return model


def _projection(inside: int, outside: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))


def _resnet(stem: Sequence[tuple[str, nn.Module]], stages: Sequence[nn.Module], features: int, classes: int) -> nn.Module:
    numbered = [(f"layer{number}", stage) for number, stage in enumerate(stages, 1)]
    head = [("avgpool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("fc", nn.Linear(features, classes))]
    return _named(*stem, *numbered, *head)


def resnet(depth: int, classes: int, width: float, groups: int = 1, width_per_group: int = 64) -> nn.Module:
    """Build a ResNet for large images (He et al. 2016, table 1), a wide ResNet or a ResNeXt (Xie et al. 2017).

    As in ResNet v1.5, the 3x3 convolution of a bottleneck has the stride.
    """
    channels = scaled(64, width)
    stem = [("conv1", nn.Conv2d(3, channels, 7, 2, 3, bias=False)), ("bn1", nn.BatchNorm2d(channels))]
    stem += [("relu", nn.ReLU(inplace=True)), ("maxpool", nn.MaxPool2d(3, 2, 1))]
    stages = []
    for stage, (count, published) in enumerate(zip(_RESNET[depth], (64, 128, 256, 512), strict=True)):
        planes = scaled(published, width)
        outside = 4 * planes if depth >= 50 else planes
        blocks = []
        for number in range(count):
            stride = 2 if stage and not number else 1
            same = channels == outside and stride == 1
            downsample = None if same else _projection(channels, outside, stride)
            if depth >= 50:
                middle = max(1, planes * width_per_group // 64) * groups
                sizes = (channels, middle, middle, outside)
                blocks.append(ResidualBlock(sizes, (1, 3, 1), (1, stride, 1), downsample, groups))
            else:
                blocks.append(ResidualBlock((channels, planes, outside), (3, 3), (stride, 1), downsample))
            channels = outside
        stages.append(nn.Sequential(*blocks))
    return _resnet(stem, stages, channels, classes)


def resnet_small(depth: int, classes: int, width: float) -> nn.Module:
    """Build a ResNet for images of 32 px (He et al. 2016, section 4.2)."""
    channels = scaled(16, width)
    stem = [("conv1", nn.Conv2d(3, channels, 3, 1, 1, bias=False)), ("bn1", nn.BatchNorm2d(channels))]
    stem.append(("relu", nn.ReLU(inplace=True)))
    stages = []
    for planes in (channels, 2 * channels, 4 * channels):
        blocks = []
        for _ in range((depth - 2) // 6):
            same = planes == channels
            shortcut = None if same else ZeroPadShortcut()
            blocks.append(ResidualBlock((channels, planes, planes), (3, 3), (1 if same else 2, 1), shortcut))
            channels = planes
        stages.append(nn.Sequential(*blocks))
    return _resnet(stem, stages, channels, classes)


def preact_resnet(stem: int, channels: Sequence[int], count: int, classes: int, width: float) -> nn.Module:
    """Build a pre-activation ResNet for images of 32 px, with `count` blocks per stage.

    Args:
        stem: number of output channels of the first convolution.
        channels: number of output channels of each stage.
        count: number of blocks of each stage.
        classes: number of classes.
        width: factor of the numbers of channels.
    """
    inside = scaled(stem, width)
    first = ("conv1", nn.Conv2d(3, inside, 3, 1, 1, bias=False))
    stages = []
    for stage, published in enumerate(channels):
        outside = scaled(published, width)
        blocks = []
        for block in range(count):
            stride = 2 if stage and not block else 1
            blocks.append(PreactivationBlock(inside, outside, stride, first=not stage and not block))
            inside = outside
        stages.append((f"layer{stage + 1}", nn.Sequential(*blocks)))
    last = [("bn", nn.BatchNorm2d(inside)), ("relu", nn.ReLU(inplace=True)), ("avgpool", nn.AdaptiveAvgPool2d(1))]
    return _named(first, *stages, *last, ("flatten", nn.Flatten()), ("fc", nn.Linear(inside, classes)))


class PlainSum(nn.Sequential):  # type: ignore[misc]
    """x + layers(x), without an activation after the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, C, H, W) to the same shape."""
        return x + super().forward(x)


def resnet9(classes: int, width: float) -> nn.Module:
    """Build a ResNet-9 for images of 32 px (Page 2018), with average pooling instead of the last max pooling."""
    stages: list[tuple[str, nn.Module]] = []
    inside = 3
    for number, published in enumerate((64, 128, 256, 512)):
        outside = scaled(published, width)
        layers = [("conv", nn.Conv2d(inside, outside, 3, padding=1, bias=False)), ("bn", nn.BatchNorm2d(outside))]
        layers.append(("relu", nn.ReLU(inplace=True)))
        if number:
            layers.append(("pool", nn.MaxPool2d(2)))
        if number % 2:
            block = PlainSum()
            for convolution in (1, 2):
                block.add_module(f"conv{convolution}", nn.Conv2d(outside, outside, 3, padding=1, bias=False))
                block.add_module(f"bn{convolution}", nn.BatchNorm2d(outside))
                block.add_module(f"relu{convolution}", nn.ReLU(inplace=True))
            layers.append(("block", block))
        stages.append((f"layer{number}", _named(*layers)))
        inside = outside
    return _named(*stages, ("avgpool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("fc", nn.Linear(inside, classes)))


def vgg_small(classes: int, width: float) -> nn.Module:
    """Build the VGG for images of 32 px after Jordan (2024), with ReLU and average pooling as hpctrain's model has them."""
    filters = 2 * 2 * 2 * 3
    layers: list[tuple[str, nn.Module]] = [("pad", nn.ZeroPad2d((0, 1, 0, 1))), ("whiten", nn.Conv2d(3, filters, 2, bias=False))]
    layers.append(("relu", nn.ReLU(inplace=True)))
    inside = filters
    for number, published in enumerate((64, 256, 256), 1):
        outside = scaled(published, width)
        stage = [("conv1", nn.Conv2d(inside, outside, 3, padding=1, bias=False)), ("pool", nn.MaxPool2d(2))]
        stage += [("bn1", nn.BatchNorm2d(outside)), ("relu1", nn.ReLU(inplace=True))]
        stage.append(("conv2", nn.Conv2d(outside, outside, 3, padding=1, bias=False)))
        stage += [("bn2", nn.BatchNorm2d(outside)), ("relu2", nn.ReLU(inplace=True))]
        layers.append((f"layer{number}", _named(*stage)))
        inside = outside
    return _named(*layers, ("avgpool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("fc", nn.Linear(inside, classes)))


def vgg(depth: int, classes: int, width: float, dropout: float) -> nn.Module:
    """Build a VGG without batch norm (Simonyan and Zisserman 2015, table 1)."""
    layers: list[nn.Module] = []
    inside = 3
    for count, published in zip(_VGG[depth], (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            outside = scaled(published, width)
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(inplace=True)]
            inside = outside
        layers.append(nn.MaxPool2d(2))
    hidden = scaled(4096, width)
    classifier = [nn.Linear(inside * 49, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout)]
    classifier += [nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(hidden, classes)]
    features = [("features", nn.Sequential(*layers)), ("avgpool", nn.AdaptiveAvgPool2d(7)), ("flatten", nn.Flatten())]
    return _named(*features, ("classifier", nn.Sequential(*classifier)))


def small(classes: int) -> nn.Module:
    """Build the network of the quickstart: two stages, for images of 28 px with one channel."""
    layers: list[nn.Module] = []
    inside = 1
    for outside in (16, 32):
        layers += [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside)]
        layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        inside = outside
    classifier = [nn.Linear(inside * 49, 128), nn.ReLU(inplace=True), nn.Linear(128, classes)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *classifier)


def build(name: str, *, classes: int | None = None, width: float = 1.0, dropout: float = 0.5) -> tuple[nn.Module, int, int]:
    """Return (network, number of input channels, number of classes) of a model of the catalogue.

    Args:
        name: name of the model.
        classes: number of classes; None: as published.
        width: factor of the numbers of channels.
        dropout: dropout probability of VGG.

    Raises:
        ValueError: the model has no counterpart in this module.
    """
    if name in _PREACTIVATION:
        stem, channels, count = _PREACTIVATION[name]
        return preact_resnet(stem, channels, count, classes or 10, width), 3, classes or 10
    if name in _BOTTLENECKS:
        depth, groups, width_per_group = _BOTTLENECKS[name]
        return resnet(depth, classes or 1000, width, groups, width_per_group), 3, classes or 1000
    family = name.rstrip("0123456789")
    depth = int(name[len(family) :] or 0)
    if name == "small":
        return small(classes or 10), 1, classes or 10
    if name == "resnet9":
        return resnet9(classes or 10, width), 3, classes or 10
    if name == "vgg_small":
        return vgg_small(classes or 10, width), 3, classes or 10
    if family == "vgg" and depth in _VGG:
        return vgg(depth, classes or 1000, width, dropout), 3, classes or 1000
    if family == "resnet" and depth in _RESNET:
        return resnet(depth, classes or 1000, width), 3, classes or 1000
    if family == "resnet" and depth % 6 == 2:
        return resnet_small(depth, classes or 10, width), 3, classes or 10
    raise ValueError(
        f"{name} has no counterpart in PyTorch; use small, vgg11 to vgg19, vgg_small, resnet9, resnet18 to resnet152, resnet20 "
        f"to resnet110, or one of {', '.join([*_BOTTLENECKS, *_PREACTIVATION])}."
    )
