"""No phase that a step asks for runs in oneDNN's plain loops; where there is nothing better, NumPy's operator stands in."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.kernels.abilities import InputView
from hpctrain.backend.kernels.base import KernelSet, StepContext
from hpctrain.backend.kernels.onednn.binding import Primitive
from hpctrain.backend.kernels.onednn.conv2d import Conv2dOperator
from hpctrain.backend.kernels.onednn.operator import LibraryOperator
from hpctrain.backend.kernels.onednn.reorder import ReorderOperator
from hpctrain.backend.kernels.specs import Conv2dSpec, TensorSpec, Window
from hpctrain.bench.engine_profile import profile
from hpctrain.bench.engine_step import stand_ins
from hpctrain.errors import ShapeError
from hpctrain.nn.layer import Layer
from hpctrain.nn.layers.batch_norm import BatchNorm
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.relu import ReLU
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.network import Network
from hpctrain.nn.program import Program
from tests.support import nets
from tests.support.kernel_pairs import difference

SPEC = Conv2dSpec(16, 16, Window((3, 3), (1, 1), (0, 0, 0, 0)))


def separable() -> Layer:
    """A convolution of each channel and one of 1x1, both behind few channels whose gradient somebody asks for."""
    convolutions = {"depthwise": Conv2d(3, 3, 3, 2, padding=1, groups=3, bias=False), "pointwise": Conv2d(3, 32, 1, bias=False)}
    return Sequential({**convolutions, "bn": BatchNorm(32), "relu": ReLU(), "flatten": Flatten(), "fc": Linear(32 * 5 * 4, 5)})


def results(model: Layer, kernels: KernelSet, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Logits of training and evaluation, and all gradients, on random images."""
    network = Network(model, (9, 7, 3), kernels, dtype=dtype, seed=3)
    chance = np.random.default_rng(0)
    evaluation, program = network.program(4, training=False), network.program(5, training=True)
    evaluation.x[...] = chance.standard_normal(evaluation.x.shape)
    logits = {"evaluation": evaluation.forward(StepContext(training=False)).copy()}
    program.x[...] = chance.standard_normal(program.x.shape)
    logits["training"] = program.forward(StepContext(global_count=5, sample_ids=np.arange(5))).copy()
    program.loss(chance.integers(0, 5, 5), 5)
    program.backward()
    return logits | {name: parameter.grad for name, parameter in network.parameters.items()}


def test_a_convolution_of_few_channels_behind_another_runs_no_plain_loops(onednn: KernelSet) -> None:
    (executed,) = profile(lambda: results(separable(), onednn), 1)
    assert any(one.kind == "convolution" and one.propagation == "backward_data" for one in executed)
    assert [one for one in executed if one.implementation.startswith("ref")] == []


def test_random_convolutions_behind_another_have_fast_kernels_in_every_phase(onednn: KernelSet) -> None:
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
    ours, theirs = results(model(), onednn), results(model(), reference, "float64")
    assert max(difference(ours[name], theirs[name]) for name in theirs) <= 1e-4
    steps = Network(model(), (9, 7, 3), onednn).program(5, training=True).steps
    computing = [s.operator for s in steps if not isinstance(s.operator, InputView | ReorderOperator)]
    assert len(computing) >= 4
    assert not any(isinstance(operator, LibraryOperator) for operator in computing)
    assert {operator.stands_in_because.partition(" for its ")[0] for operator in computing} <= {
        "oneDNN has only plain loops",
        "oneDNN has no such operation",
    }


def test_a_report_names_what_numpy_computes_and_why(onednn: KernelSet) -> None:
    program = Network(nets.plain(dropout=0.5), (9, 7, 3), onednn).program(2, training=True)
    assert stand_ins(program) == (6, {"oneDNN has no such operation": ["drop"]})


def test_one_phase_in_plain_loops_is_enough(onednn: KernelSet, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = property(lambda primitive: primitive.what.endswith("backward weights"))
    monkeypatch.setattr(Primitive, "is_plain", plain)
    operator = onednn.make(SPEC, (TensorSpec((2, 9, 7, 16)),), training=True)
    assert operator.stands_in_because == "oneDNN has only plain loops for its backward weights"
    assert not onednn.make(SPEC, (TensorSpec((2, 9, 7, 16)),), training=False).stands_in_because
