"""Whole training steps of PyTorch, as a process that steps when it is told to: what the engine's benchmarks compare with.

Runs in any Python with PyTorch, with or without hpctrain: a file of its own, started by its path. Reads JSON lines and answers
with JSON lines, as `interleaved.py` says. The networks are those of the catalogue.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from typing import Any

import torch
from torch import nn

_VGG = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_RESNET = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_BATCHES = 3
_LEARNING_RATE, _MOMENTUM = 1e-4, 0.9


class Block(nn.Module):  # type: ignore[misc]
    """relu(body(x) + shortcut(x)); the shortcut may be nothing at all."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None) -> None:
        super().__init__()
        self.body, self.shortcut, self.relu = body, shortcut, nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.body(x) + (x if self.shortcut is None else self.shortcut(x)))


class Padding(nn.Module):  # type: ignore[misc]
    """Every second pixel, between as many channels of zeros as double them (He et al. 2016, option A)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        return nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, half, half))


def block(inside: int, sizes: list[tuple[int, int, int]], shortcut: nn.Module | None) -> nn.Module:
    """A residual block of convolutions (kernel, stride, channels out), each with batch norm."""
    layers: list[nn.Module] = []
    for kernel, stride, outside in sizes:
        layers += [nn.Conv2d(inside, outside, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outside)]
        layers.append(nn.ReLU(inplace=True))
        inside = outside
    return Block(nn.Sequential(*layers[:-1]), shortcut)


def projection(inside: int, outside: int, stride: int) -> nn.Module:
    """A shortcut that changes size and channels."""
    return nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))


def resnet(depth: int, classes: int) -> nn.Module:
    """For large images (He et al. 2016, table 1; version 1.5)."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, (count, planes) in enumerate(zip(_RESNET[depth], (64, 128, 256, 512), strict=True)):
        outside = 4 * planes if depth >= 50 else planes
        for number in range(count):
            stride = 2 if stage and not number else 1
            sizes = [(3, stride, planes), (3, 1, outside)]
            if depth >= 50:
                sizes = [(1, 1, planes), (3, stride, planes), (1, 1, outside)]
            same = channels == outside and stride == 1
            layers.append(block(channels, sizes, None if same else projection(channels, outside, stride)))
            channels = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def resnet_small(depth: int, classes: int) -> nn.Module:
    """For 32 px (He et al. 2016, section 4.2)."""
    layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    channels = 16
    for planes in (16, 32, 64):
        for _ in range((depth - 2) // 6):
            stride = 1 if planes == channels else 2
            layers.append(block(channels, [(3, stride, planes), (3, 1, planes)], None if stride == 1 else Padding()))
            channels = planes
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def vgg(depth: int, classes: int) -> nn.Module:
    """Without batch norm (Simonyan and Zisserman 2015, table 1)."""
    layers: list[nn.Module] = []
    inside = 3
    for count, outside in zip(_VGG[depth], (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(inplace=True)]
            inside = outside
        layers.append(nn.MaxPool2d(2))
    classifier = [nn.Linear(inside * 49, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    classifier += [nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, classes)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *classifier)


def small(classes: int) -> nn.Module:
    """The quickstart's: two stages for 28 px and one channel."""
    layers: list[nn.Module] = []
    inside = 1
    for outside in (16, 32):
        layers += [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside)]
        layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        inside = outside
    classifier = [nn.Linear(inside * 49, 128), nn.ReLU(inplace=True), nn.Linear(128, classes)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *classifier)


def build(name: str) -> tuple[nn.Module, int, int]:
    """(network, channels in, classes).

    Raises:
        ValueError: a name that has no counterpart here.
    """
    family, digits = name.rstrip("0123456789"), name[len(name.rstrip("0123456789")) :]
    depth = int(digits) if digits else 0
    if name == "small":
        return small(10), 1, 10
    if family == "vgg" and depth in _VGG:
        return vgg(depth, 1000), 3, 1000
    if family == "resnet" and depth in _RESNET:
        return resnet(depth, 1000), 3, 1000
    if family == "resnet" and depth % 6 == 2:
        return resnet_small(depth, 10), 3, 10
    raise ValueError(f"{name} has no counterpart here; small, vgg11 to vgg19, resnet18 to 152 and resnet20 to 110 have.")


class Step:
    """Forward, loss, backward and momentum update on made-up images that are in place already; three batches take turns."""

    def __init__(self, name: str, batch: int, pixels: int, *, last: bool, fused: bool, compiled: bool) -> None:
        torch.manual_seed(0)
        network, channels, classes = build(name)
        format_ = torch.channels_last if last else torch.contiguous_format
        network = network.to(memory_format=format_)
        self.parameters = sum(parameter.numel() for parameter in network.parameters())
        self._optimizer = torch.optim.SGD(network.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM, fused=fused or None)
        self._network = torch.compile(network) if compiled else network
        images = (torch.randn(batch, channels, pixels, pixels) for _ in range(_BATCHES))
        self._images = [each.to(memory_format=format_) for each in images]
        self._labels = [torch.randint(0, classes, (batch,)) for _ in range(_BATCHES)]
        self._loss = nn.CrossEntropyLoss()
        self._step = 0

    def run(self) -> float:
        """One step; gives the mean loss."""
        turn = self._step % _BATCHES
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self._network(self._images[turn]), self._labels[turn])
        loss.backward()
        self._optimizer.step()
        self._step += 1
        return float(loss.detach())


def serve(step: Step, answer: Any) -> None:
    """Step as the lines on standard input say, until they end."""
    for line in sys.stdin:
        asked = json.loads(line)
        idle = time.process_time()
        begin = time.perf_counter()
        losses = [step.run() for _ in range(asked["steps"])]
        wall, cpu = time.perf_counter() - begin, time.process_time() - idle
        answer(
            {
                "wall_seconds": wall,
                "cpu_seconds": cpu,
                "finite": all(map(math.isfinite, losses)),
                "loss": losses[-1],
                "cpu_before_seconds": idle,
                "cpu_after_seconds": time.process_time(),
                "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )


def main() -> int:
    """Serve steps of the network that the command line describes; gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", help="JSON: model, batch, pixels, threads, last, fused, compiled")
    settings = json.loads(parser.parse_args().settings)
    torch.set_num_threads(settings["threads"])
    last, fused, compiled = settings["last"], settings["fused"], settings["compiled"]
    step = Step(settings["model"], settings["batch"], settings["pixels"], last=last, fused=fused, compiled=compiled)

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), flush=True)

    answer({"version": torch.__version__, "parameters": step.parameters, "threads": torch.get_num_threads()})
    serve(step, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
