"""Costs from samples: they add up to what was sampled, and other sizes cost in proportion."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import Action, ExecutionPlan, PlannedStep, StepMemory
from hpctrain.nn.network import Network
from hpctrain.planner.factor_products import FactorProduct
from hpctrain.planner.machine import OperatorClass
from hpctrain.planner.operator_work import work_of
from hpctrain.planner.sampled_costs import SampledCosts, SampledTimes, sampled_rates
from hpctrain.trace.tracer import Category, Tracer
from tests.support import nets

_PHASES = (Action.FORWARD, Action.PARAMETERS, Action.INPUT)


class _ByBatch:
    """A second for each sample and action; three for one that makes an output again."""

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        weights = {Action.BEGIN: 0.0, Action.FREE: 0.0, Action.RECOMPUTE: 3.0}
        return weights.get(action, 1.0) * step.operator.inputs[0].shape[0]

    def product_seconds(self, product: FactorProduct) -> float:
        return float(product.samples)

    def update_seconds(self, elements: int) -> float:
        return 0.5 * elements

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        return 7.0

    def measured_share(self) -> float:
        return 0.0


def _plan(batch: int, *, synchronised: bool = False) -> ExecutionPlan:
    network = Network(nets.residual(synchronised=synchronised), (9, 7, 3), NumpyKernelSet())
    return compile_graph(network.graph(batch), network.kernels, training=True)


def _times(plan: ExecutionPlan) -> SampledTimes:
    """A time of its own for every phase of every operator."""
    phases = [(action, plan.steps[k].name) for action, k in (*plan.forward, *plan.backward) if action in _PHASES]
    return SampledTimes({phase: 0.1 + number for number, phase in enumerate(dict.fromkeys(phases))}, {"loss": 2.0, "sums": 1.0})


def _sum(plan: ExecutionPlan, costs: SampledCosts) -> float:
    return sum(costs.seconds(plan.steps[k], action, plan.memory[k]) for action, k in (*plan.forward, *plan.backward))


def test_the_costs_of_the_sampled_plan_add_up_to_its_samples() -> None:
    plan = _plan(2)
    plan = replace(plan, backward=(plan.backward[0], (Action.RECOMPUTE, 0), *plan.backward[1:]))
    times = _times(plan)
    costs = SampledCosts(plan, times, _ByBatch())
    assert _sum(plan, costs) == pytest.approx(sum(times.operators.values()))
    assert costs.step_seconds(100, 10) == 3.0
    assert costs.measured_share() == pytest.approx(1.0)


def test_a_rank_with_another_size_costs_in_proportion() -> None:
    plan, larger = _plan(2), _plan(6)
    costs = SampledCosts(plan, _times(plan), _ByBatch())
    assert _sum(larger, costs) == pytest.approx(3 * _sum(plan, costs))


def test_what_waits_for_others_costs_as_usual_for_the_sampled() -> None:
    plan = _plan(2, synchronised=True)
    costs = SampledCosts(plan, SampledTimes(dict.fromkeys(_times(plan).operators, 4.0), {}), _ByBatch())
    merged = [k for k, step in enumerate(plan.steps) if step.node is not None and getattr(step.node.spec, "synchronised", False)]
    assert merged
    before = costs.measured_share()
    assert before == 0.0
    for k in merged:
        assert 0.0 < costs.seconds(plan.steps[k], Action.FORWARD) <= 4.0
    assert costs.measured_share() == 0.0
    assert costs.step_seconds(100, 10) == 7.0  # nothing beside operators was sampled
    assert costs.update_seconds(10) == 5.0
    assert costs.measured_share() == 0.0


def test_times_are_medians_by_phase_and_name() -> None:
    trace = Tracer(100)
    for length in (1, 9, 2):
        trace.add(Category.FORWARD, "conv", 10, 10 + length)
        trace.add(Category.INPUT, "conv", 20, 20 + 2 * length)
    trace.add(Category.WORK, "loss", 0, 5)
    trace.add(Category.AVERAGING, "posting and progress", 0, 1000)
    times = SampledTimes.of(trace.events())
    assert times.operators == {(Action.FORWARD, "conv"): pytest.approx(2e-9), (Action.INPUT, "conv"): pytest.approx(4e-9)}
    assert times.others == {"loss": pytest.approx(5e-9)}
    assert all(isinstance(seconds, float) and np.isfinite(seconds) for seconds in times.operators.values())


def test_work_between_steps_is_none_of_a_step() -> None:
    tracer = Tracer(16)
    for number, begin in enumerate((0, 100, 200)):
        tracer.add(Category.WORK, "loss", begin + 10, begin + 15)
        tracer.add(Category.STEP, "step", begin, begin + 50, "", number)
        tracer.add(Category.WORK, "checkpoint", begin + 60, begin + 90)
    tracer.add(Category.WORK, "before", -20, -10)
    assert SampledTimes.of(tracer.events()).others == {"loss": pytest.approx(5e-9)}


def test_rates_are_work_over_time_of_each_class() -> None:
    plan = _plan(2)
    works = {
        (action, plan.steps[k].name): work_of(plan.steps[k], action, plan.memory[k])
        for action, k in (*plan.forward, *plan.backward)
        if action in _PHASES
    }
    seconds = {OperatorClass.CONVOLUTION: 1e-9, OperatorClass.PRODUCT: 2e-9, OperatorClass.MEMORY: 4e-9}
    by_class = {
        phase: seconds[work.kind] * (work.flops if work.kind is not OperatorClass.MEMORY else work.bytes)
        for phase, work in works.items()
    }
    rates = sampled_rates(plan, SampledTimes(by_class, {}))
    assert rates[OperatorClass.CONVOLUTION].flops_per_second == pytest.approx(1e9)
    assert rates[OperatorClass.PRODUCT].flops_per_second == pytest.approx(5e8)
    assert rates[OperatorClass.MEMORY].bytes_per_second == pytest.approx(2.5e8)


def test_a_class_without_operators_has_the_rate_of_all_others() -> None:
    plan = _plan(2)
    times = _times(plan)
    kinds = {plan.steps[k].name: work_of(plan.steps[k], Action.FORWARD, plan.memory[k]).kind for k in range(len(plan.steps))}
    convolutions = {phase: value for phase, value in times.operators.items() if kinds[phase[1]] is OperatorClass.CONVOLUTION}
    rates = sampled_rates(plan, SampledTimes(convolutions, {}))
    assert rates[OperatorClass.PRODUCT] == rates[OperatorClass.CONVOLUTION]
    assert all(rate.bytes_per_second > 0 for rate in sampled_rates(plan, SampledTimes({}, {})).values())
