"""The set as a whole: what it refuses, where NumPy stands in, and networks and residual blocks with the reference's numbers."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.choice import make_backend
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn import binding
from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.batch_norm import BatchNormOperator
from hpctrain.backend.onednn.binding import ENVIRONMENT_VARIABLE, Attributes, Descriptor, Engine, Primitive, check
from hpctrain.backend.onednn.conv2d import Conv2dOperator
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.backend.onednn.operator import LibraryOperator, ReorderOperator
from hpctrain.backend.operators import Array, InputView, KernelSet, Operator, StepContext
from hpctrain.backend.specs import AddSpec, ReluSpec, Shape, Spec, TensorSpec
from hpctrain.bench.engine import profile
from hpctrain.bench.engine_step import fallbacks
from hpctrain.core.errors import BackendError, ShapeError
from hpctrain.models import catalogue
from hpctrain.nn.custom import ArrayLayer
from hpctrain.nn.initialise import constant
from hpctrain.nn.layers import AdaptiveAveragePool, BatchNorm, Conv2d, Flatten, Layer, Linear, ReLU, Residual, Sequential
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
    found = {"logits": np.array(program.forward(StepContext(sample_ids=np.arange(batch))))}
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
    with pytest.raises(BackendError, match="computes in float32 or bfloat16, not in float64; set backend to numpy"):
        onednn.make(ReluSpec(), (x,), training=True)
    with pytest.raises(BackendError, match="computes in float32 or bfloat16, not in float64"):
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
    """Convolutions with enough channels to run as Winograd's."""
    convolutions = {"conv1": Conv2d(3, 256, 3, 2), "conv2": Conv2d(256, 256, 3, padding=1)}
    return Sequential({**convolutions, "pool": AdaptiveAveragePool(1), "flatten": Flatten()})


def winograd_layers(program: Program) -> int:
    plans = [step.operator._plan for step in program.steps if isinstance(step.operator, Conv2dOperator)]
    return sum(plan.winograd is not None for plan in plans)


_SCRIPT = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from test_networks import Network, OnednnKernelSet, nets, step, wide, winograd_layers
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


@pytest.mark.slow
@pytest.mark.sample(1)
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


@pytest.mark.slow
@pytest.mark.job
def test_one_pool_of_threads_works() -> None:
    """Products of NumPy's BLAS in a second pool doubled a step with two threads: both pools spin on the same cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", _TWO_THREADS], env=environment, check=True, capture_output=True, text=True, timeout=120
    )
    assert int(done.stdout) <= 2


def separable() -> Layer:
    """A convolution of each channel and one of 1x1, both after few channels whose gradient is asked for."""
    convolutions = {"depthwise": Conv2d(3, 3, 3, 2, padding=1, groups=3, bias=False), "pointwise": Conv2d(3, 32, 1, bias=False)}
    return Sequential({**convolutions, "bn": BatchNorm(32), "relu": ReLU(), "flatten": Flatten(), "fc": Linear(32 * 5 * 4, 5)})


def results_of(model: Layer, kernels: KernelSet, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Logits of training and evaluation, and all gradients, on random images."""
    network = Network(model, SHAPE, kernels, dtype=dtype, seed=3)
    return {"evaluation": evaluate(network, 4)} | step(network, 5, 0)


def test_a_convolution_of_few_channels_after_another_runs_no_plain_loops(onednn: KernelSet) -> None:
    (executed,) = profile(lambda: results_of(separable(), onednn), 1)
    assert any(one.kind == "convolution" and one.propagation == "backward_data" for one in executed)
    assert [one for one in executed if one.implementation.startswith("ref")] == []


def test_random_convolutions_after_another_have_fast_kernels_in_every_phase(onednn: KernelSet) -> None:
    chance = random.Random(0)
    tried = 0
    while tried < 60:
        groups = chance.choice([1, 1, 1, 2, 3, 16])
        channels, kernel, stride = groups * chance.choice([1, 2, 3, 7, 16]), chance.randint(1, 7), chance.randint(1, 3)
        out = groups * chance.choice([1, 3, 5, 16])
        layer = Conv2d(channels, out, kernel, stride, chance.randint(0, 3), dilation=chance.choice([1, 1, 2]), groups=groups)
        x = TensorSpec((chance.choice([1, 3]), chance.randint(1, 15), chance.randint(1, 15), channels))
        try:
            layer.output(x)
        except ShapeError:
            continue
        operator = onednn.make(layer.spec(""), (x,), training=True)
        assert isinstance(operator, Conv2dOperator), (layer.spec(""), x)
        assert not operator.plain_loops
        tried += 1


