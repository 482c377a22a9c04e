"""Price the computation of one rank: the seam between programs and times, and its implementations.

`ComputeCosts` is the protocol. `RateCosts` uses the rates of a machine alone; `MeasuredCosts` uses measured times, and rates
where nothing was measured; `SampledCosts` uses times from a few steps of a run, so that only messages and waits for them
remain to be predicted; `ScaledCosts` describes faster or slower ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np

from hpctrain.backend.specs import item_bytes
from hpctrain.nn.compile.plan import Action, Actions, ExecutionPlan, PlannedStep, StepMemory
from hpctrain.planner.machine import Machine, OperatorClass, OperatorRate
from hpctrain.planner.operator_times import OperatorKey, OperatorTimes, operator_key
from hpctrain.planner.operator_work import FactorProduct, OperatorWork, is_move, work_of
from hpctrain.trace.tracer import Category, Events


class ComputeCosts(Protocol):
    """Seconds of computation on one rank while all ranks of its node compute."""

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        """Seconds of an operator's phase (FORWARD, PARAMETERS, INPUT, RECOMPUTE, COPY); 0 for BEGIN and FREE.

        A move's is packing and unpacking alone, all of it in the phase that it ends in; see `move_traffic` for the shares.
        memory: the step's, `plan.memory[k]`: whose gradients are asked for and added to, and what lies in place. Without it
        the gradients of all inputs are written.
        """
        ...

    def product_seconds(self, product: FactorProduct) -> float:
        """Seconds of a weight's gradient from exchanged inputs and errors, all of its elements."""
        ...

    def update_seconds(self, elements: int) -> float:
        """Seconds of the optimiser's update of so many elements, and of looking whether they are finite numbers."""
        ...

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        """Seconds of all that a step does beside operators and updates: the input's copy, the loss, sums, the program itself."""
        ...

    def measured_share(self) -> float:
        """The share of the seconds asked for so far that follows from measured times, 0 .. 1."""
        ...


# Elements of parameters' size that an update with momentum reads (weight, gradient, momentum, and the weight once more for the
# look at finite numbers) and writes (weight, momentum).
_UPDATE_ACCESSES = 6
# Calls of about an operator's own cost in a step beside its operators: loss, sums, message, learning rate, input.
_CALLS_OF_A_STEP = 20


class RateCosts:
    """`ComputeCosts` by flops, bytes and the rates of the machine's operator classes.

    Args:
        machine: its rates are those of one rank while all ranks of a node compute. dtype: of parameters.
    """

    def __init__(self, machine: Machine, dtype: str = "float32") -> None:
        self._rates, self._item_bytes = dict(machine.rates), item_bytes(dtype)

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        """call_seconds + max(flops / flops_per_second, bytes / bytes_per_second); 0 where nothing is done."""
        work = work_of(step, action, memory)
        if work.is_nothing:
            return 0.0
        rate = self._rates[work.kind]
        return rate.call_seconds + max(work.flops / rate.flops_per_second, work.bytes / rate.bytes_per_second)

    def product_seconds(self, product: FactorProduct) -> float:
        """As of any other call of its operations and bytes."""
        rate = self._rates[OperatorClass.PRODUCT]
        by_flops, by_bytes = product.flops / rate.flops_per_second, product.bytes(self._item_bytes) / rate.bytes_per_second
        return rate.call_seconds + max(by_flops, by_bytes)

    def update_seconds(self, elements: int) -> float:
        """Seconds of the update with momentum of so many elements, and the look at them."""
        rate = self._rates[OperatorClass.MEMORY]
        return _UPDATE_ACCESSES * elements * self._item_bytes / rate.bytes_per_second

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        """Seconds of the input's copy and a number of calls. operators: their own calls count in `seconds`."""
        rate = self._rates[OperatorClass.MEMORY]
        return _CALLS_OF_A_STEP * rate.call_seconds + 2 * input_bytes / rate.bytes_per_second

    def measured_share(self) -> float:
        """0: rates are no measurement of an operator."""
        return 0.0


