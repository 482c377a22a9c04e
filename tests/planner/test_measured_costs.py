"""Measured times come first, then interpolated ones, then rates; the share says how much of the sum was measured."""

from __future__ import annotations

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import Action, ExecutionPlan
from hpctrain.nn.network import Network
from hpctrain.planner.factor_products import FactorProduct
from hpctrain.planner.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate
from hpctrain.planner.measured_costs import MeasuredCosts, input_key, others_key, product_key, update_key
from hpctrain.planner.operator_key import operator_key
from hpctrain.planner.operator_times import OperatorTimes, Setting
from hpctrain.planner.rate_costs import RateCosts

LINK = Link((LinkSegment(0, 1e-6, 1e-9),))
RATES = {kind: OperatorRate(1e10, 1e10, 1e-5) for kind in OperatorClass}
BY_RATE = RateCosts(Machine("test", 1, 2, 1.0, 1 << 30, LINK, LINK, 2, RATES))
NETWORK = Network(catalogue.build("resnet20", {"width": 4}), (16, 16, 3), NumpyKernelSet())


def _plan(batch: int) -> ExecutionPlan:
    return compile_graph(NETWORK.graph(batch), NETWORK.kernels, training=True)


def _measured(*batches: int) -> OperatorTimes:
    """All operators at these batches: 2 s a call and 1 s a sample."""
    times = OperatorTimes(Setting("processor", "numpy"))
    for batch in batches:
        plan = _plan(batch)
        for action, k in (*plan.forward, *plan.backward):
            times.put(operator_key(plan.steps[k], action, plan.memory[k]), 2.0 + batch)
    return times


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_measured_and_interpolated_times_are_used(batch: int) -> None:
    costs, plan = MeasuredCosts(_measured(2, 8), BY_RATE), _plan(batch)
    for action, k in (*plan.forward, *plan.backward):
        expected = 0.0 if action in (Action.FREE, Action.BEGIN) else 2.0 + batch
        assert costs.seconds(plan.steps[k], action, plan.memory[k]) == pytest.approx(expected)
    assert costs.measured_share() == 1.0


def test_far_from_measured_sizes_rates_hold_and_the_share_says_so() -> None:
    costs, plan = MeasuredCosts(_measured(1), BY_RATE), _plan(8)
    for action, k in (*plan.forward, *plan.backward):
        step, memory = plan.steps[k], plan.memory[k]
        assert costs.seconds(step, action, memory) == BY_RATE.seconds(step, action, memory)
    assert costs.measured_share() == 0.0
    plan = _plan(1)
    costs.seconds(plan.steps[0], Action.FORWARD, plan.memory[0])
    assert 0.0 < costs.measured_share() < 1.0


def test_the_rest_of_a_step_scales_from_the_nearest_measurement() -> None:
    times = OperatorTimes(Setting("processor", "numpy"))
    costs = MeasuredCosts(times, BY_RATE)
    assert costs.update_seconds(1000) == BY_RATE.update_seconds(1000)
    assert costs.step_seconds(1000, 5) == BY_RATE.step_seconds(1000, 5)
    times.put(update_key(1000), 1.0)
    times.put(input_key(100), 0.5)
    times.put(others_key(10), 3.0)
    assert costs.update_seconds(1000) == 1.0
    assert costs.update_seconds(10) == pytest.approx(0.01)
    assert costs.update_seconds(0) == 0.0
    assert costs.step_seconds(100, 10) == pytest.approx(3.5)
    assert costs.step_seconds(0, 12) == pytest.approx(3.0)


def test_products_of_other_depths_follow_from_measured_ones() -> None:
    times = OperatorTimes(Setting("processor", "numpy"))
    costs = MeasuredCosts(times, BY_RATE)
    few, some, many = (FactorProduct(samples, 50, 20) for samples in (4, 6, 8))
    assert costs.product_seconds(few) == BY_RATE.product_seconds(few) < BY_RATE.product_seconds(FactorProduct(4000, 50, 20))
    times.put(product_key(few), 1.0)
    times.put(product_key(many), 2.0)
    assert [costs.product_seconds(product) for product in (few, some, many)] == [1.0, 1.5, 2.0]
