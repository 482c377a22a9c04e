"""bfloat16 on CPUs: each result of both sets is within one rounding of float64 on the same rounded numbers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import pytest

from hpctrain.backend.choice import make_backend
from hpctrain.backend.cuda.device import bfloat16_bits
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.backend.operators import Accumulating, InputView, KernelSet, Operator, StepContext
from hpctrain.backend.rounded import BFLOAT16, convert_by_numpy
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
    Spec,
    TensorSpec,
    Window,
    WithRelu,
)
from hpctrain.models import catalogue
from hpctrain.nn.custom import ArrayLayer, ArraySpec
from hpctrain.nn.layers import Conv2d, Flatten, Linear, ReLU, Sequential
from hpctrain.nn.network import Network
from hpctrain.testing.operators import OperatorBench
from tests.support.kernel_pairs import Result, run
from tests.support.rounded import rounded

NOISE = 2.0**-18  # of sums in float32, relative to the largest element


def multiplying_set() -> OnednnKernelSet:
    """The oneDNN set; skips the test if the processor does not multiply bfloat16."""
    if (reason := available()) is not None:
        pytest.skip(reason)
    kernels = OnednnKernelSet()
    if not kernels.multiplies_bfloat16:
        pytest.skip("this processor does not multiply bfloat16")
    return kernels


@pytest.fixture(scope="module", params=["numpy", "onednn"])
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return NumpyKernelSet() if request.param == "numpy" else multiplying_set()


def half_unit(values: np.ndarray) -> np.ndarray:
    """The largest error of rounding each value to bfloat16, which has eight significant bits."""
    return np.ldexp(1.0, np.frexp(values)[1] - 9)


def numbers(draws: np.random.Generator, *shape: int) -> np.ndarray:
    """Random numbers of bfloat16, as float64."""
    return rounded(draws.standard_normal(shape), "bfloat16").astype(np.float64)


def random_window(chance: random.Random, largest: int = 3) -> Window:
    kernel = (chance.randint(1, largest), chance.randint(1, largest))
    edges = [chance.randint(0, side // 2) for side in kernel for _ in (0, 1)]
    return Window(kernel, (chance.randint(1, 2), chance.randint(1, 2)), (edges[0], edges[1], edges[2], edges[3]))


def random_operation(chance: random.Random) -> tuple[Spec, list[tuple[int, ...]]]:
    """A random operation, and the shapes of its inputs."""
    channels, outputs = chance.choice([1, 3, 16, 20, 64]), chance.choice([1, 7, 16, 40])
    shape = (chance.randint(1, 3), chance.randint(3, 9), chance.randint(3, 9), channels)
    groups = chance.choice([1, 1, 1, channels])
    conv = Conv2dSpec(channels, groups * outputs, random_window(chance), groups, chance.random() < 0.5)
    # With many weights and few pixels, the gradient of the weights is a matrix product.
    edges = chance.choice([(1, 1, 1, 1), (0, 0, 0, 0), (0, 1, 2, 0)])
    wide = Conv2dSpec(128, 256, Window((3, 3), (chance.randint(1, 2),) * 2, edges), 1, chance.random() < 0.5)
    narrow = Conv2dSpec(512, 520, Window((1, 1), (chance.randint(1, 2),) * 2, (0, 0, 0, 0)), 1, chance.random() < 0.5)
    patches = Conv2dSpec(3, 1368, Window((8, 8), (8, 8), (0, 0, 0, 0)), 1, chance.random() < 0.5)
    features = shape[1] * shape[2] * channels
    linear = LinearSpec(features, outputs, chance.random() < 0.5)
    sums = chance.random() < 0.5
    return chance.choice(
        [
            *[(conv, [shape]), (WithRelu(conv), [shape])] * 2,
            (wide, [(2, 3, 3, 128)]),
            (WithRelu(wide), [(2, 3, 3, 128)]),
            (narrow, [(3, 2, 3, 512)]),
            (patches, [(2, 16, 16, 3)]),
            (linear, [(shape[0], features)]),
            (WithRelu(linear), [(shape[0], features)]),
            (BatchNormSpec(channels, relu=chance.random() < 0.5), [shape]),
            (BatchNormSpec(channels, relu=True, add=True), [shape, shape]),
            (PoolSpec(chance.choice(["max", "average"]), random_window(chance)), [shape]),
            (AdaptiveAveragePoolSpec((1, 1) if sums else (2, 3)), [shape]),
            (ReluSpec(), [shape]),
            (AddSpec(relu=sums), [shape, shape]),
        ]
    )


def arrays_of(spec: Spec, draws: np.random.Generator) -> dict[str, dict[str, np.ndarray]]:
    """Parameters and statistics. Kernels round the weight of a convolution, so this weight consists of numbers of bfloat16."""
    inner = spec.inner if isinstance(spec, WithRelu) else spec
    parameters: dict[str, np.ndarray] = {}
    statistics: dict[str, np.ndarray] = {}
    if isinstance(inner, Conv2dSpec):
        parameters["weight"] = numbers(draws, *inner.weight_shape)
        if inner.bias:
            parameters["bias"] = draws.standard_normal(inner.channels_out)
    if isinstance(inner, LinearSpec):
        parameters["weight"] = draws.standard_normal(inner.weight_shape)
        if inner.bias:
            parameters["bias"] = draws.standard_normal(inner.features_out)
    if isinstance(inner, BatchNormSpec):
        parameters = {role: draws.standard_normal(inner.channels) for role in ("weight", "bias")}
        roles = ("batch_mean", "batch_var", "running_mean", "running_var")
        statistics = {role: np.abs(draws.standard_normal(inner.channels)) + 0.5 for role in roles}
    groups = {"parameters": parameters, "statistics": statistics}
    return {
        name: {role: rounded(values, "float32").astype(np.float64) for role, values in group.items()}
        for name, group in groups.items()
    }


def assert_one_rounding(found: Result, exact: Result, float32: set[str], what: str) -> None:
    for name, wanted in exact.arrays().items():
        actual = found.arrays()[name]
        assert actual.shape == wanted.shape, f"{name} of {what}"
        bound = (0.0 if name in float32 else half_unit(wanted)) + NOISE * max(1.0, float(np.abs(wanted).max(initial=0.0)))
        worst = float((np.abs(actual - wanted) / bound).max(initial=0.0))
        assert worst <= 1.0, f"{name} of {what} differs by {worst:.3g} times one rounding"


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(400))
def test_results_of_random_operations_are_rounded_once(kernels: KernelSet, seed: int) -> None:
    """No sum is in bfloat16, and no result is rounded twice. Two tensors of one call share no part of scratch."""
    chance, draws = random.Random(seed), np.random.default_rng(seed)
    spec, shapes = random_operation(chance)
    xs, arrays = [numbers(draws, *shape) for shape in shapes], arrays_of(spec, draws)
    dy = numbers(draws, *spec.output(*map(TensorSpec, shapes)).shape)
    reference, what = NumpyKernelSet(), f"{spec} on {shapes}"
    made = kernels.make(spec, tuple(TensorSpec(shape, "bfloat16") for shape in shapes), training=True)
    if isinstance(made, InputView):
        return
    before = [numbers(draws, *shape) for shape in shapes] if isinstance(made, Accumulating) and chance.random() < 0.5 else None
    options = {**arrays, "output_grad": dy, "accumulate": before, "input_first": not isinstance(spec, BatchNormSpec)}
    exact = run(reference, spec, xs, dtype="float64", **options)
    roles = {f"d {role}" for role in arrays["parameters"]} | arrays["statistics"].keys()
    assert_one_rounding(run(kernels, spec, xs, dtype="bfloat16", **options), exact, roles, what)
    evaluated = run(reference, spec, xs, dtype="float64", **arrays)
    assert_one_rounding(run(kernels, spec, xs, dtype="bfloat16", **arrays), evaluated, roles, f"{what} in evaluation")


def test_numpy_rounds_to_nearest_even_as_devices_do() -> None:
    """The conversion does not truncate, and NaN does not become a number."""
    bits = np.random.default_rng(0).integers(0, 2**32, 1 << 20, np.uint32)
    values = bits.view(np.float32)
    target = np.empty(values.shape, BFLOAT16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        convert_by_numpy(values, target)()
    found, wanted = target.view(np.uint16), bfloat16_bits(values)
    numeric = ~np.isnan(values)
    np.testing.assert_array_equal(found[numeric], wanted[numeric])
    assert np.isnan(target[~numeric].astype(np.float32)).all()


def test_both_sets_convert_alike() -> None:
    """The library rounds to nearest even, as NumPy's conversion does."""
    onednn = multiplying_set()
    values = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    by_numpy, by_library = np.empty(values.shape, BFLOAT16), np.empty(values.shape, BFLOAT16)
    convert_by_numpy(values, by_numpy)()
    onednn._conversion(values, by_library)()
    np.testing.assert_array_equal(by_numpy.view(np.uint16), by_library.view(np.uint16))


