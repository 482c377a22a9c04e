"""Conversion of a model with its weights to ONNX: images (N, C, H, W) in, logits (N, classes) out, for any N.

It needs the package onnx, which the extra `onnx` installs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hpctrain.backend.graph import Graph, GraphBuilder, Node
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
    TensorSpec,
    Window,
)
from hpctrain.core.errors import BackendError, CheckpointError
from hpctrain.core.text import size_text
from hpctrain.models.state_dict import StateEntry, declared_state
from hpctrain.nn.layers import Layer, PadChannelsSpec

#: newest operator set that the runtimes of the last two years support; it defines all operators used here
OPSET = 21
_MOST_BYTES = 2_000_000_000  # a protocol buffer holds at most 2 GiB


def onnx_package() -> Any:
    """Import and return the package onnx.

    Raises:
        BackendError: onnx is not installed.
    """
    try:
        import onnx
    except ImportError as error:
        raise BackendError('An ONNX file needs the package onnx; install it with `pip install "hpctrain[onnx]"`.') from error
    return onnx


def onnx_model(
    model: Layer, image_shape: tuple[int, int, int], state: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> Any:
    """Return a model with its weights as an `onnx.ModelProto` that onnx's checker has accepted.

    Args:
        state: float32 weights with torchvision's names and layouts.
        metadata: properties that are stored in the model.

    Raises:
        BackendError: onnx is not installed, or a layer has no counterpart in ONNX.
        CheckpointError: the weights exceed the maximum size of a file.
    """
    onnx = onnx_package()
    size_bytes = sum(array.nbytes for array in state.values())
    if size_bytes > _MOST_BYTES:
        raise CheckpointError(
            f"The weights have {size_text(size_bytes)}, but an ONNX file holds at most {size_text(_MOST_BYTES)}; export "
            "them as safetensors."
        )
    builder = GraphBuilder(TensorSpec((1, *image_shape)))
    translator = _Translator(onnx, builder.build(model.lower(builder, 0, "")), declared_state(model), state)
    height, width, channels = image_shape
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    proto = helper.make_model(
        helper.make_graph(
            translator.nodes(),
            "hpctrain",
            [helper.make_tensor_value_info("images", kind, ["N", channels, height, width])],
            [helper.make_tensor_value_info("logits", kind, ["N", translator.classes])],
            [onnx.numpy_helper.from_array(array, name) for name, array in translator.constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=helper.find_min_ir_version_for([helper.make_opsetid("", OPSET)]),
        producer_name="hpctrain",
    )
    helper.set_model_props(proto, dict(metadata))
    onnx.checker.check_model(proto, full_check=True)
    return proto


class _Translator:
    """Translator of a graph to ONNX, node by node.

    `_names[t]` is the ONNX value of tensor t; `constants` are the arrays that nodes read.
    """

    def __init__(self, onnx: Any, graph: Graph, entries: Mapping[str, StateEntry], state: Mapping[str, np.ndarray]) -> None:
        self._make = onnx.helper.make_node
        self._graph, self._entries, self._state = graph, entries, state
        self._names = {0: "images"}
        self._nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {}
        self.classes = graph.tensors[graph.output].shape[1]
        self._rules: Mapping[type, Callable[[Node, Any], None]] = {
            Conv2dSpec: self._convolution,
            LinearSpec: self._linear,
            BatchNormSpec: self._batch_norm,
            PoolSpec: self._pool,
            AdaptiveAveragePoolSpec: self._adaptive_pool,
            PadChannelsSpec: self._pad_channels,
            ReluSpec: lambda node, spec: self._add("Relu", node),
            AddSpec: lambda node, spec: self._add("Add", node),
            FlattenSpec: self._flatten,
            DropoutSpec: lambda node, spec: self._same(node),
        }

    def nodes(self) -> list[Any]:
        """Return all nodes, in order. The output of the last one is "logits".

        Raises:
            BackendError: a layer has no counterpart in ONNX.
        """
        for node in self._graph.nodes:
            rule = self._rules.get(type(node.spec))
            if rule is None:
                raise BackendError(
                    f"Layer {node.name} is {type(node.spec).__name__}, which has no counterpart in ONNX; export its weights as "
                    f"safetensors."
                )
            rule(node, node.spec)
        self._nodes.append(self._make("Identity", [self._names[self._graph.output]], ["logits"], name="logits"))
        return self._nodes

    def _add(self, operator: str, node: Node, *constants: str, **attributes: Any) -> None:
        inputs = [self._names[i] for i in node.inputs]
        self._names[node.output] = self._emit(operator, node.name, [*inputs, *constants], **attributes)

    def _emit(self, operator: str, name: str, inputs: list[str], **attributes: Any) -> str:
        self._nodes.append(self._make(operator, inputs, [f"{name}.output"], name=name, **attributes))
        return f"{name}.output"

    def _same(self, node: Node) -> None:
        self._names[node.output] = self._names[node.inputs[0]]

    def _parameters(self, node: Node) -> list[str]:
        """Add a node's parameters as constants, and return their names, weight first."""
        return [self._constant(name, self._state[name]) for name in node.parameters.values()]

    def _constant(self, name: str, array: np.ndarray) -> str:
        self.constants[name] = np.ascontiguousarray(array)
        return name

    def _convolution(self, node: Node, spec: Conv2dSpec) -> None:
        self._add("Conv", node, *self._parameters(node), **_window(spec.window), group=spec.groups)

    def _flatten(self, node: Node, spec: FlattenSpec) -> None:
        """Flatten with channels last, as hpctrain does, so that the next linear layer's weight needs no reordering."""
        inner = self._names[node.inputs[0]]
        if len(self._graph.tensors[node.inputs[0]].shape) == 4:
            inner = self._emit("Transpose", f"{node.name}.nhwc", [inner], perm=[0, 2, 3, 1])
        self._names[node.output] = self._emit("Flatten", node.name, [inner], axis=1)

    def _linear(self, node: Node, spec: LinearSpec) -> None:
        weight = node.parameters["weight"]
        inputs = self._parameters(node)
        self.constants[weight] = self._entries[weight].restore(self._state[weight])
        self._add("Gemm", node, *inputs)

    def _batch_norm(self, node: Node, spec: BatchNormSpec) -> None:
        statistics = [self._constant(name, self._state[name]) for name in node.statistics.values()]
        self._add("BatchNormalization", node, *self._parameters(node), *statistics, epsilon=spec.epsilon)

    def _pool(self, node: Node, spec: PoolSpec) -> None:
        window = {**_window(spec.window), "ceil_mode": int(spec.ceil_mode)}
        if spec.kind == "max":
            self._add("MaxPool", node, **window)
        else:
            self._add("AveragePool", node, **window, count_include_pad=int(spec.count_include_pad))

    def _adaptive_pool(self, node: Node, spec: AdaptiveAveragePoolSpec) -> None:
        """Multiply by two matrices of means, because ONNX has no operator for windows of varying size."""
        _, height, width, _ = self._graph.tensors[node.inputs[0]].shape
        if (height, width) == spec.size:
            self._same(node)
        elif spec.size == (1, 1):
            self._add("GlobalAveragePool", node)
        else:
            rows = self._constant(f"{node.name}.rows", _means(height, spec.size[0]))
            columns = self._constant(f"{node.name}.columns", _means(width, spec.size[1]).T)
            inner = self._emit("MatMul", f"{node.name}.vertical", [rows, self._names[node.inputs[0]]])
            self._names[node.output] = self._emit("MatMul", node.name, [inner, columns])

    def _pad_channels(self, node: Node, spec: PadChannelsSpec) -> None:
        pads = np.array([0, spec.before, 0, 0, 0, spec.after, 0, 0], np.int64)
        self._add("Pad", node, self._constant(f"{node.name}.pads", pads))


def _window(window: Window) -> dict[str, list[int]]:
    top, bottom, left, right = window.padding
    return {
        "kernel_shape": list(window.kernel),
        "strides": list(window.stride),
        "pads": [top, left, bottom, right],
        "dilations": list(window.dilation),
    }


def _means(size: int, pooled: int) -> np.ndarray:
    """Return a matrix (pooled, size) whose row i averages elements [floor(i size / pooled), ceil((i + 1) size / pooled))."""
    matrix = np.zeros((pooled, size), np.float32)
    for i in range(pooled):
        start, stop = i * size // pooled, -(-(i + 1) * size // pooled)
        matrix[i, start:stop] = 1.0 / (stop - start)
    return matrix
