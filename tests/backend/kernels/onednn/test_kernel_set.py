"""The set as a whole: what it refuses, when it stands back, and that networks planned with it give the reference's numbers."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.backend import make_backend
from hpctrain.backend.kernels.base import Array, KernelSet, StepContext
from hpctrain.backend.kernels.onednn import constants as c
from hpctrain.backend.kernels.onednn.batch_norm import BatchNormOperator
from hpctrain.backend.kernels.onednn.binding import Attributes, Descriptor, Engine, Primitive, check
from hpctrain.backend.kernels.onednn.conv2d import Conv2dOperator
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet
from hpctrain.backend.kernels.onednn.library import ENVIRONMENT_VARIABLE
from hpctrain.backend.kernels.onednn.reorder import ReorderOperator
from hpctrain.backend.kernels.specs import AddSpec, ReluSpec, Shape, TensorSpec
from hpctrain.errors import BackendError
from hpctrain.models import catalogue
from hpctrain.nn.custom import ArrayLayer
from hpctrain.nn.initialise import constant
from hpctrain.nn.layer import Layer
from hpctrain.nn.layers.adaptive_average_pool import AdaptiveAveragePool
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import ParameterSpec
from hpctrain.nn.program import Program
from tests.support import nets
from tests.support.kernel_pairs import difference

SHAPE = (9, 7, 3)


class Bend(ArrayLayer):
    """y = x + weight x^2, a user's own layer."""

    def __init__(self, channels: int) -> None:
        self.channels = channels

    def parameters(self) -> Mapping[str, ParameterSpec]:
        return {"weight": ParameterSpec((self.channels,), constant(0.1), decay=False)}

    def output_shape(self, shape: Shape) -> Shape:
        return shape

    def forward(self, x: Array, parameters: Mapping[str, Array], context: StepContext, saved: dict[str, Any]) -> Array:
        return x + parameters["weight"] * x * x

    def backward(self, x: Array, dy: Array, parameters: Mapping[str, Array], saved: dict[str, Any]) -> tuple[Array, Any]:
        return dy * (1 + 2 * parameters["weight"] * x), {"weight": (dy * x * x).sum((0, 1, 2))}


def bent() -> Layer:
    """A user's layer between two convolutions that keep blocks of channels."""
    layers = [Conv2d(3, 16, 3, padding=1), Bend(16), Conv2d(16, 16, 3, padding=1), Flatten(), Linear(16 * 9 * 7, 5)]
    return Sequential(layers)


def step(network: Network, batch: int, seed: int) -> dict[str, np.ndarray]:
    """One training step on random data: logits and gradients."""
    random = np.random.default_rng(seed)
    program = network.program(batch, training=True)
    program.x[...] = random.standard_normal(program.x.shape)
    found = {"logits": np.array(program.forward(StepContext(global_count=batch, sample_ids=np.arange(batch))))}
    program.loss(random.integers(0, 5, batch), batch)
    program.backward()
    return found | {name: np.array(parameter.grad) for name, parameter in network.parameters.items()}


def evaluate(network: Network, batch: int) -> np.ndarray:
    program: Program = network.program(batch, training=False)
    program.x[...] = np.random.default_rng(batch).standard_normal(program.x.shape)
    return np.array(program.forward(StepContext(training=False)))


def pair(model: Layer, onednn: KernelSet, reference: KernelSet) -> tuple[Network, Network]:
    return Network(model, SHAPE, onednn, seed=3), Network(model, SHAPE, reference, dtype="float64", seed=3)


def assert_same(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    for name, array in wanted.items():
        assert difference(found[name], array) <= 1e-4, name


def test_float64_is_refused(onednn: KernelSet) -> None:
    x = TensorSpec((1, 9, 7, 3), "float64")
    with pytest.raises(BackendError, match="computes in float32 only, not float64; the numpy set has both"):
        onednn.make(ReluSpec(), (x,), training=True)
    with pytest.raises(BackendError, match="float32 only, not float64"):
        Network(nets.plain(), SHAPE, onednn, dtype="float64").program(2, training=True)


def test_without_its_library_auto_takes_numpy_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "/nowhere/libdnnl.so.3")
    with caplog.at_level(logging.INFO, logger="hpctrain"):
        assert make_backend().name == "numpy"
    (record,) = caplog.records
    assert "/nowhere/libdnnl.so.3" in record.getMessage()
    with pytest.raises(BackendError, match=r"/nowhere/libdnnl\.so\.3"):
        make_backend("onednn")


@pytest.mark.parametrize("model", [nets.plain, lambda: nets.residual(synchronised=False), nets.residual, bent])
def test_networks_equal_the_reference_at_every_batch_size(onednn: KernelSet, reference: KernelSet, model: Any) -> None:
    """A full batch, a short last one, evaluation and its short last batch share one arena and do not disturb each other."""
    ours, theirs = pair(model(), onednn, reference)
    for seed, batch in enumerate((5, 3, 5, 1)):
        assert_same(step(ours, batch, seed), step(theirs, batch, seed))
        for count in (4, 2):
            assert difference(evaluate(ours, count), evaluate(theirs, count)) <= 1e-4


def test_a_rank_without_samples_does_nothing(onednn: KernelSet) -> None:
    network = Network(nets.plain(), SHAPE, onednn)
    found = step(network, 0, 0)
    assert found.pop("logits").shape == (0, 5)
    for name, gradient in found.items():
        assert not gradient.any(), name