@pytest.mark.parametrize("spec", [DropoutSpec(0.4, "d"), DropoutSpec(0.4, "d", per_sample=True), FlattenSpec()], ids=str)
def test_dropout_and_flatten_equal_those_of_float32(kernels: KernelSet, spec: Spec) -> None:
    x = rounded(np.random.default_rng(0).standard_normal((6, 3, 3, 5)), "bfloat16")
    halves, floats = (OperatorBench(kernels, spec, [x], dtype=dtype) for dtype in ("bfloat16", "float32"))
    context = StepContext(sample_ids=np.arange(6))
    np.testing.assert_array_equal(halves.forward(context), rounded(floats.forward(context), "bfloat16"))
    dy = rounded(np.random.default_rng(1).standard_normal(floats.forward(context).shape), "bfloat16")
    (ours,), (wanted,) = halves.backward(dy).inputs, floats.backward(dy).inputs
    np.testing.assert_array_equal(ours, rounded(wanted, "bfloat16"))


def test_sums_of_the_arithmetic_service_are_rounded_once(kernels: KernelSet) -> None:
    """Means over pixels are not added in bfloat16, in which 256 + 1 is 256."""
    arithmetic = kernels.arithmetic
    source, mean = np.ones((2, 32, 32, 3), BFLOAT16), np.zeros((2, 1, 1, 3), BFLOAT16)
    arithmetic.sum_pixels(mean, source, 1.0)
    np.testing.assert_array_equal(arithmetic.to_host(mean), np.full((2, 1, 1, 3), 1024.0, np.float32))
    arithmetic.spread_pixels(source, mean, 1 / 3)
    np.testing.assert_array_equal(arithmetic.to_host(source), rounded(np.full(source.shape, 1024 / 3), "bfloat16"))
    assert arithmetic.fetch(mean).result().dtype == np.float32


