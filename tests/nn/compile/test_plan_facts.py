"""Facts of a plan: who adds to which gradient, and how a step and a tensor are called in a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import Action, Region
from hpctrain.nn.compile.plan_facts import LOSS, PlanFacts
from hpctrain.nn.compile.symbolic_memory import InvalidPlanError, gradient
from tests.support.wrong_plans import GRAPHS


def _facts(network: str) -> PlanFacts:
    return PlanFacts(compile_graph(GRAPHS[network](), NumpyKernelSet(), training=True))


def test_a_gradient_is_complete_when_all_readers_have_added_to_it() -> None:
    facts = _facts("preactivation")
    steps = {step.name: k for k, step in enumerate(facts.plan.steps)}
    tensor = facts.plan.steps[steps["conv"]].output
    assert facts.complete_gradient(tensor) == gradient(tensor, frozenset({(steps["block.relu"], 0), (steps["block.add"], 1)}))
    assert facts.complete_gradient(facts.plan.output) == gradient(facts.plan.output, frozenset({LOSS}))


def test_behind_a_view_the_gradient_is_that_of_its_output() -> None:
    facts = _facts("plain")
    k, flatten = next((k, step) for k, step in enumerate(facts.plan.steps) if step.name == "flatten")
    assert facts.grad_owner(flatten.inputs[0]) == flatten.output
    assert not facts.passes_back(k)
    assert facts.views_of(flatten.inputs[0]) == [flatten.output]


def test_sentences_name_step_action_and_tensor() -> None:
    facts = _facts("plain")
    assert facts.name(0) == "the images (tensor 0)"
    assert str(facts.error(Action.INPUT, 0, "is late")) == (
        "conv1 (the gradient of its input) is late; the step makes the output of conv1 (tensor 1)."
    )


def test_a_place_of_the_wrong_size_or_outside_of_the_arena_is_refused() -> None:
    plan = _facts("plain").plan
    for region in (Region(0, plan.memory[0].output.size_bytes - 4), Region(plan.arena_bytes, plan.memory[0].output.size_bytes)):
        memory = (replace(plan.memory[0], output=region), *plan.memory[1:])
        with pytest.raises(InvalidPlanError, match=r"The place of the output of conv1 \(tensor 1\) as conv1 has it"):
            PlanFacts(replace(plan, memory=memory)).check_places(0)
