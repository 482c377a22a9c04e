"""Captured programs: the bits of a program that is not captured, whatever the spans; hooks between spans and never inside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.kernels.base import Array, CapturedWork, CapturesWork, Operator, StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.nn.captured_program import CapturedProgram
from hpctrain.nn.hooks import StepHooks
from hpctrain.nn.layer import Layer
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import Parameter
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
    logits = program.forward(StepContext(step=step, sample_ids=np.arange(3), global_count=3), hooks).copy()
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
        # A slice's last gradient is told of before anything else is launched, so that its message starts then.
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


def test_a_set_that_is_told_not_to_captures_nothing() -> None:
    kernels = _CapturingSet()
    kernels.captures = False
    assert not isinstance(_network(nets.plain, kernels).program(3, training=True), CapturedProgram)
