"""Operators at their places in memory: a reader gets the array that its input was written to, gradients go where they belong."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from hpctrain.backend.kernels.abilities import FollowsOperator
from hpctrain.backend.kernels.base import Buffers, KernelSet, Operator
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import Parameter
from hpctrain.nn.program import Program
from tests.support import nets

_SHAPE = (9, 7, 3)


def _program(kernels: KernelSet, **options: object) -> tuple[Network, Program]:
    network = Network(nets.residual(synchronised=False), _SHAPE, kernels, **options)  # type: ignore[arg-type]
    return network, network.program(3, training=True)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("kernels", [NumpyKernelSet, OnednnKernelSet])
def test_a_reader_gets_the_array_that_its_input_was_written_to(kernels: type[KernelSet]) -> None:
    _, program = _program(kernels())
    written = {0: _address(program.x)}
    for planned, bound in zip(program.plan.steps, program.steps, strict=True):
        buffers = bound.operator.buffers
        assert [_address(x) for x in buffers.inputs] == [written[tensor] for tensor in planned.inputs]
        written[planned.output] = _address(buffers.output)
    assert written[program.plan.output] == _address(program.logits)


def test_operators_have_the_parameters_and_gradients_of_their_groups() -> None:
    network, program = _program(NumpyKernelSet())
    seen = set()
    for planned, bound in zip(program.plan.steps, program.steps, strict=True):
        for role, name in planned.node.parameters.items() if planned.node else ():
            parameter = network.parameters[name]
            assert bound.operator.buffers.parameters[role] is parameter.data
            assert bound.operator.buffers.gradients[role] is parameter.grad
            seen.add(name)
    assert seen == set(network.parameters)


def test_a_frozen_layers_gradient_is_nobodys() -> None:
    network, program = _program(NumpyKernelSet(), frozen=("conv1",))
    (frozen,) = (bound for bound in program.steps if bound.name == "conv1")
    assert frozen.parameters == ()
    assert not any(
        np.shares_memory(frozen.operator.buffers.gradients.get("weight", np.zeros(1)), group.grad)
        for group in network.groups.values()
    )


def test_followers_hear_of_their_leader_before_they_are_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, Operator]] = []

    class _Following(FollowsOperator):
        def follow(self, first: Operator) -> None:
            heard.append(("follow", first))

    @cache  # plans of operators of other types have no leader
    def kind(plain: type[Operator]) -> type[Operator]:
        return type("Following", (_Following, plain), {})

    kernels = NumpyKernelSet()
    make = kernels.make

    def following(*arguments: object, **options: object) -> Operator:
        operator = make(*arguments, **options)  # type: ignore[arg-type]
        bind = operator.bind

        def bound(buffers: Buffers) -> None:
            heard.append(("bind", operator))
            bind(buffers)

        operator.__class__ = kind(type(operator))
        operator.bind = bound  # type: ignore[method-assign]
        return operator

    monkeypatch.setattr(kernels, "make", following)
    network = Network(nets.plain(), _SHAPE, kernels)
    heard.clear()
    first, second = network.side_by_side([(2,), (3,)])
    led = [operator for what, operator in heard[len(first.steps) :] if what == "follow"]
    assert [what for what, _ in heard] == ["bind"] * len(first.steps) + ["follow", "bind"] * len(second.steps)
    assert led == [step.operator for step in first.steps]


def test_homes_decide_where_gradients_go() -> None:
    network = Network(nets.plain(), _SHAPE, NumpyKernelSet())
    given: dict[tuple[str, int], np.ndarray] = {}

    def home(parameter: Parameter, place: int) -> np.ndarray:
        return given.setdefault((parameter.name, place), np.zeros_like(parameter.grad))

    for place, program in enumerate(network.side_by_side([(2,), (3,)], homes=home)):
        for planned, bound in zip(program.plan.steps, program.steps, strict=True):
            for role, name in planned.node.parameters.items() if planned.node else ():
                assert bound.operator.buffers.gradients[role] is given[name, place]
