"""Names of kernels and keys of convolutions, as the build stage finds them."""

from __future__ import annotations

import pytest

from benchmarks.gpu.build import kernel_names, keys
from hpctrain.backend.cuda import sources
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.kernels.graph import GraphBuilder
from hpctrain.backend.kernels.specs import Conv2dSpec, TensorSpec
from hpctrain.models import catalogue


@pytest.mark.job
@pytest.mark.parametrize("source", sources.names())
def test_every_name_is_a_kernel_and_float64_is_for_the_cpu(source: str) -> None:
    names, on_gpu = kernel_names(source, on_cpu=True), kernel_names(source, on_cpu=False)
    device = EmulatedDevice()
    for name in names:
        device.kernel(source, name)
    assert on_gpu
    assert set(on_gpu) < set(names) or not any("f64" in name for name in names)
    assert not any("f64" in name for name in on_gpu)


@pytest.mark.parametrize("model", ["resnet20", "vgg16", "small"])
def test_keys_are_those_that_operators_ask_for(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice()
    asked = set()
    plan = device.convolution
    monkeypatch.setattr(device, "convolution", lambda key: (asked.add(key), plan(key))[1])
    kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute")))
    builder = GraphBuilder(TensorSpec((2, *catalogue.image_shape(model))))
    graph = builder.build(catalogue.build(model, {}).lower(builder, 0, ""))
    for node in graph.nodes:
        if isinstance(node.spec, Conv2dSpec):
            inputs = tuple(graph.tensors[number] for number in node.inputs)
            kernels.make(node.spec, inputs, training=True, input_gradient=node.inputs[0] != 0)
    assert asked == set(keys(model, 2, "float32"))