def test_the_gradient_of_the_images_is_not_asked_for(onednn: KernelSet) -> None:
    program = Network(separable(), (9, 7, 3), onednn).program(2, training=True)
    assert asked(program) == {"depthwise": False, "pointwise": True}
    program = Network(separable(), (9, 7, 3), onednn).program(2, training=True, input_gradient=True)
    assert asked(program) == {"depthwise": True, "pointwise": True}


def asked(program: Program) -> dict[str, bool]:
    """By convolution: it can compute its input's gradient."""
    operators = {s.name: s.operator for s in program.steps if isinstance(s.operator, Conv2dOperator)}
    return {name: operator.primitives["backward data"] is not None for name, operator in operators.items()}


@pytest.mark.parametrize("model", [nets.plain, lambda: nets.residual(synchronised=False), separable])
def test_numpy_stands_in_for_plain_loops(
    onednn: KernelSet, reference: KernelSet, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the library had nothing but plain loops: the same numbers, and every operator says why it is not the library's."""
    monkeypatch.setattr(Primitive, "is_plain", True)
    assert_same(results_of(model(), onednn), results_of(model(), reference, "float64"))
    steps = Network(model(), (9, 7, 3), onednn).program(5, training=True).steps
    computing = [s.operator for s in steps if not isinstance(s.operator, InputView | ReorderOperator)]
    assert len(computing) >= 4
    assert not any(isinstance(operator, LibraryOperator) for operator in computing)
    assert {operator.fallback_reason.partition(" for its ")[0] for operator in computing} <= {
        "oneDNN has only plain loops",
        "oneDNN has no such operation",
    }


def test_a_report_names_what_numpy_computes_and_why(onednn: KernelSet) -> None:
    program = Network(nets.plain(dropout=0.5), (9, 7, 3), onednn).program(2, training=True)
    assert fallbacks(program) == (6, {"oneDNN has no such operation": ["drop"]})


#: A value nearer to zero before a ReLU may round to either side, and the gradient before it is another one: no error of a kernel.
MARGIN = 3e-6

SEEDS = range(30)

N, H, W = 2, 7, 5


def blocks() -> Iterator[tuple[str, Layer, int]]:
    """(name, block, channels in) of all residual blocks."""
    for model in ("resnet18", "resnet50", "resnet20"):
        for name, layer in catalogue.build(model, {}).walk():
            if isinstance(layer, Residual):
                yield f"{model}.{name}", layer, _channels_in(layer)


def _channels_in(block: Residual) -> int:
    first = next(iter(block.children().values()))
    return first.parameters()["weight"].shape[-1]


class Watching(NumpyKernelSet):
    """The reference, which notes how near to zero the inputs of its ReLUs come."""

    def __init__(self) -> None:
        super().__init__()
        self.nearest = np.inf

    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        operator = super().make(spec, inputs, training=training, input_gradient=input_gradient)
        if isinstance(spec, ReluSpec):
            forward = operator.forward

            def watched(context: StepContext) -> None:
                self.nearest = min(self.nearest, float(np.abs(operator.buffers.inputs[0]).min()))
                forward(context)

            operator.forward = watched
        return operator


def results(block: Layer, channels: int, kernels: KernelSet, dtype: str, seed: int) -> dict[str, np.ndarray]:
    """Output, batch statistics, gradient of the input and of all parameters."""
    network = Network(Sequential({"block": block, "flatten": Flatten()}), (H, W, channels), kernels, dtype=dtype)
    random = np.random.default_rng(seed)
    for parameter in network.parameters.values():
        noise = random.standard_normal(parameter.data.shape)
        parameter.data[...] = noise * np.abs(parameter.data).std() if parameter.data.ndim > 1 else 1 + 0.3 * noise
    program = network.program(N, training=True, input_gradient=True)
    program.x[...] = random.standard_normal(program.x.shape)
    found = {"output": np.array(program.forward(StepContext()))}
    program.d_logits[...] = random.standard_normal(program.d_logits.shape)
    program.backward()
    found["d input"] = np.array(program.x_grad)
    found |= {f"d {name}": np.array(parameter.grad) for name, parameter in network.parameters.items()}
    return found


@pytest.mark.sample(12)
@pytest.mark.slow
@pytest.mark.parametrize(("block", "channels"), [pytest.param(b, c, id=name) for name, b, c in blocks()])
def test_residual_blocks_equal_the_reference(onednn: KernelSet, block: Layer, channels: int) -> None:
    for seed in SEEDS:
        watching = Watching()
        wanted = results(block, channels, watching, "float64", seed)
        if watching.nearest > MARGIN:
            break
    else:
        pytest.fail("no seed keeps the ReLUs away from zero")
    found = results(block, channels, onednn, "float32", seed)
    for name, array in wanted.items():
        assert difference(found[name], array) <= 1e-4, f"{name}: {difference(found[name], array):.2e}"


def test_the_environments_word_is_the_only_candidate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(binding.ENVIRONMENT_VARIABLE, str(tmp_path / "libdnnl.so.3"))
    assert binding.candidates() == [str(tmp_path / "libdnnl.so.3")]
    with pytest.raises(OSError, match=rf"^{tmp_path}/libdnnl\.so\.3: cannot open shared object file"):
        binding.load()


def test_the_prefix_comes_before_the_loaders_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(binding.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    assert binding.candidates() == ["libdnnl.so.3"]
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libdnnl.so.3").touch()
    assert binding.candidates() == [str(tmp_path / "lib" / "libdnnl.so.3"), "libdnnl.so.3"]


def test_the_library_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ldconfig, no compiler: a look starts no process, whether or not the library is there."""

    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError(f"a process: {arguments}")

    monkeypatch.delenv(binding.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setattr("os.popen", refuse)
    binding.available()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_declared_copies_of_weights_are_those_that_a_step_makes(onednn: OnednnKernelSet, dtype: str) -> None:
    """Would find a prediction with a copy that no step makes, without one, or with a phase of Winograd counted as direct."""
    if dtype == "bfloat16" and not onednn.multiplies_bfloat16:
        pytest.skip("this processor does not multiply bfloat16")
    layers = [Conv2d(3, 64, 3), ReLU(), Conv2d(64, 64, 3), ReLU(), Conv2d(64, 32, 1), ReLU(), Conv2d(32, 64, 3, stride=2)]
    network = Network(Sequential([*layers, Flatten(), Linear(64 * 13 * 13, 5)]), (32, 32, 3), onednn, dtype=dtype)
    operators = []
    for step in network.program((2,), training=True).plan.steps:
        operator = step.operator
        if not isinstance(operator, Conv2dOperator):
            assert operator.copied_bytes == (0, 0, 0)
            continue
        operators.append(operator)
        plan, weights = operator._plan, 4 * int(np.prod(operator._plan.spec.weight_shape))
        works = (operator._load, getattr(operator, "_store", None), operator._load_backward)
        replaced = (plan.winograd, plan.weight_gradient, plan.winograd_data)
        for work, n_bytes, other in zip(works, operator.copied_bytes, replaced, strict=True):
            assert (work is not None) == (n_bytes > 0)
            assert n_bytes == 0 or n_bytes >= 1.5 * weights  # one side is float32, the other one may be bfloat16
            assert other is None or n_bytes == 0
        if dtype == "float32":
            assert [share is None for share in operator.winograd_shares] == [other is None for other in replaced]
    assert any(operator.copied_bytes[0] for operator in operators)
    shares = [share for operator in operators for share in operator.winograd_shares if share is not None]
    assert bool(shares) == (dtype == "float32")  # in bfloat16, no phase computes by Winograd
    assert all(16 / 36 < share < 1.5 for share in shares)