def product_key(product: FactorProduct) -> OperatorKey:
    """The key of a weight's gradient from exchanged inputs and errors."""
    return OperatorKey(f"product {product.outputs}", (product.samples, product.inputs, 1))


def update_key(elements: int) -> OperatorKey:
    """The key of the update of so many parameters, with the look at finite numbers."""
    return OperatorKey("update", (elements, 1, 1))


def input_key(n_bytes: int) -> OperatorKey:
    """The key of the copy of a step's images."""
    return OperatorKey("input", (n_bytes, 1, 1))


def others_key(operators: int) -> OperatorKey:
    """The key of loss, sums and statistics of a step of so many operators."""
    return OperatorKey("others", (operators, 1, 1))


class MeasuredCosts:
    """`ComputeCosts` by measured times first, then interpolated ones, then rates.

    Args:
        times: measured with as many ranks at work on a node as will be. rates: for all else.
    """

    def __init__(self, times: OperatorTimes, rates: RateCosts) -> None:
        self._times, self._rates = times, rates
        self._measured_seconds = self._all_seconds = 0.0

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        """Measured, interpolated or by rates; 0 where nothing is done."""
        by_rate = self._rates.seconds(step, action, memory)
        if action in (Action.BEGIN, Action.FREE):
            return 0.0
        return self._counted(self._times.seconds(operator_key(step, action, memory)), by_rate)

    def product_seconds(self, product: FactorProduct) -> float:
        """Measured, interpolated or by rates."""
        return self._counted(self._times.seconds(product_key(product)), self._rates.product_seconds(product))

    def update_seconds(self, elements: int) -> float:
        """Seconds of an update, at the rate of the measured one that is nearest in size."""
        if not elements:
            return 0.0
        return self._counted(self._scaled(update_key(elements)), self._rates.update_seconds(elements))

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        """Seconds of the input's copy at the nearest measured rate, and of the rest as in the most similar step."""
        copy = self._scaled(input_key(input_bytes)) if input_bytes else 0.0
        nearest = self._times.nearest(others_key(operators))
        measured = None if copy is None or nearest is None else copy + nearest[1]
        return self._counted(measured, self._rates.step_seconds(input_bytes, operators))

    def measured_share(self) -> float:
        """The share of the seconds asked for so far that follows from measured times; 0 before any were."""
        return self._measured_seconds / self._all_seconds if self._all_seconds else 0.0

    def _scaled(self, key: OperatorKey) -> float | None:
        """Interpolated, or at the rate of the nearest size, however far."""
        seconds = self._times.seconds(key)
        nearest = self._times.nearest(key)
        if seconds is not None or nearest is None or not nearest[0]:
            return seconds
        return nearest[1] * key.extents[0] / nearest[0]

    def _counted(self, measured: float | None, by_rate: float) -> float:
        seconds = by_rate if measured is None else measured
        self._all_seconds += seconds
        self._measured_seconds += 0.0 if measured is None else seconds
        return seconds


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


class ScaledCosts:
    """`ComputeCosts` of ranks that compute `factor` times as fast. The counterpart of `Machine.scaled(compute=factor)`."""

    def __init__(self, costs: ComputeCosts, factor: float) -> None:
        assert factor > 0
        self._costs, self._factor = costs, factor

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        """Seconds of an operator's phase."""
        return self._costs.seconds(step, action, memory) / self._factor

    def product_seconds(self, product: FactorProduct) -> float:
        """Seconds of a weight's gradient from exchanged inputs and errors."""
        return self._costs.product_seconds(product) / self._factor

    def update_seconds(self, elements: int) -> float:
        """Seconds of the optimiser's update of so many elements."""
        return self._costs.update_seconds(elements) / self._factor

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        """Seconds of the rest of a step."""
        return self._costs.step_seconds(input_bytes, operators) / self._factor

    def measured_share(self) -> float:
        """As of the costs that are scaled."""
        return self._costs.measured_share()
