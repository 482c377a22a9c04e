"""The validator of plans: right ones of all kinds of networks pass, and wrong ones, made by faults on purpose, do not."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.nn.compile import compiler
from hpctrain.nn.compile.symbolic_memory import InvalidPlanError
from hpctrain.nn.compile.validate import ENVIRONMENT_VARIABLE, validate
from tests.support.jobs import clean_environment
from tests.support.wrong_plans import FAULTS, GRAPHS, Fault, steps_of

KERNELS: dict[str, Callable[[], KernelSet]] = {"numpy": NumpyKernelSet, "onednn": OnednnKernelSet}
SEEDS = range(5)
#: Of all wrong plans, the share that must be found.
WANTED = 0.95


def _kernels(name: str) -> KernelSet:
    if name == "onednn" and available() is not None:
        pytest.skip(str(available()))
    return KERNELS[name]()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("network", GRAPHS)
def test_right_plans_pass(network: str, name: str, training: bool) -> None:
    validate(compiler.compile_graph(GRAPHS[network](), _kernels(name), training=training, input_gradient=training))


def _is_found(fault: Fault, kernels: KernelSet, seed: int) -> bool:
    plan = fault.make(steps_of(fault.network, kernels), random.Random(seed))
    try:
        validate(plan)
    except InvalidPlanError as error:
        sentence = str(error)
        assert sentence.endswith("."), sentence
        assert any(step.name in sentence for step in plan.steps), sentence
        return True
    return False


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_plan_is_found(fault: Fault) -> None:
    kernels = _kernels(fault.kernels)
    missed = [seed for seed in SEEDS if not _is_found(fault, kernels, seed)]
    assert len(missed) <= (1 - WANTED) * len(SEEDS), f"not found with seeds {missed}"


def test_every_test_validates_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.environ[ENVIRONMENT_VARIABLE] == "1"
    assert clean_environment()[ENVIRONMENT_VARIABLE] == "1"  # also in the jobs that tests start
    right = compiler.plan_steps(steps_of("plain", NumpyKernelSet()))
    monkeypatch.setattr(compiler, "plan_steps", lambda *_: replace(right, backward=right.backward[1:]))
    with pytest.raises(InvalidPlanError, match="fc2"):
        compiler.compile_graph(GRAPHS["plain"](), NumpyKernelSet(), training=True)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "0")
    compiler.compile_graph(GRAPHS["plain"](), NumpyKernelSet(), training=True)
