"""The convolutions that training a model of the catalogue asks a GPU for, as the operators of the cuda set ask for them."""

from __future__ import annotations

import random

from hpctrain.backend.cuda.device import ConvolutionKey, DeviceConvolution, Precision
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.cuda.runtime import CudaRuntime
from hpctrain.backend.graph import Graph, GraphBuilder
from hpctrain.backend.specs import Conv2dSpec, TensorSpec, Window, WithRelu
from hpctrain.models import catalogue
from hpctrain_testing.emulator.device import EmulatedDevice


class NoConvolution:
    """Implements `DeviceConvolution`, and cannot be run."""

    workspace_bytes = 0

    def run(self, *arguments: object) -> None:
        raise NotImplementedError("a convolution that was only asked for")


class AskedDevice(EmulatedDevice):
    """A device that notes which convolutions it is asked for, and computes none.

    Attributes:
        keys: in the order of the requests, each once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[ConvolutionKey, None] = {}

    def convolution(self, key: ConvolutionKey) -> DeviceConvolution:
        self.keys[key] = None
        return NoConvolution()


def graph_of(model: str, batch: int, dtype: str) -> Graph:
    """The model at its own image size, not yet fused."""
    builder = GraphBuilder(TensorSpec((batch, *catalogue.image_shape(model)), dtype))
    return builder.build(catalogue.build(model, {}).lower(builder, 0, ""))


def convolutions(model: str, batch: int, precision: Precision) -> list[ConvolutionKey]:
    """Keys of all plans of training steps, and so of evaluation at the same batch size: the images get no gradient.

    Args:
        model: of the catalogue. batch: images of a rank in a step.

    Raises:
        ConfigError: no such model.
    """
    device = AskedDevice()
    kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute"), precision))
    graph = kernels.fuse(graph_of(model, batch, kernels.runtime.dtype), training=True)
    for node in graph.nodes:
        if _convolves(node.spec):
            inputs = tuple(graph.tensors[number] for number in node.inputs)
            kernels.make(node.spec, inputs, training=True, input_gradient=0 not in node.inputs)
    return list(device.keys)


def random_convolutions(count: int, precision: Precision, seed: int = 0) -> list[ConvolutionKey]:
    """Keys of `count` geometries at random, in every direction: channels that fill no pack, groups, dilation, edges of any kind,
    windows larger than the image, one image and many."""
    device, draw = AskedDevice(), random.Random(seed)
    kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute"), precision))
    for _ in range(count):
        spec = random_spec(draw)
        window = spec.window
        least = [max(1, window.extent[d] - window.padding[2 * d] - window.padding[2 * d + 1]) for d in (0, 1)]
        height, width = (size + draw.choice((0, 1, 5, 30, 100)) for size in least)
        x = TensorSpec((draw.choice((1, 2, 7, 32, 256)), height, width, spec.channels_in), kernels.runtime.dtype)
        kernels.make(WithRelu(spec) if draw.random() < 0.5 else spec, (x,), training=True)
    return list(device.keys)


def random_spec(draw: random.Random) -> Conv2dSpec:
    """A convolution that may be in no network."""
    kernel, stride, dilation = (
        (draw.choice(sizes), draw.choice(sizes)) for sizes in ((1, 2, 3, 5, 7, 11), (1, 2, 3, 4), (1, 1, 2, 3))
    )
    top, bottom, left, right = (draw.randint(0, 5) for _ in range(4))
    groups = draw.choice((1, 1, 1, 2, 3, 8, 32))
    channels = [groups * draw.choice((1, 2, 3, 4, 5, 8, 16, 17, 19)) for _ in range(2)]
    return Conv2dSpec(*channels, Window(kernel, stride, (top, bottom, left, right), dilation), groups, draw.random() < 0.5)


def _convolves(spec: object) -> bool:
    """True for a convolution, alone or with what is fused to it."""
    return isinstance(spec, Conv2dSpec) or isinstance(getattr(spec, "inner", None), Conv2dSpec)
