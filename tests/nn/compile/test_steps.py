"""Steps of a graph: one for each node, copies where layouts differ, and names of memory behind views."""

from __future__ import annotations

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.nn.compile.steps import make_steps
from tests.support.wrong_plans import GRAPHS, steps_of


def test_every_step_gets_the_layouts_that_it_wants() -> None:
    if (reason := available()) is not None:
        pytest.skip(reason)
    steps = steps_of("wide", OnednnKernelSet())
    copies = [step for step in steps.steps if step.node is None]
    assert copies
    for step in steps.steps:
        assert tuple(steps.tensors[tensor].layout for tensor in step.inputs) == tuple(x.layout for x in step.operator.inputs)
    assert len({(step.inputs, steps.tensors[step.output].layout) for step in copies}) == len(copies)  # none is made twice
    assert steps.tensors[steps.output].layout == "NHWC"


def test_a_view_names_the_memory_of_its_input_and_its_only_readers_gradient_is_the_inputs() -> None:
    steps = steps_of("plain", NumpyKernelSet())
    k = next(k for k, step in enumerate(steps.steps) if step.name == "flatten")
    source, output = steps.steps[k].inputs[0], steps.steps[k].output
    assert steps.value(output) == source
    assert steps.grad_value(source) == output
    assert not steps.passes_back(k)


def test_evaluation_has_no_gradients() -> None:
    for training in (True, False):
        steps = make_steps(GRAPHS["plain"](), NumpyKernelSet(), training=training, input_gradient=False)
        assert any(steps.needs_grad) is training
        assert not steps.needs_grad[0]