class Doubled(ArrayLayer):
    """A layer of a user, whose code supports only float32."""

    def output_shape(self, shape):
        return shape

    def forward(self, x, parameters, context, saved):
        assert x.dtype == np.float32
        saved["x"] = x
        return 2 * x

    def backward(self, x, dy, parameters, saved):
        assert dy.dtype == np.float32
        np.testing.assert_array_equal(saved["x"], x)
        return 2 * dy, {}


def test_layers_of_users_compute_in_float32(kernels: KernelSet) -> None:
    """A layer of a user receives no arrays of bfloat16, and its gradient does not overwrite its saved input."""
    layers = {"conv": Conv2d(3, 16, 3), "double": Doubled(), "relu": ReLU(), "flat": Flatten(), "fc": Linear(16 * 36, 5)}
    network = Network(Sequential(layers), (8, 8, 3), kernels, dtype="bfloat16")
    program = network.program(4, training=True)
    assert program.x.dtype == BFLOAT16
    program.set_input(np.random.default_rng(0).standard_normal((4, 8, 8, 3)))
    logits = np.array(kernels.arithmetic.to_host(program.forward(StepContext())))
    program.loss(np.arange(4), 4)
    program.backward()
    other = Network(Sequential(layers), (8, 8, 3), NumpyKernelSet(), dtype="float32")
    expected = other.program(4, training=True)
    expected.set_input(np.random.default_rng(0).standard_normal((4, 8, 8, 3)))
    wanted = expected.forward(StepContext())
    assert np.abs(logits - wanted).max() < 0.03 * np.abs(wanted).max()
    assert network.parameters["conv.weight"].grad.dtype == np.float32
    assert np.abs(network.parameters["conv.weight"].grad).max() > 0


def test_the_operator_of_a_users_layer_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constructor of a user may allocate memory or open files."""
    made: list[str] = []
    make = ArraySpec.operator

    def counted(spec: ArraySpec, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        made.append(inputs[0].dtype)
        return make(spec, inputs, training=training)

    monkeypatch.setattr(ArraySpec, "operator", counted)
    layers = {"double": Doubled(), "flat": Flatten(), "fc": Linear(12, 5)}
    Network(Sequential(layers), (2, 2, 3), NumpyKernelSet(), dtype="bfloat16").program(4, training=True)
    assert made == ["float32"]


#: (model, batch, pixels) -> upper bound of the training arena in bfloat16 relative to float32, which changes may only lower
ARENAS = {
    ("resnet50", 8, 224): 0.50,
    ("vgg16", 2, 224): 0.41,
    ("resnet20", 64, 32): 0.46,
    ("small", 32, 28): 0.54,
    ("resnet34", 12, 48): 0.72,
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("task", ARENAS, ids=str)
def test_training_in_bfloat16_takes_nearly_half_of_the_memory(task: tuple[str, int, int]) -> None:
    """Activations are not in float32, and float32 scratch does not take the memory that they save."""
    multiplying_set()
    model, batch, pixels = task
    arenas = []
    for precision in ("bfloat16", "float32"):
        backend = make_backend("onednn", precision=precision)
        shape = (pixels, pixels, catalogue.image_shape(model)[2])
        network = Network(catalogue.build(model, {}), shape, backend.kernels, dtype=backend.dtype)
        arenas.append(network.arena_bytes(batch, training=True))
    assert arenas[0] <= ARENAS[task] * arenas[1], f"{arenas[0]} of {arenas[1]} bytes"


def _backend(**environment: str) -> subprocess.CompletedProcess[str]:
    program = "from hpctrain.backend.choice import make_backend; make_backend('onednn', precision='bfloat16')"
    settings: Mapping[str, str] = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", program], env=settings, capture_output=True, text=True)


@pytest.mark.job
@pytest.mark.parametrize("limit", ["AVX512_CORE", "AVX2"])
def test_a_processor_that_does_not_multiply_bfloat16_is_refused(limit: str) -> None:
    """No run emulates the instructions, which takes several times as long as float32."""
    if (reason := available()) is not None:
        pytest.skip(reason)
    message = _backend(ONEDNN_MAX_CPU_ISA=limit).stderr
    assert "precision is bfloat16, which oneDNN cannot multiply on this processor" in message
    assert "set precision to float32, or backend to numpy for a slow reference." in message
