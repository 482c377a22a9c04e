"""Times by rates: the law of a rate, and nothing for what does nothing."""

from __future__ import annotations

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import Action, ExecutionPlan
from hpctrain.nn.network import Network
from hpctrain.planner.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate
from hpctrain.planner.operator_work import work_of
from hpctrain.planner.rate_costs import RateCosts

LINK = Link((LinkSegment(0, 1e-6, 1e-9),))
RATES = {
    OperatorClass.CONVOLUTION: OperatorRate(1e10, 1e10, 1e-5),
    OperatorClass.PRODUCT: OperatorRate(5e9, 1e10, 2e-5),
    OperatorClass.MEMORY: OperatorRate(1e9, 5e9, 3e-6),
}
MACHINE = Machine("test", 1, 2, 1.0, 1 << 30, LINK, LINK, 2, RATES)


NETWORK = Network(catalogue.build("resnet20", {"width": 4}), (16, 16, 3), NumpyKernelSet())


def _plan(batch: int) -> ExecutionPlan:
    return compile_graph(NETWORK.graph(batch), NETWORK.kernels, training=True)


def test_a_call_takes_its_overhead_and_the_longer_of_operations_and_bytes() -> None:
    plan, costs = _plan(2), RateCosts(MACHINE)
    kinds = set()
    for action, k in (*plan.forward, *plan.backward):
        step, memory = plan.steps[k], plan.memory[k]
        work = work_of(step, action, memory)
        kinds.add(work.kind)
        if work.is_nothing:
            assert costs.seconds(step, action, memory) == 0.0
            continue
        rate = RATES[work.kind]
        by_flops, by_bytes = work.flops / rate.flops_per_second, work.bytes / rate.bytes_per_second
        assert costs.seconds(step, action, memory) == pytest.approx(rate.call_seconds + max(by_flops, by_bytes))
    assert kinds == set(OperatorClass)


def test_a_machine_of_twice_the_compute_takes_half_the_time() -> None:
    plan, slow, fast = _plan(2), RateCosts(MACHINE), RateCosts(MACHINE.scaled(compute=2.0))
    for action, k in (*plan.forward, *plan.backward):
        step = plan.steps[k]
        assert fast.seconds(step, action) == pytest.approx(slow.seconds(step, action) / 2)
    assert fast.update_seconds(1000) == pytest.approx(slow.update_seconds(1000) / 2)
    assert fast.step_seconds(1000, 7) == pytest.approx(slow.step_seconds(1000, 7) / 2)


def test_updates_are_bound_by_bytes_and_cost_nothing_where_there_is_nothing() -> None:
    costs = RateCosts(MACHINE)
    assert costs.update_seconds(0) == 0.0
    assert costs.update_seconds(2000) == pytest.approx(2 * costs.update_seconds(1000))
    assert RateCosts(MACHINE, "float64").update_seconds(1000) == pytest.approx(2 * costs.update_seconds(1000))
    assert costs.step_seconds(1 << 20, 0) > costs.step_seconds(0, 0) > 0.0


def test_rates_are_no_measurement() -> None:
    costs = RateCosts(MACHINE)
    plan = _plan(1)
    costs.seconds(plan.steps[0], Action.FORWARD)
    assert costs.measured_share() == 0.0
