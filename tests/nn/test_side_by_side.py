"""Programs side by side: the numbers of programs one after another, bit by bit, operator by operator where plans allow it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hpctrain.backend.kernels.base import KernelSet, StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.onednn.conv2d import Conv2dOperator
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet
from hpctrain.models import catalogue
from hpctrain.nn.hooks import StepHooks
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import Parameter
from hpctrain.nn.program import Program
from hpctrain.nn.side_by_side import SideBySide, alike
from tests.support import nets

_SHAPE = (8, 8, 3)


class _Kept(StepHooks):
    """Keeps each gradient with the place of the program that it comes from, and the order of operators."""

    def __init__(self) -> None:
        self.place = 0
        self.gradients: dict[tuple[int, str], bytes] = {}
        self.order: list[tuple[str, str, int]] = []

    def turn(self, place: int) -> None:
        self.place = place

    def grad_ready(self, parameter: Parameter) -> None:
        self.gradients[self.place, parameter.name] = parameter.grad.tobytes()

    def operator_done(self, name: str, phase: str) -> None:
        self.order.append((phase, name, self.place))


def _network(kernels: KernelSet, model: str = "residual") -> Network:
    if model == "residual":
        return Network(nets.residual(synchronised=False), _SHAPE, kernels)
    return Network(catalogue.build("vgg11_bn", {"classes": 5, "width": 0.25}), (32, 32, 3), kernels)


def _batch(network: Network, program: Program, place: int) -> tuple[StepContext, np.ndarray]:
    random = np.random.default_rng(place)
    program.set_input(random.standard_normal(program.x.shape, np.float32))
    labels = random.integers(0, network.classes, program.batch)
    return StepContext(training=True, sample_ids=np.arange(program.batch) + 100 * place, global_count=12), labels


def _run(network: Network, programs: SideBySide) -> tuple[_Kept, list[tuple[bytes, bytes]]]:
    kept = _Kept()
    given = [_batch(network, program, place) for place, program in enumerate(programs)]
    programs.forward([context for context, _ in given], kept, kept.turn)
    outputs = []
    for program, (_, labels) in zip(programs, given, strict=True):
        program.loss(labels, 12)
        outputs.append((program.logits.tobytes(), np.asarray(program.fetch_statistics().result()).tobytes()))
    programs.backward(kept, kept.turn)
    return kept, outputs


def _one_by_one(network: Network, batches: Sequence[int]) -> tuple[dict[tuple[int, str], bytes], list[tuple[bytes, bytes]]]:
    gradients, outputs = {}, []
    for place, batch in enumerate(batches):
        program = network.program(batch, training=True)
        kept = _Kept()
        context, labels = _batch(network, program, place)
        program.forward(context, kept)
        program.loss(labels, 12)
        outputs.append((program.logits.tobytes(), np.asarray(program.fetch_statistics().result()).tobytes()))
        program.backward(kept)
        gradients |= {(place, name): value for (_, name), value in kept.gradients.items()}
    return gradients, outputs


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("kernels", [NumpyKernelSet, OnednnKernelSet])
@pytest.mark.parametrize("model", ["residual", "vgg"])
@pytest.mark.parametrize("batches", [(3, 3, 3, 3), (4, 3), (2, 1, 0), (5,)])
def test_bits_are_those_of_one_after_another(kernels: type[KernelSet], model: str, batches: tuple[int, ...]) -> None:
    """Twice, as weights change in between: no copy of the old ones is left."""
    network, other = (_network(kernels(), model) for _ in range(2))
    for _ in range(2):
        kept, outputs = _run(network, network.side_by_side([(batch,) for batch in batches]))
        assert (kept.gradients, outputs) == _one_by_one(other, batches)
        for trained in (network, other):
            trained.groups["all"].data[...] *= 1.1


@pytest.mark.parametrize("kernels", [NumpyKernelSet, OnednnKernelSet])
def test_an_operator_runs_for_all_before_the_next_one(kernels: type[KernelSet]) -> None:
    network = _network(kernels())
    kept, _ = _run(network, network.side_by_side([(3,), (3,), (2,)]))
    for first in range(0, len(kept.order), 3):
        group = kept.order[first : first + 3]
        assert [place for *_, place in group] == [0, 1, 2]
        assert len({(phase, name) for phase, name, _ in group}) == 1


def test_too_different_plans_follow_one_another() -> None:
    """oneDNN computes nothing for no samples; other operators stand there."""
    network = _network(OnednnKernelSet())
    programs = network.side_by_side([(2,), (0,)])
    assert not alike([program.plan for program in programs])
    kept, _ = _run(network, programs)
    forward = [place for phase, _, place in kept.order if phase == "forward"]
    assert forward == sorted(forward)
    assert set(forward) == {0, 1}


def test_weights_are_copied_to_the_kernels_format_once() -> None:
    network = _network(OnednnKernelSet())
    first, *others = ([step.operator for step in program.steps] for program in network.side_by_side([(3,)] * 3))
    copying = [k for k, operator in enumerate(first) if isinstance(operator, Conv2dOperator) and operator._load is not None]
    assert copying
    for operators in others:
        for k in copying:
            follower = operators[k]
            assert isinstance(follower, Conv2dOperator)
            assert follower._load is follower._load_backward is None


def test_each_program_has_its_own_memory() -> None:
    network = _network(NumpyKernelSet())
    programs = list(network.side_by_side([(3,), (3,)]))
    assert not np.shares_memory(programs[0].memory, programs[1].memory)
    assert network.side_by_side([(3,), (3,)]) is network.side_by_side([(3,), (3,)])
    assert next(iter(network.side_by_side([(3,)]))) is network.program(3, training=True)


def test_gradients_are_written_to_their_homes() -> None:
    network = _network(NumpyKernelSet())
    homes = {(name, place): np.zeros_like(parameter.grad) for name, parameter in network.parameters.items() for place in range(2)}

    def home(parameter: Parameter, place: int) -> np.ndarray:
        return homes[parameter.name, place]

    kept, _ = _run(network, network.side_by_side([(2,), (3,)]))
    for parameter in network.parameters.values():
        parameter.grad[...] = 0
    _run(network, network.side_by_side([(2,), (3,)], homes=home))
    assert {(place, name): value.tobytes() for (name, place), value in homes.items()} == kept.gradients
    assert not any(parameter.grad.any() for parameter in network.parameters.values())
