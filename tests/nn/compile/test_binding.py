"""The arena: what an operator scribbles on while it runs is nobody else's, and large scratch needs little room of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hpctrain.backend.kernels.base import Operator, StepContext
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.packing import lower_bound
from hpctrain.nn.compile.plan import ExecutionPlan
from hpctrain.nn.layer import Layer
from hpctrain.nn.network import Network
from hpctrain.nn.program import Program

_RUNS = ("forward", "backward_parameters", "backward_input")
BATCH = 3
# The first has wide 3x3 convolutions, by Winograd; the others residual blocks, whose copies and batch norms run out of turn.
NETWORKS: dict[str, tuple[Callable[[], Layer], int]] = {
    "vgg11": (lambda: catalogue.build("vgg", {"depth": 11, "batch_norm": True, "classes": 5}), 64),
    "resnet18": (lambda: catalogue.build("resnet", {"depth": 18, "width": 0.5, "classes": 5}), 64),
    "resnet50": (lambda: catalogue.build("resnet", {"depth": 50, "width": 0.25, "classes": 5}), 64),
    "resnet20": (lambda: catalogue.build("resnet20", {"classes": 5}), 32),
}


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> Network:
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    build, side = NETWORKS[request.param]
    return Network(build(), (side, side, 3), OnednnKernelSet())


def _planned(network: Network, *, training: bool = True) -> ExecutionPlan:
    return compile_graph(network.graph(BATCH), network.kernels, training=training)


def _scribbling(operator: Operator, method: str) -> Callable[..., None]:
    run = getattr(operator, method)

    def scribble(*arguments: object) -> None:
        operator.buffers.scratch.fill(0xFF)  # not a number in float32
        run(*arguments)
        operator.buffers.scratch.fill(0xFF)

    return scribble


def _step(network: Network, program: Program) -> Iterator[np.ndarray]:
    """The logits and all gradients of one training step."""
    random = np.random.default_rng(1)
    program.x[...] = random.standard_normal(program.x.shape)
    yield program.forward(StepContext(step=0, sample_ids=np.arange(BATCH), global_count=BATCH)).copy()
    program.loss(random.integers(0, 5, BATCH), BATCH)
    program.backward()
    yield network.groups["all"].grad.copy()


@pytest.mark.slow
def test_scratch_is_an_operators_own_only_while_it_runs(network: Network) -> None:
    """Filled with values that are no numbers before and after each use, it changes no bit of what anybody else reads."""
    program = network.program(BATCH, training=True)
    expected = list(_step(network, program))
    having = [step.operator for step in program.steps if step.operator.scratch_bytes]
    assert having
    for operator in having:
        for method in _RUNS:
            setattr(operator, method, _scribbling(operator, method))
    for found, wanted in zip(_step(network, program), expected, strict=True):
        assert np.isfinite(wanted).all()
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
def test_large_scratch_lies_where_activations_are_not(network: Network) -> None:
    planned = _planned(network)
    without = lower_bound([buffer.block for buffer in planned.buffers if buffer.owner[0] != "scratch"])
    largest = max(buffer.region.size_bytes for buffer in planned.buffers if buffer.owner[0] == "scratch")
    assert without <= planned.arena_bytes <= without + largest + (without >> 4)


@pytest.mark.slow
def test_nothing_overlaps_what_lives_at_the_same_time(network: Network) -> None:
    planned = _planned(network)
    for number, mine in enumerate(planned.buffers):
        for other in planned.buffers[:number]:
            apart = mine.region.end <= other.region.offset or other.region.end <= mine.region.offset
            assert apart or not mine.block.meets(other.block)
