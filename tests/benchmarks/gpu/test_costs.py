"""Bytes, FLOP and launches of a step on a GPU, and the convolutions that it is asked for, with their plans."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import gpu_plans
from benchmarks.gpu.convolutions import AskedDevice, convolutions
from benchmarks.gpu.convolutions import graph_of as asked_graph
from benchmarks.gpu.costs import costs, needed_gradients
from benchmarks.gpu.floor import Step, graph_of, step_of
from benchmarks.gpu.training_run import Task, TrainingRun
from hpctrain.backend.cuda import libraries
from hpctrain.backend.cuda.device import ConvolutionKey, Device, Precision
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.cuda.runtime import CudaRuntime
from hpctrain.backend.graph import Graph
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.specs import Conv2dSpec
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.network import Lowering
from hpctrain_testing.emulator.device import EmulatedDevice
from tests.support.fake_cudnn import FakeCudnn, FakePlan


def kind_bytes(step: Step, kind: str) -> int:
    return sum(row.work.bytes for row in step.rows if row.work.kind == kind)


@pytest.mark.parametrize(("precision", "item"), [("bfloat16", 2), ("tf32", 4), ("float32", 4)])
def test_convolutions_read_two_of_three_tensors_and_write_the_third(precision: str, item: int) -> None:
    """Products write float32 gradients of weights; the first convolution reads patches, 147 elements in whole packs."""
    batch = 3
    graph, step = graph_of("resnet50", batch), step_of("resnet50", batch, precision)
    convolutions = [node for node in graph.nodes if isinstance(node.spec, Conv2dSpec)]
    forward = gradients = flops = 0
    for node in convolutions:
        x, y = (math.prod(graph.tensors[number].shape) for number in (node.inputs[0], node.output))
        assert isinstance(node.spec, Conv2dSpec)
        weight = math.prod(node.spec.weight_shape)
        flops += 2 * y * weight // node.spec.channels_out
        plan = node.spec.window.kernel == (3, 3) or node.spec.window.stride != (1, 1)
        if node.spec.channels_in == 3:
            x, weight, plan = batch * 112 * 112 * (152 if item == 2 else 148), 64 * (152 if item == 2 else 148), False
        forward += item * (x + y + weight)
        gradients += item * (x + y) + (item if plan else 4) * weight
    assert len(convolutions) == 53
    assert kind_bytes(step, "convolution forward") == forward
    assert kind_bytes(step, "convolution weight") == gradients
    assert sum(row.work.flops for row in step.rows if row.work.kind == "convolution forward") == flops


def test_a_product_adds_to_the_gradient_of_its_input() -> None:
    """It reads once more what is there; no sum of gradients is left in a network whose sums are made by 1 x 1 convolutions."""
    step, plain = step_of("resnet50", 2, "bfloat16"), 0
    graph = graph_of("resnet50", 2)
    tensors = {number: math.prod(tensor.shape) for number, tensor in enumerate(graph.tensors)}
    added = 0
    for node in graph.nodes[1:]:
        if isinstance(node.spec, Conv2dSpec):
            plain += 2 * (tensors[node.inputs[0]] + tensors[node.output] + math.prod(node.spec.weight_shape))
            added += 2 * tensors[node.inputs[0]] * (graph.consumers(node.inputs[0])[-1] is not node)
    assert added == 2 * 2 * (56 * 56 * (64 + 2 * 256) + 56 * 56 * 256 + 28 * 28 * 4 * 512 + 14 * 14 * 6 * 1024 + 7 * 7 * 2 * 2048)
    assert kind_bytes(step, "convolution input") == plain + added
    assert kind_bytes(step, "sum of gradients") == 0


@pytest.mark.parametrize("model", ["resnet20", "resnet18", "resnet50", "vgg16_bn", "small"])
def test_gradients_are_added_where_plans_add_them(model: str) -> None:
    graph = graph_of_plain(model)
    plan = compile_graph(graph, NumpyKernelSet(), training=True)
    sums = sum(sum(memory.accumulate) + len(memory.sums) for memory in plan.memory)
    needed = needed_gradients(graph)
    readers = [len(graph.consumers(number)) for number in needed]
    assert sum(count - 1 for count in readers if count > 1) == sums
    assert {number for number, needs in enumerate(plan.needs_grad) if needs} == needed


def graph_of_plain(model: str) -> Graph:
    return Lowering(catalogue.build(model, {})).graph(2, catalogue.image_shape(model))


class CountingDevice:
    """An emulated device on which kernels, plans and products are counted and not run."""

    def __init__(self) -> None:
        self._device = EmulatedDevice()
        self.launches = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def _count(self, *_arguments: object, **_options: object) -> None:
        self.launches += 1

    def kernel(self, source: str, name: str) -> Callable[..., None]:
        self._device.kernel(source, name)  # which there must be
        return self._count

    def convolution(self, key: ConvolutionKey) -> SimpleNamespace:
        return SimpleNamespace(workspace_bytes=0, run=self._count)

    gemm = copy = _count


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("model", "options"), [("resnet18", {}), ("resnet50", {"width": 0.125}), ("vgg11", {"width": 0.25}), ("small", {})]
)
def test_launches_are_those_of_a_training_step(
    emulated_device: object, model: str, options: dict[str, object], precision: Precision
) -> None:
    device, batch = CountingDevice(), 2
    kernels = CudaKernelSet(CudaRuntime(cast(Device, device), device.stream("compute"), precision, graphs=False))
    task = Task(model, batch, catalogue.image_shape(model)[0], batches=1, options=options)
    run = TrainingRun(task, kernels, kernels.runtime.dtype, resident=True)
    device.launches = 0
    run.enqueue()
    assert device.launches == step_of(model, batch, precision, options).total("launches")


def test_graphs_are_fused_as_the_cuda_set_fuses_them() -> None:
    device = CountingDevice()
    kernels = CudaKernelSet(CudaRuntime(cast(Device, device), device.stream("compute")))
    for model in ("resnet50", "vgg16_bn", "vgg16", "small"):
        assert kernels.fuse(graph_of_plain(model), training=True) == graph_of(model, 2)


def test_every_operation_of_the_catalogue_is_counted() -> None:
    """A kind that is only bounded from below is the zero-padded shortcut of the small residual networks, and no other."""
    bounded = {
        (model, work.kind)
        for model in ("resnet20", "resnet50", "vgg16", "vgg16_bn", "small")
        for _, work in costs(graph_of(model, 1), "bfloat16")
        if "lower bound" in work.kind
    }
    assert bounded == {("resnet20", "PadChannelsSpec (lower bound)")}


def test_every_convolution_that_is_no_product_is_asked_for_in_three_directions() -> None:
    keys = convolutions("resnet20", 2, "bfloat16")
    graph = asked_graph("resnet20", 2, "bfloat16")
    specs = {
        (graph.tensors[node.inputs[0]].shape, node.spec.weight_shape, node.spec.window)
        for node in graph.nodes
        if isinstance(node.spec, Conv2dSpec)
    }
    planned = {spec for spec in specs if spec[0][3] != 3}  # that of the images is a product
    assert Counter(key.kind for key in keys) == dict.fromkeys(("forward", "weight", "input"), len(planned))
    assert {key.x for key in keys} == {shape for shape, *_ in planned}
    assert {(key.dtype, key.precision) for key in keys} == {("bfloat16", "bfloat16")}


def test_a_convolution_that_was_only_asked_for_cannot_be_run() -> None:
    device = AskedDevice()
    (key, *_) = convolutions("small", 1, "float32")
    with pytest.raises(NotImplementedError, match="only asked for"):
        device.convolution(key).run()
    assert list(device.keys) == [key]


@pytest.fixture
def cudnn(monkeypatch) -> FakeCudnn:
    module = FakeCudnn(plans=[FakePlan("eng7_k1=2", 4096)])
    monkeypatch.setattr(libraries, "library", lambda: module)
    monkeypatch.setattr(gpu_plans, "library", lambda: module)
    return module


def test_plans_every_convolution_on_every_device_in_every_precision(cudnn, tmp_path: Path, capsys) -> None:
    out = tmp_path / "plans.json"
    assert gpu_plans.main(["--models", "small", "resnet20", "--batch", "2", "5", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    asked = {
        precision: {key for model in ("small", "resnet20") for batch in (2, 5) for key in convolutions(model, batch, precision)}
        for precision in ("float32", "tf32", "bfloat16")
    }
    expected = [(device, precision, len(keys)) for precision, keys in asked.items() for device in ("a100", "h100")]
    assert [(row["device"], row["precision"], row["convolutions"]) for row in content["rows"]] == expected
    assert all(row["without_plan"] == 0 and row["largest_workspace_bytes"] == 4096 for row in content["rows"])
    engines = content["engine_and_workspace_bytes"]
    assert engines.keys() == {libraries.describe(key) for keys in asked.values() for key in keys}
    assert all(entry == {"a100": ["eng7", 4096], "h100": ["eng7", 4096]} for entry in engines.values())
    assert len(cudnn.graphs) == 2 * len(engines)
    assert len(capsys.readouterr().out.splitlines()) == 7