def test_evaluation_sees_new_parameters(onednn: KernelSet, reference: KernelSet) -> None:
    ours, theirs = pair(bent(), onednn, reference)
    evaluate(ours, 4)
    for network in (ours, theirs):
        for parameter in network.parameters.values():
            parameter.data[...] *= 1.5
        network.parameters_changed()
    assert difference(evaluate(ours, 4), evaluate(theirs, 4)) <= 1e-4


def test_a_users_layer_stands_between_reorders(onednn: KernelSet) -> None:
    kinds = [type(step.operator).__name__ for step in Network(bent(), SHAPE, onednn).program(2, training=True).steps]
    place = kinds.index("ArrayOperator")
    assert kinds[place - 1] == kinds[place + 1] == ReorderOperator.__name__


@pytest.mark.slow
def test_residual_blocks_are_fused(onednn: KernelSet) -> None:
    """No ReLU and no sum of a ResNet is left alone, and none of its images is reordered but the first."""
    network = Network(catalogue.build("resnet50", {}), (224, 224, 3), onednn)
    steps = network.program(3, training=True).steps  # of fewer, NumPy computes convolutions of the last block
    assert not any(isinstance(step.operator.spec, ReluSpec | AddSpec) for step in steps if hasattr(step.operator, "spec"))
    assert sum(isinstance(step.operator, ReorderOperator) for step in steps) == 1
    sums = [s for s in steps if isinstance(s.operator, BatchNormOperator) and getattr(s.operator.spec, "add", False)]
    assert len(sums) == 16
    assert not any(step.add_partials for step in steps)


def test_a_refusal_at_set_up_names_the_layer_and_the_status(onednn: KernelSet) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        check(2, "conv2d 3->6 3x3 forward")

    network = Network(nets.plain(), SHAPE, onednn)
    network.kernels = OnednnKernelSet()
    network.kernels.make = refuse  # type: ignore[method-assign]
    with pytest.raises(BackendError, match=r"Layer conv1: oneDNN refused conv2d 3->6 3x3 forward: dnnl_invalid_arguments\."):
        network.program(2, training=True)


def test_a_refused_execution_is_an_error(onednn: OnednnKernelSet) -> None:
    engine = Engine()
    values = Descriptor.tagged(engine, (4,), "a")
    relu = Primitive(
        engine, "eltwise_forward", "relu (4,)", c.FORWARD_TRAINING, c.ELTWISE_RELU, values, values, 0.0, 0.0, Attributes(engine)
    )
    call = relu.bind({c.ARG_SRC: (values, np.zeros(4, np.float32))})  # no destination
    with pytest.raises(BackendError, match=r"oneDNN refused to run relu \(4,\): dnnl_invalid_arguments\."):
        call()


def wide() -> Layer:
    """Convolutions with so many channels that they run as Winograd's."""
    convolutions = {"conv1": Conv2d(3, 256, 3, 2), "conv2": Conv2d(256, 256, 3, padding=1)}
    return Sequential({**convolutions, "pool": AdaptiveAveragePool(1), "flatten": Flatten()})


def winograd_layers(program: Program) -> int:
    plans = [step.operator._plan for step in program.steps if isinstance(step.operator, Conv2dOperator)]
    return sum(plan.winograd is not None for plan in plans)


_SCRIPT = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from test_kernel_set import Network, OnednnKernelSet, nets, step, wide, winograd_layers
digest = hashlib.sha256()
for model, batch in ((nets.residual(synchronised=False), 9), (wide(), 2)):
    network = Network(model, (33, 31, 3), OnednnKernelSet())
    for seed in range(3):
        for array in step(network, batch, seed).values():
            digest.update(array.tobytes())
        for parameter in network.parameters.values():
            parameter.data[...] -= 0.1 * parameter.grad
assert winograd_layers(network.program(2, training=True)) == 1
print(digest.hexdigest())
"""


@pytest.mark.job
@pytest.mark.parametrize("threads", [1, 2])
def test_bitwise_the_same_in_every_process(onednn: KernelSet, threads: int) -> None:
    command = [sys.executable, "-c", _SCRIPT, os.path.dirname(__file__)]
    digests = set()
    for seed in ("1", "2"):
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120)
        digests.add(done.stdout)
    assert len(digests) == 1


_TWO_THREADS = """
from pathlib import Path
import numpy as np
from hpctrain.bench.engine_step import EngineStep, workload

def seconds():
    return {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in Path("/proc/self/task").iterdir()}

step = EngineStep(workload("resnet18", 16, 32, {}), "onednn")
array = np.ones(1 << 22, np.float32)
before = seconds()
for _ in range(4):
    step.run()
    step.kernels.arithmetic.fetch_finite([array])
    array[: 1 << 20].reshape(1 << 10, -1) @ array[1 << 20 : 1 << 21].reshape(1 << 10, -1)
print(sum(after - before.get(task, 0.0) > 0.01 for task, after in seconds().items()))
"""


@pytest.mark.job
def test_one_pool_of_threads_works() -> None:
    """Products of NumPy's BLAS in a second pool doubled a step with two threads: both pools spin on the same cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", _TWO_THREADS], env=environment, check=True, capture_output=True, text=True, timeout=120
    )
    assert int(done.stdout) <= 2
