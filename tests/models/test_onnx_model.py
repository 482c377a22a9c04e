"""ONNX models: checked by onnx, and equal to our own evaluation in onnxruntime."""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed (make parity-install installs it)")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (make parity-install installs it)")

import onnxruntime

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import StepContext
from hpctrain.backend.specs import Shape
from hpctrain.core.errors import BackendError, CheckpointError
from hpctrain.models import catalogue, onnx_model
from hpctrain.nn.custom import ArrayLayer
from hpctrain.nn.layers import AveragePool, Conv2d, Flatten, Layer, Linear, MaxPool, Sequential
from hpctrain.nn.network import Network
from tests.support import network_state
from tests.support.nets import plain, residual

_SMALLEST = {"alexnet": 83, "vgg": 45, "resnet_small": 19, "small": 29, "resnet": 33, "resnet9": 19, "preact_resnet": 19}


def network_of(model: Layer, image_shape: tuple[int, int, int]) -> Network:
    """A network with weights and statistics by seed."""
    network = Network(model, image_shape, NumpyKernelSet(), seed=5)
    random = np.random.default_rng(1)
    for name, view in network.statistics.views.items():
        view[...] = 0.5 + random.random(view.shape) if name.endswith("var") else random.standard_normal(view.shape)
    return network


def our_logits(network: Network, x: np.ndarray) -> np.ndarray:
    program = network.program(len(x), training=False)
    program.set_input(x)
    logits: np.ndarray = program.forward(StepContext(training=False)).copy()
    return logits


def their_logits(proto: Any, x: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"images": np.ascontiguousarray(x.transpose(0, 3, 1, 2))})
    return np.asarray(logits)


def exported(network: Network, metadata: dict[str, str] | None = None) -> Any:
    return onnx_model.onnx_model(network.model, network.image_shape, network_state.export(network), metadata or {})


@pytest.mark.sample(8)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in catalogue.names() if catalogue.entry(name).fixed or name in ("alexnet", "small", "resnet9")]
)
def test_onnxruntime_computes_the_same_logits_for_every_model(name: str) -> None:
    family = catalogue.entry(name).family
    pixels, channels = _SMALLEST[family], 1 if family == "small" else 3
    network = network_of(catalogue.build(name, {"width": 0.04, "classes": 5}), (pixels, pixels + 4, channels))
    proto = exported(network, {"model": name})
    assert proto.opset_import[0].version == onnx_model.OPSET
    assert {entry.key: entry.value for entry in proto.metadata_props} == {"model": name}
    x = np.random.default_rng(2).standard_normal((2, *network.image_shape), np.float32)
    ours = our_logits(network, x)
    scale = max(1.0, float(np.abs(ours).max()))
    np.testing.assert_allclose(their_logits(proto, x) / scale, ours / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "pool",
    [
        MaxPool(3, 2, padding=1, ceil_mode=True),
        MaxPool((2, 3), 1, dilation=2),
        AveragePool(3, 2, padding=1),
        AveragePool(3, 2, padding=1, count_include_pad=False),
        AveragePool(2, 2, ceil_mode=True, count_include_pad=False),
    ],
    ids=lambda pool: type(pool).__name__,
)
def test_windows_mean_the_same(pool: Layer) -> None:
    """And the linear layer, which does not know of which image its input is made, reads it in our order."""
    convolution = Conv2d(2, 4, (3, 2), (1, 2), padding=(1, 0, 2, 1), dilation=(2, 1), groups=2)
    images = {"conv": convolution, "pool": pool, "flatten": Flatten()}
    features = Network(Sequential(images), (9, 7, 2), NumpyKernelSet()).classes
    network = network_of(Sequential({**images, "fc": Linear(features, 2)}), (9, 7, 2))
    x = np.random.default_rng(2).standard_normal((3, 9, 7, 2), np.float32)
    np.testing.assert_allclose(their_logits(exported(network), x), our_logits(network, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", [plain(dropout=0.3), residual(stochastic_depth=0.3)])
def test_dropout_is_left_out(model: Layer) -> None:
    network = network_of(model, (9, 7, 3))
    x = np.random.default_rng(2).standard_normal((2, 9, 7, 3), np.float32)
    proto = exported(network)
    assert "Dropout" not in {node.op_type for node in proto.graph.node}
    np.testing.assert_allclose(their_logits(proto, x), our_logits(network, x), rtol=1e-4, atol=1e-5)


class Doubled(ArrayLayer):
    """A layer of one's own."""

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def forward(self, x: Any, parameters: Mapping[str, Any], context: StepContext, saved: dict[str, Any]) -> Any:
        return 2.0 * x

    def backward(self, x: Any, dy: Any, parameters: Mapping[str, Any], saved: dict[str, Any]) -> Any:
        return 2.0 * dy, {}


def test_a_layer_that_onnx_does_not_have_is_refused() -> None:
    network = network_of(Sequential({"flatten": Flatten(), "own": Doubled()}), (2, 2, 1))
    with pytest.raises(BackendError, match="Layer own is ArraySpec, which has no counterpart in ONNX"):
        exported(network)


def test_more_weights_than_a_file_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_model, "_MOST_BYTES", 1000)
    with pytest.raises(CheckpointError, match="an ONNX file holds"):
        exported(network_of(catalogue.build("small", {"width": 0.2}), (28, 28, 1)))


def test_a_missing_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(BackendError, match=r'pip install "hpctrain\[onnx\]"'):
        onnx_model.onnx_package()
