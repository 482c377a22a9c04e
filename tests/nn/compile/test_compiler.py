"""The compiler: pure, so the same graph gives the same plan, and nobody can change it afterwards."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import ExecutionPlan
from tests.support.wrong_plans import GRAPHS


def _without_operators(plan: ExecutionPlan) -> dict[str, object]:
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return values | {"steps": [(step.name, step.inputs, step.output) for step in plan.steps]}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("network", GRAPHS)
def test_the_same_graph_gives_the_same_plan(network: str, training: bool) -> None:
    first, second = (compile_graph(GRAPHS[network](), NumpyKernelSet(), training=training) for _ in range(2))
    assert _without_operators(first) == _without_operators(second)


def test_a_plan_cannot_be_changed() -> None:
    plan = compile_graph(GRAPHS["plain"](), NumpyKernelSet(), training=True)
    assert not any(isinstance(value, list | dict | set) for value in vars(plan).values())
    for part in (plan, plan.steps[0], plan.memory[0], plan.x, plan.buffers[0]):
        with pytest.raises(FrozenInstanceError):
            setattr(part, fields(part)[0].name, None)


def test_everything_lies_in_the_arena_and_in_a_buffer() -> None:
    plan = compile_graph(GRAPHS["overlapped"](), NumpyKernelSet(), training=True, input_gradient=True)
    stretches = [buffer.region for buffer in plan.buffers]
    assert max(region.end for region in stretches) <= plan.arena_bytes
    for memory in plan.memory:
        places = (*memory.inputs, memory.output, *memory.input_grads, memory.output_grad, memory.saved, memory.scratch)
        for place in places:
            assert place is None or any(region.offset <= place.offset and place.end <= region.end for region in stretches)
