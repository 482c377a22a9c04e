"""Captured programs, and programs side by side: the bits of plain programs, and hooks and operators in their order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.conv2d import Conv2dOperator
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.backend.operators import Array, CapturedWork, CapturesWork, KernelSet, Operator, StepContext
from hpctrain.models import catalogue
from hpctrain.nn.captured_program import CapturedProgram
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import Parameter
from hpctrain.nn.program import Program, SideBySide, StepHooks, alike
from tests.support import nets

SHAPE = (9, 7, 3)

CALLS = ("forward", "backward_parameters", "backward_input")

SLICES: dict[str, Callable[[Sequence[str]], dict[str, list[int]]]] = {
    "none": lambda names: {},
    "all together": lambda names: {name: [0] for name in names},
    "each": lambda names: {name: [k] for k, name in enumerate(names)},
    "pairs": lambda names: {name: [k // 2] for k, name in enumerate(names)},
    "across": lambda names: {name: [k % 3, 3 + k // 4] for k, name in enumerate(names)},
    "some": lambda names: {name: [k] for k, name in enumerate(names) if k % 3 == 1},
}


class _Work:
    """Calls that were captured."""

    def __init__(self, log: list[Any]) -> None:
        self.calls: list[Callable[[], None]] = []
        self._log = log

    def launch(self) -> None:
        self._log.append("launch")
        for call in self.calls:
            call()


class _CapturingSet(CapturesWork, NumpyKernelSet):
    """The NumPy set; inside of a capture its operators' calls are kept for later. log: of launches, and of what hooks add."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.captured: list[_Work] = []
        self._work: _Work | None = None
        self.arithmetic = _Adds(self)

    def make(self, spec: Any, inputs: Any, *, training: bool, input_gradient: bool = True) -> Operator:
        operator = super().make(spec, inputs, training=training, input_gradient=input_gradient)
        for name in CALLS:
            setattr(operator, name, self.kept(getattr(operator, name)))
        return operator

    def kept(self, call: Callable[..., None]) -> Callable[..., None]:
        def keep_or_call(*arguments: Any) -> None:
            if self._work is None:
                self.log.append("call")
                call(*arguments)
            else:
                self._work.calls.append(lambda: call(*arguments))

        return keep_or_call

    @contextlib.contextmanager
    def capture(self) -> Iterator[CapturedWork]:
        assert self._work is None
        self._work = _Work(self.log)
        self.captured.append(self._work)
        yield self._work
        self._work = None


class _Adds(HostArithmetic):
    def __init__(self, kernels: _CapturingSet) -> None:
        super().__init__()
        self.add = kernels.kept(super().add)  # type: ignore[method-assign]


class _Log(StepHooks):
    """Every event of a step. factors: a linear layer's gradients are made elsewhere."""

    def __init__(self, log: list[Any], *, factors: bool = False) -> None:
        self._log, self._factors = log, factors

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        self._log.extend(("before", parameter.name) for parameter in parameters)

    def takes_sufficient_factors(self, parameters: Sequence[Parameter]) -> bool:
        return self._factors

    def grad_ready(self, parameter: Parameter) -> None:
        self._log.append(("ready", parameter.name))

    def data_free(self, parameter: Parameter) -> None:
        self._log.append(("free", parameter.name))


def _network(model: Callable[[], Layer], kernels: NumpyKernelSet) -> Network:
    return Network(model(), SHAPE, kernels, dtype="float64", seed=5)


def _step(network: Network, step: int, hooks: StepHooks) -> tuple[Array, Array]:
    """The logits and all gradients of a step on images of its own."""
    random = np.random.default_rng(step)
    program = network.program(3, training=True)
    program.x[...] = random.standard_normal((3, *SHAPE))
    logits = program.forward(StepContext(step=step, sample_ids=np.arange(3)), hooks).copy()
    program.loss(random.integers(0, 5, 3), 3)
    program.backward(hooks)
    return logits, np.concatenate([group.grad for group in network.groups.values()])


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("model", [nets.plain, nets.residual])
def test_bits_do_not_depend_on_being_captured(model: Callable[[], Layer], slices: str) -> None:
    kernels = _CapturingSet()
    captured, plain = _network(model, kernels), _network(model, NumpyKernelSet())
    captured.slices = SLICES[slices](list(captured.parameters))
    assert isinstance(captured.program(3, training=True), CapturedProgram)
    for step in range(4):
        for one, other in zip(_step(captured, step, StepHooks()), _step(plain, step, StepHooks()), strict=True):
            np.testing.assert_array_equal(one, other)
    assert kernels.captured
    assert "call" not in kernels.log[kernels.log.index("launch") :]


@pytest.mark.parametrize("slices", SLICES)
def test_hooks_are_called_once_each_and_between_the_right_spans(slices: str) -> None:
    kernels = _CapturingSet()
    network = _network(nets.residual, kernels)
    names = list(network.parameters)
    network.slices = SLICES[slices](names)
    _step(network, 0, StepHooks())
    eager: list[Any] = []
    _step(_network(nets.residual, NumpyKernelSet()), 0, _Log(eager))
    for step in (1, 2):
        kernels.log.clear()
        _step(network, step, _Log(kernels.log))
        events = [event for event in kernels.log if event != "launch"]
        for kind in ("before", "ready", "free"):
            assert [event for event in events if event[0] == kind] == [event for event in eager if event[0] == kind]
        assert kernels.log.count("launch") == len(kernels.captured)
        # A slice's last gradient is announced before anything else is launched, so that its message starts then.
        for k in {k for held in network.slices.values() for k in held}:
            members = {("ready", name) for name, held in network.slices.items() if k in held}
            complete = max(kernels.log.index(member) for member in members)
            launches = [place for place, event in enumerate(kernels.log[:complete]) if event == "launch"]
            assert members & set(kernels.log[launches[-1] : complete + 1])


