"""The catalogue's networks for small images in PyTorch, which torchvision lacks, with the names of hpctrain's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

#: channels of the first convolution, channels of each stage, blocks per stage
_PREACTIVATION = {
    "preact_resnet18": (64, (64, 128, 256, 512), 2),
    "wrn_16_8": (16, (128, 256, 512), 2),
}


class BasicBlock(nn.Module):  # type: ignore[misc]
    """relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x)) (He et al. 2016)."""

    def __init__(self, inside: int, outside: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = downsample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, C, H, W) to (N, C', H', W')."""
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


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


def _resnet(stem: Sequence[tuple[str, nn.Module]], stages: Sequence[nn.Module], features: int, classes: int) -> nn.Module:
    numbered = [(f"layer{number}", stage) for number, stage in enumerate(stages, 1)]
    head = [("avgpool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("fc", nn.Linear(features, classes))]
    return _named(*stem, *numbered, *head)


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
            blocks.append(BasicBlock(channels, planes, 1 if same else 2, shortcut))
            channels = planes
        stages.append(nn.Sequential(*blocks))
    return _resnet(stem, stages, channels, classes)


def preact_resnet(stem: int, channels: Sequence[int], count: int, classes: int, width: float) -> nn.Module:
    """Build a pre-activation ResNet for images of 32 px, with `count` blocks per stage."""
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


def build(name: str, classes: int, width: float) -> nn.Module:
    """Build a network of the catalogue for images of 32 px."""
    if name in _PREACTIVATION:
        return preact_resnet(*_PREACTIVATION[name], classes, width)
    if name == "resnet20":
        return resnet_small(20, classes, width)
    return {"resnet9": resnet9, "vgg_small": vgg_small}[name](classes, width)
