"""Lifetimes: nobody reads what is said to be unused, and what is made for the next action only lives no longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from hpctrain.backend.kernels.base import KernelSet, Operator, StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.backend.kernels.specs import Spec, TensorSpec
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.liveness import Timeline
from hpctrain.nn.compile.order import backward_actions, forward_actions
from hpctrain.nn.compile.packing import lower_bound
from hpctrain.nn.compile.plan import Action, ExecutionPlan, Region
from hpctrain.nn.compile.recomputation import recomputed_tensors
from hpctrain.nn.compile.steps import Steps, make_steps
from hpctrain.nn.layer import Layer
from hpctrain.nn.network import Network
from tests.support import nets
from tests.support.poison import overwritten_share, poisoned

BATCH = 3
NETWORKS: dict[str, tuple[Callable[[], Layer], int]] = {
    "plain": (lambda: nets.plain(dropout=0.3), 9),
    "residual": (nets.residual, 9),
    "vgg16": (lambda: catalogue.build("vgg16", {"width": 0.25, "classes": 5}), 33),
    "vgg11_bn": (lambda: catalogue.build("vgg", {"depth": 11, "batch_norm": True, "width": 0.5, "classes": 5}), 32),
    "resnet18": (lambda: catalogue.build("resnet", {"depth": 18, "width": 0.25, "classes": 5}), 65),
    "resnet50": (lambda: catalogue.build("resnet", {"depth": 50, "width": 0.25, "classes": 5}), 64),
    "resnet20": (lambda: catalogue.build("resnet20", {"classes": 5, "shortcut": "projection"}), 33),
}
KERNELS: dict[str, Callable[[], KernelSet]] = {"numpy": NumpyKernelSet, "onednn": OnednnKernelSet}


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    if request.param == "onednn" and available() is not None:
        pytest.skip(str(available()))
    return KERNELS[request.param]()


def _step(network: Network, *, input_gradient: bool) -> dict[str, np.ndarray]:
    """Logits, gradients, and the logits of an evaluation: all that a program hands out."""
    random = np.random.default_rng(1)
    x, labels = random.standard_normal((BATCH, *network.image_shape)), random.integers(0, 5, BATCH)
    context = StepContext(step=2, sample_ids=np.arange(BATCH), global_count=BATCH)
    program = network.program(BATCH, training=True, input_gradient=input_gradient)
    program.x[...] = x
    logits = program.forward(context).copy()
    program.loss(labels, BATCH)
    program.backward()
    found = {"logits": logits, "gradients": network.groups["all"].grad.copy()}
    if input_gradient:
        assert program.x_grad is not None
        found["x"] = program.x_grad.copy()
    evaluation = network.program(BATCH, training=False)
    evaluation.x[...] = x
    return {**found, "evaluation": evaluation.forward(StepContext(training=False)).copy()}


@pytest.mark.slow
@pytest.mark.parametrize("input_gradient", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_nobody_reads_what_is_not_in_use(kernels: KernelSet, name: str, input_gradient: bool) -> None:
    build, side = NETWORKS[name]
    network = Network(build(), (side, side - 1 if side == 9 else side, 3), kernels)
    expected = _step(network, input_gradient=input_gradient)
    with poisoned() as poisoners:
        found = _step(network, input_gradient=input_gradient)
    assert overwritten_share(poisoners) > 1  # an action leaves much unused
    for what, values in expected.items():
        assert np.isfinite(values).all()
        np.testing.assert_array_equal(found[what], values, err_msg=what)


class _Forgetful(NumpyKernelSet):
    """Its operators say that backward reads no input."""

    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        operator = super().make(spec, inputs, training=training, input_gradient=input_gradient)
        operator.needs_inputs = (False,) * len(inputs)
        return operator


def test_a_lifetime_cut_short_is_found() -> None:
    """The test above can fail: a network that reads in backward what its operators do not declare."""
    network = Network(nets.plain(), (9, 7, 3), NumpyKernelSet())
    expected = _step(network, input_gradient=False)
    forgetful = Network(nets.plain(), (9, 7, 3), _Forgetful())
    with poisoned():
        found = _step(forgetful, input_gradient=False)
    assert not np.array_equal(found["gradients"], expected["gradients"])


def _steps_and_times(network: Network) -> tuple[Steps, Timeline]:
    steps = make_steps(network.graph(3), network.kernels, training=True, input_gradient=False)
    return steps, Timeline(steps, forward_actions(steps), backward_actions(steps, recomputed_tensors(steps)))


def test_times_count_actions() -> None:
    steps, line = _steps_and_times(Network(nets.residual(), (9, 7, 3), NumpyKernelSet()))
    n = len(steps.steps)
    assert [line.forward(k)[-1] for k in range(n)] == list(range(n))
    assert line.loss == n
    inputs = [time for k in range(n) for time in line.backward(k, (Action.INPUT,))]
    assert inputs == sorted(inputs, reverse=True)
    assert line.end > max(inputs) > line.loss


def test_evaluation_needs_much_less_memory() -> None:
    network = Network(nets.residual(), (9, 7, 3), NumpyKernelSet())
    needs = []
    for training in (True, False):
        buffers = compile_graph(network.graph(8), network.kernels, training=training).buffers
        needs.append(lower_bound([buffer.block for buffer in buffers if buffer.owner[0] != "scratch"]))
    assert needs[1] < needs[0] / 3


def test_every_use_lies_in_its_buffers_life() -> None:
    network = Network(nets.residual(), (9, 7, 3), NumpyKernelSet())
    plan, (_, line) = compile_graph(network.graph(3), network.kernels, training=True), _steps_and_times(network)
    for k, step in enumerate(plan.steps):
        computes = line.backward(k, (Action.PARAMETERS, Action.INPUT))
        for region, needed in zip(plan.memory[k].inputs, step.operator.needs_inputs, strict=True):
            assert _live(plan, region, "activation", [*line.forward(k), *(computes if needed else ())])
        gradient = plan.memory[k].output_grad
        assert gradient is None or _live(plan, gradient, "gradient", computes)


def _live(plan: ExecutionPlan, region: Region, kind: str, times: Sequence[int]) -> bool:
    """At each of these times some buffer of that kind is in use there."""
    spans = [
        span for buffer in plan.buffers if buffer.owner[0] == kind and buffer.region == region for span in buffer.block.spans
    ]
    return all(any(first <= time <= last for first, last in spans) for time in times)
