"""Work of operators against counts by hand and against what plans say of their steps."""

from __future__ import annotations

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import ReluSpec, TensorSpec
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import Action, ExecutionPlan
from hpctrain.nn.network import Network
from hpctrain.nn.program import macs
from hpctrain.planner.machine import OperatorClass
from hpctrain.planner.operator_work import class_of, work_of


NETWORK = Network(catalogue.build("resnet20", {"width": 4}), (16, 16, 3), NumpyKernelSet())


def _plan(batch: int) -> ExecutionPlan:
    return compile_graph(NETWORK.graph(batch), NETWORK.kernels, training=True)


def _all(plan: ExecutionPlan) -> list[tuple[Action, int]]:
    return [*plan.forward, *plan.backward]


def test_forward_operations_are_those_of_the_program() -> None:
    plan = _plan(3)
    products = (OperatorClass.CONVOLUTION, OperatorClass.PRODUCT)
    works = [work_of(plan.steps[k], action, plan.memory[k]) for action, k in plan.forward]
    assert sum(work.flops for work in works) // 2 == pytest.approx(macs(plan), rel=1e-3)
    share = sum(work.flops for work in works if work.kind in products) / sum(work.flops for work in works)
    assert share > 0.9


def test_gradients_of_a_product_take_its_operations_twice_but_once_where_it_reads_images() -> None:
    plan = _plan(2)
    for k, step in enumerate(plan.steps):
        if class_of(step.operator.spec) is OperatorClass.MEMORY:
            continue
        forward, weights, inputs = (
            work_of(step, action, plan.memory[k]).flops for action in (Action.FORWARD, Action.PARAMETERS, Action.INPUT)
        )
        assert weights == forward
        assert inputs == (0 if step.inputs == (0,) else forward)


def test_operations_of_every_action_grow_with_the_samples() -> None:
    once, thrice = _plan(1), _plan(3)
    for action, k in _all(once):
        one, three = work_of(once.steps[k], action, once.memory[k]), work_of(thrice.steps[k], action, thrice.memory[k])
        assert three.flops == 3 * one.flops
        assert one.bytes <= three.bytes <= 3 * one.bytes


def test_an_addition_to_a_gradient_reads_it_too() -> None:
    plan = _plan(2)
    adding = [(k, i) for k, memory in enumerate(plan.memory) for i, adds in enumerate(memory.accumulate) if adds]
    assert adding
    for k, _ in adding:
        step = plan.steps[k]
        assert work_of(step, Action.INPUT, plan.memory[k]).bytes > work_of(step, Action.INPUT).bytes


def test_what_does_nothing_has_no_work() -> None:
    plan = _plan(2)
    for k, step in enumerate(plan.steps):
        assert work_of(step, Action.BEGIN, plan.memory[k]).is_nothing
        assert work_of(step, Action.FREE, plan.memory[k]).is_nothing
        assert step.is_view == work_of(step, Action.FORWARD, plan.memory[k]).is_nothing


def test_a_relu_reads_and_writes_once() -> None:
    x = TensorSpec((2, 4, 4, 3))
    operator = NumpyKernelSet().make(ReluSpec(), (x,), training=True)
    plan = _plan(1)
    node = next(step.node for step in plan.steps if isinstance(step.operator.spec, ReluSpec))
    step = type(plan.steps[0])("relu", operator, (0,), 1, node)
    assert work_of(step, Action.FORWARD).bytes == 2 * x.bytes
