"""Seconds of operators from a few steps of a run itself: what remains to be predicted is what travels, and what waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from hpctrain.nn.compile.plan import Action, Actions, ExecutionPlan, PlannedStep, StepMemory
from hpctrain.planner.compute_costs_rest import ComputeCosts
from hpctrain.planner.factor_products import FactorProduct
from hpctrain.planner.machine import OperatorClass, OperatorRate
from hpctrain.planner.move_traffic import is_move
from hpctrain.planner.operator_work import OperatorWork, work_of
from hpctrain.trace.tracer import Category, Events

_AMOUNTS = ("flops", "bytes")
_PHASES = {Category.FORWARD: Action.FORWARD, Category.PARAMETERS: Action.PARAMETERS, Category.INPUT: Action.INPUT}


@dataclass(frozen=True)
class SampledTimes:
    """Medians of a rank's times, in seconds. operators: by phase and name. others: of named work beside them, by name."""

    operators: Mapping[tuple[Action, str], float]
    others: Mapping[str, float]

    @classmethod
    def of(cls, events: Events) -> SampledTimes:
        """From the events of some steps, as `TracingHooks` records them; where steps are recorded too, from what lies in them."""
        events = _within_steps(events)
        phases = {
            (action, name): seconds
            for category, action in _PHASES.items()
            for name, seconds in _medians(events, category).items()
        }
        return cls(phases, _medians(events, Category.WORK))


def _within_steps(events: Events) -> Events:
    """All events that begin in a step, where there are steps; else all."""
    steps = events.of(Category.STEP)
    if not len(steps):
        return events
    order = np.argsort(steps.start_ns)
    before = np.searchsorted(steps.start_ns[order], events.start_ns, side="right") - 1
    return events.select((before >= 0) & (events.start_ns < steps.stop_ns[order][before]))


def _medians(events: Events, category: Category) -> dict[str, float]:
    chosen = events.of(category)
    lengths = (chosen.stop_ns - chosen.start_ns) * 1e-9
    return {chosen.names[index]: float(median(lengths[chosen.name == index])) for index in np.unique(chosen.name)}


class SampledCosts:
    """`ComputeCosts` of a run's ranks: a sampled rank's times, and other costs in proportion where another rank has other sizes.

    A sampled time holds all that a rank did between two hooks, so an output that is made again counts with what follows it.
    Operators that wait for other ranks inside (moves, merged batch statistics) are not taken from samples.

    Args:
        plan: of the rank that was sampled, with its micro-batch. times: of that rank.
        costs: of any operator; they say how costs of different sizes compare.
    """

    def __init__(self, plan: ExecutionPlan, times: SampledTimes, costs: ComputeCosts) -> None:
        self._costs = costs
        self._others_seconds = sum(times.others.values())
        self._factors: dict[tuple[Action, str], float] = {}
        self._sampled_seconds = self._all_seconds = 0.0
        sampled_sum = planned_sum = 0.0
        for members in (*_spans(plan, plan.forward, times), *_spans(plan, plan.backward, times)):
            last, k = members[-1]
            sampled = times.operators[last, plan.steps[k].name]
            planned = sum(costs.seconds(plan.steps[i], action, plan.memory[i]) for action, i in members)
            if planned > 0 and not any(_waits(plan.steps[i]) for _, i in members):
                self._factors |= {(action, plan.steps[i].name): sampled / planned for action, i in members}
                sampled_sum, planned_sum = sampled_sum + sampled, planned_sum + planned
        self._usual_factor = sampled_sum / planned_sum if planned_sum > 0 else 1.0

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        """The sampled seconds, in proportion to the size; as usual for the sampled ones where it was not sampled."""
        by_cost = self._costs.seconds(step, action, memory)
        factor = self._factors.get((action, step.name))
        return self._counted(by_cost * (self._usual_factor if factor is None else factor), sampled=factor is not None)

    def product_seconds(self, product: FactorProduct) -> float:
        """As the other costs say: no sample has a product by itself."""
        return self._counted(self._costs.product_seconds(product), sampled=False)

    def update_seconds(self, elements: int) -> float:
        """As the other costs say: no sample has an update by itself."""
        return self._counted(self._costs.update_seconds(elements), sampled=False)

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        """The sampled seconds of all named work beside operators; as the other costs say where there is none."""
        if not self._others_seconds:
            return self._counted(self._costs.step_seconds(input_bytes, operators), sampled=False)
        return self._counted(self._others_seconds, sampled=True)

    def measured_share(self) -> float:
        """The share of the seconds asked for so far that follows from samples; 0 before any were."""
        return self._sampled_seconds / self._all_seconds if self._all_seconds else 0.0

    def _counted(self, seconds: float, *, sampled: bool) -> float:
        self._all_seconds += seconds
        self._sampled_seconds += seconds if sampled else 0.0
        return seconds


def _spans(plan: ExecutionPlan, actions: Actions, times: SampledTimes) -> Iterator[list[tuple[Action, int]]]:
    """The actions of a pass in stretches, each up to one that was sampled."""
    stretch: list[tuple[Action, int]] = []
    for action, k in actions:
        stretch.append((action, k))
        if (action, plan.steps[k].name) in times.operators:
            yield stretch
            stretch = []


def _waits(step: PlannedStep) -> bool:
    """The operator waits for other ranks."""
    return is_move(step.operator) or (step.node is not None and getattr(step.node.spec, "synchronised", False))


def sampled_rates(plan: ExecutionPlan, times: SampledTimes) -> dict[OperatorClass, OperatorRate]:
    """The rates that a rank's sampled operators had: how costs of different sizes compare, where nothing else says so.

    A class of which there is no operator has the rate of all others. plan: of the rank that was sampled.
    """
    works = []
    for members in (*_spans(plan, plan.forward, times), *_spans(plan, plan.backward, times)):
        last, k = members[-1]
        work = work_of(plan.steps[k], last, plan.memory[k])
        if len(members) == 1 and not work.is_nothing and not _waits(plan.steps[k]):
            works.append((work, times.operators[last, plan.steps[k].name]))
    call_seconds = min((seconds for _, seconds in works), default=0.0)
    return {kind: _rate([one for one in works if one[0].kind is kind] or works, call_seconds) for kind in OperatorClass}


def _rate(works: list[tuple[OperatorWork, float]], call_seconds: float) -> OperatorRate:
    """Operations and bytes over time, each as if it took all of it, of the operators with most: calls count least there."""
    flops, n_bytes = (max(((getattr(work, amount), seconds) for work, seconds in works), default=(1, 1.0)) for amount in _AMOUNTS)
    return OperatorRate(max(1, flops[0]) / max(flops[1], 1e-9), max(1, n_bytes[0]) / max(n_bytes[1], 1e-9), call_seconds)
