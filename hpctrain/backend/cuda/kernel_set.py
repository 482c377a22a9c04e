"""The cuda kernel set: convolutions by cuDNN, matrix products by cuBLAS, and all other operations by hpctrain's CUDA C."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from hpctrain.backend.cuda.arithmetic import CudaArithmetic
from hpctrain.backend.cuda.batch_norm import CudaBatchNorm, CudaSynchronisedBatchNorm
from hpctrain.backend.cuda.classifier import CudaLinear, CudaSoftmaxCrossEntropy
from hpctrain.backend.cuda.conv2d import CudaConv2d, CudaPatchConv2d, CudaPointwiseConv2d
from hpctrain.backend.cuda.device import ALIGNMENT_BYTES, CapturedGraph, DeviceStream
from hpctrain.backend.cuda.elementwise import CudaAdd, CudaDropout, CudaRelu
from hpctrain.backend.cuda.pixel_input import CudaPixelInput
from hpctrain.backend.cuda.pool import CudaAdaptiveAveragePool, CudaAveragePool, CudaMaxPool
from hpctrain.backend.cuda.runtime import CudaRuntime, StepBlock
from hpctrain.backend.graph import Graph, fuse
from hpctrain.backend.operators import (
    Array,
    CapturedWork,
    CapturesWork,
    KernelSet,
    LossOperator,
    Operator,
    PixelInput,
    StepContext,
    ViewOperator,
)
from hpctrain.backend.pixels import PixelBatch
from hpctrain.backend.specs import (
    AdaptiveAveragePoolSpec,
    AddSpec,
    BatchNormSpec,
    Conv2dSpec,
    DropoutSpec,
    FlattenSpec,
    LinearSpec,
    PoolSpec,
    ReluSpec,
    SoftmaxCrossEntropySpec,
    Spec,
    TensorSpec,
    WithRelu,
)
from hpctrain.core.errors import BackendError


class CudaKernelSet(CapturesWork, PixelInput, KernelSet):
    """Operators on plain NHWC memory of one device, enqueued on one stream.

    Args:
        runtime: device, its stream, and the precision.
    """

    name: ClassVar[str] = "cuda"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float64")
    alignment_bytes: int = ALIGNMENT_BYTES

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime
        self.captures = runtime.graphs
        self.arithmetic = CudaArithmetic(runtime)
        self.shadow_dtype = None if runtime.dtype == runtime.parameter_dtype else runtime.dtype
        self.step_block = StepBlock(runtime)
        self._pixels = CudaPixelInput(runtime)

    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        common: dict[str, Any] = {"training": training, "runtime": self.runtime}
        computing: dict[str, Any] = {**common, "arithmetic": self.arithmetic}
        match spec:
            case Conv2dSpec() if CudaPointwiseConv2d.fits(spec):
                return CudaPointwiseConv2d(spec, *inputs, **computing)
            case Conv2dSpec() if CudaPatchConv2d.fits(spec, *inputs, input_gradient=input_gradient and training):
                return CudaPatchConv2d(spec, *inputs, **computing)
            case Conv2dSpec() | WithRelu(inner=Conv2dSpec()):
                return CudaConv2d(spec, *inputs, **computing, input_gradient=input_gradient)
            case LinearSpec():
                return CudaLinear(spec, *inputs, **computing)
            case BatchNormSpec(synchronised=True) if training:
                return CudaSynchronisedBatchNorm(spec, *inputs, **computing)
            case BatchNormSpec():
                return CudaBatchNorm(spec, *inputs, **common)
            case PoolSpec():
                return (CudaMaxPool if spec.kind == "max" else CudaAveragePool)(spec, *inputs, **common)
            case AdaptiveAveragePoolSpec():
                return CudaAdaptiveAveragePool(spec, *inputs, **common)
            case ReluSpec():
                return CudaRelu(spec, *inputs, **common)
            case AddSpec():
                return CudaAdd(spec, *inputs, **common)
            case DropoutSpec() if training and spec.rate:
                return CudaDropout(spec, *inputs, **common, block=self.step_block)
            case DropoutSpec() | FlattenSpec():
                return ViewOperator(spec, *inputs)
        raise BackendError(f"Backend cuda has no operator for {type(spec).__name__}; add one to CudaKernelSet.make.")

    def make_loss(self, spec: SoftmaxCrossEntropySpec) -> LossOperator:
        return CudaSoftmaxCrossEntropy(spec, self.runtime)

    def fuse(self, graph: Graph, *, training: bool) -> Graph:
        return fuse(graph, products=(Conv2dSpec,), training=training)

    def make_input(self, target: Array, images: PixelBatch) -> None:
        self._pixels.make(target, images)

    def begin(self, context: StepContext) -> None:
        self.step_block.begin(context)

    def wait(self) -> None:
        self.runtime.stream.synchronize()

    def free_bytes(self) -> int:
        device = self.runtime.device
        return device.memory_bytes - device.memory_used()

    def used_bytes(self) -> int:
        return self.runtime.device.memory_used()

    def allocate(self, size_bytes: int) -> Array:
        return self.runtime.device.allocate(size_bytes)

    @contextlib.contextmanager
    def capture(self) -> Iterator[CapturedWork]:
        stream = self.runtime.stream
        with self.runtime.device.capture(stream) as graph:
            yield _Graph(graph, stream)


@dataclass(frozen=True)
class _Graph:
    """Implementation of `CapturedWork` by a captured graph, launched on the set's stream."""

    graph: CapturedGraph
    stream: DeviceStream

    def launch(self) -> None:
        self.graph.launch(self.stream)