def test_layers_whose_gradients_are_made_elsewhere_are_never_captured() -> None:
    kernels = _CapturingSet()
    network = _network(nets.plain, kernels)
    for step in range(3):
        _step(network, step, _Log([], factors=True))
    assert kernels.captured == []


def test_a_set_with_capturing_off_captures_nothing() -> None:
    kernels = _CapturingSet()
    kernels.stop_capturing()
    assert not isinstance(_network(nets.plain, kernels).program(3, training=True), CapturedProgram)


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


def _paired_network(kernels: KernelSet, model: str = "residual") -> Network:
    if model == "residual":
        return Network(nets.residual(synchronised=False), _SHAPE, kernels)
    return Network(catalogue.build("vgg11_bn", {"classes": 5, "width": 0.25}), (32, 32, 3), kernels)


def _batch(network: Network, program: Program, place: int) -> tuple[StepContext, np.ndarray]:
    random = np.random.default_rng(place)
    program.set_input(random.standard_normal(program.x.shape, np.float32))
    labels = random.integers(0, network.classes, program.batch)
    return StepContext(training=True, sample_ids=np.arange(program.batch) + 100 * place), labels


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
@pytest.mark.sample(2)
@pytest.mark.parametrize("kernels", [NumpyKernelSet, OnednnKernelSet])
@pytest.mark.parametrize("model", ["residual", "vgg"])
@pytest.mark.parametrize("batches", [(3, 3, 3, 3), (4, 3), (2, 1, 0), (5,)])
def test_bits_are_those_of_one_after_another(kernels: type[KernelSet], model: str, batches: tuple[int, ...]) -> None:
    """Twice, as weights change in between: no copy of the old ones is left."""
    network, other = (_paired_network(kernels(), model) for _ in range(2))
    for _ in range(2):
        kept, outputs = _run(network, network.side_by_side([(batch,) for batch in batches]))
        assert (kept.gradients, outputs) == _one_by_one(other, batches)
        for trained in (network, other):
            trained.groups["all"].data[...] *= 1.1


@pytest.mark.parametrize("kernels", [NumpyKernelSet, OnednnKernelSet])
def test_an_operator_runs_for_all_before_the_next_one(kernels: type[KernelSet]) -> None:
    network = _paired_network(kernels())
    kept, _ = _run(network, network.side_by_side([(3,), (3,), (2,)]))
    for first in range(0, len(kept.order), 3):
        group = kept.order[first : first + 3]
        assert [place for *_, place in group] == [0, 1, 2]
        assert len({(phase, name) for phase, name, _ in group}) == 1


def test_too_different_plans_follow_one_another() -> None:
    """oneDNN computes nothing for no samples; other operators stand there."""
    network = _paired_network(OnednnKernelSet())
    programs = network.side_by_side([(2,), (0,)])
    assert not alike([program.plan for program in programs])
    kept, _ = _run(network, programs)
    forward = [place for phase, _, place in kept.order if phase == "forward"]
    assert forward == sorted(forward)
    assert set(forward) == {0, 1}


def test_weights_are_copied_to_the_kernels_format_once() -> None:
    network = _paired_network(OnednnKernelSet())
    first, *others = ([step.operator for step in program.steps] for program in network.side_by_side([(3,)] * 3))
    copying = [k for k, operator in enumerate(first) if isinstance(operator, Conv2dOperator) and operator._load is not None]
    assert copying
    for operators in others:
        for k in copying:
            follower = operators[k]
            assert isinstance(follower, Conv2dOperator)
            assert follower._load is follower._load_backward is None


def test_each_program_has_its_own_memory() -> None:
    network = _paired_network(NumpyKernelSet())
    programs = list(network.side_by_side([(3,), (3,)]))
    assert not np.shares_memory(programs[0].memory, programs[1].memory)
    assert network.side_by_side([(3,), (3,)]) is network.side_by_side([(3,), (3,)])
    assert next(iter(network.side_by_side([(3,)]))) is network.program(3, training=True)


def test_gradients_are_written_to_their_homes() -> None:
    network = _paired_network(NumpyKernelSet())
    homes = {(name, place): np.zeros_like(parameter.grad) for name, parameter in network.parameters.items() for place in range(2)}

    def home(parameter: Parameter, place: int) -> np.ndarray:
        return homes[parameter.name, place]

    kept, _ = _run(network, network.side_by_side([(2,), (3,)]))
    for parameter in network.parameters.values():
        parameter.grad[...] = 0
    _run(network, network.side_by_side([(2,), (3,)], gradient_buffers=home))
    assert {(place, name): value.tobytes() for (name, place), value in homes.items()} == kept.gradients
    assert not any(parameter.grad.any() for parameter in network.parameters.values())
