"""Every layer of every model of the catalogue has an operator in the cuda set, at the sizes that the model is meant for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hpctrain.backend.cuda.device import ConvolutionKey, Precision
from hpctrain.backend.kernels.abilities import AnyArrays
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.graph import GraphBuilder
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.models import catalogue
from hpctrain.nn.compile.steps import make_steps
from tests.support.emulated import CudaKernelsFactory

BATCH = 32


@dataclass(frozen=True)
class UnplannedConvolution:
    """Stands for a plan, which costs more than all else in here; `make gpu-plans` makes these."""

    key: ConvolutionKey
    workspace_bytes: int = 1000


def kernels_without_plans(cuda_kernels: CudaKernelsFactory, precision: Precision) -> CudaKernelSet:
    kernels = cuda_kernels(precision)
    kernels.runtime.device.convolution = UnplannedConvolution
    return kernels


@pytest.mark.parametrize("name", catalogue.names())
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_layer_has_an_operator(cuda_kernels: CudaKernelsFactory, name: str, precision: Precision) -> None:
    kernels = kernels_without_plans(cuda_kernels, precision)
    builder = GraphBuilder(TensorSpec((BATCH, *catalogue.image_shape(name)), kernels.runtime.dtype))
    graph = builder.build(catalogue.build(name, catalogue.options(name)).lower(builder, 0, ""))
    for training in (False, True):
        steps = make_steps(kernels.fuse(graph, training=training), kernels, training=training, input_gradient=False)
        for step in steps.steps:
            operator, shapes = step.operator, [steps.tensors[tensor] for tensor in step.inputs]
            assert operator.output == operator.spec.output(*shapes), step.name
            assert operator.output.dtype == kernels.runtime.dtype
            assert list(operator.inputs) == shapes, "the set has one layout"
            assert operator.saved_bytes == 0 or training, f"{step.name} keeps memory for a backward pass that never comes"
            assert isinstance(operator, AnyArrays) or type(operator).__module__.startswith("hpctrain.backend.kernels.cuda.")
