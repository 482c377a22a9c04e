"""Price the computation of one rank: the protocol `ComputeCosts` and its implementations.

`RateCosts` uses only the rates of a machine. `MeasuredCosts` uses measured times, and rates for operators that were not measured.
`SampledCosts` uses times from a few steps of a run, so that a prediction adds only messages and waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np

from hpctrain.backend.specs import item_bytes, parameter_dtype
from hpctrain.nn.compile.plan import Action, Actions, ExecutionPlan, PlannedStep, StepMemory
from hpctrain.planner.machine import Machine, OperatorClass, OperatorRate
from hpctrain.planner.operator_times import OperatorKey, OperatorTimes, operator_key
from hpctrain.planner.operator_work import FactorProduct, OperatorWork, is_move, work_of
from hpctrain.trace.tracer import Category, Events


class ComputeCosts(Protocol):
    """Seconds of computation on one rank while all ranks of its node compute."""

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        """Return the seconds of an operator's phase (FORWARD, PARAMETERS, INPUT, RECOMPUTE, COPY); 0 for BEGIN and FREE.

        A move takes only the time of packing, copying and unpacking, and all of it counts in the phase that ends the move.
        `move_traffic` divides it into these parts.

        Args:
            step: planned operator.
            action: phase.
            memory: `plan.memory[k]` of the operator: requested gradients, gradients that are added to, and arrays that share
                memory. None: the gradients of all inputs are written.
        """
        ...

    def product_seconds(self, product: FactorProduct) -> float:
        """Return the seconds to compute a whole weight gradient from exchanged inputs and errors."""
        ...

    def update_seconds(self, elements: int) -> float:
        """Return the seconds of SGD's update of `elements` elements, with momentum, weight decay and the check of its result.

        The check finds non-finite values. `PlannedJob.element_seconds` returns the time of the job's optimiser.
        """
        ...

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        """Return the seconds of a step outside operators and updates: input copy, loss, sums, and the program's own work."""
        ...

    def measured_share(self) -> float:
        """Return the share, in [0, 1], of the seconds requested so far that comes from measured times."""
        ...


# Accesses per element of an update with momentum: reads of weight, gradient, momentum, and again of the weight for the check of
# finite values; writes of weight and momentum.
_UPDATE_ACCESSES = 6
# Number of calls in a step that cost about as much as an operator's call: loss, sums, message, learning rate, input.
_CALLS_OF_A_STEP = 20


class RateCosts:
    """`ComputeCosts` from operations, bytes and the rates of the machine's operator classes.

    Args:
        machine: machine, with the rates of one rank while all ranks of a node compute.
        dtype: dtype of activations or of parameters.
    """

    def __init__(self, machine: Machine, dtype: str = "float32") -> None:
        self._machine, self._item_bytes = machine, item_bytes(parameter_dtype(dtype))

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        """Return the seconds of the operator's work at the rate of its class and precision; 0 if the action does no work."""
        work = work_of(step, action, memory)
        return 0.0 if work.is_nothing else self._call_seconds(work)

    def product_seconds(self, product: FactorProduct) -> float:
        """Return the seconds of the product, computed from its operations and bytes."""
        return self._call_seconds(OperatorWork(OperatorClass.PRODUCT, product.flops, product.bytes(self._item_bytes)))

    def update_seconds(self, elements: int) -> float:
        """Return the seconds of an update of `elements` elements with momentum, including the check for non-finite values."""
        rate = self._machine.rates[OperatorClass.MEMORY]
        return _UPDATE_ACCESSES * elements * self._item_bytes / rate.bytes_per_second

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        """Return the seconds to copy the input and to make a fixed number of calls. `seconds` includes the calls of operators."""
        rate = self._machine.rates[OperatorClass.MEMORY]
        return _CALLS_OF_A_STEP * rate.call_seconds + 2 * input_bytes / rate.bytes_per_second

    def measured_share(self) -> float:
        """Return 0: rates are not measured times."""
        return 0.0

    def _call_seconds(self, work: OperatorWork) -> float:
        return work.seconds(self._machine.rate(work.kind))


class _CountedCosts:
    """Base of costs that count how many of the requested seconds come from measured times."""

    def __init__(self) -> None:
        self._measured_seconds = self._all_seconds = 0.0

    def measured_share(self) -> float:
        """Return the share of the seconds requested so far that comes from measured times; 0 without any."""
        return self._measured_seconds / self._all_seconds if self._all_seconds else 0.0

    def _counted(self, seconds: float, *, measured: bool) -> float:
        self._all_seconds += seconds
        self._measured_seconds += seconds if measured else 0.0
        return seconds


def product_key(product: FactorProduct) -> OperatorKey:
    """Return the key of the product that computes a weight gradient from exchanged inputs and errors."""
    return OperatorKey(f"product {product.outputs}", (product.samples, product.inputs, 1))


def update_key(elements: int) -> OperatorKey:
    """Return the key of the update of `elements` parameters, including the check for non-finite values."""
    return OperatorKey("update", (elements, 1, 1))


def input_key(n_bytes: int) -> OperatorKey:
    """Return the key of the copy of a step's images."""
    return OperatorKey("input", (n_bytes, 1, 1))


def others_key(operators: int) -> OperatorKey:
    """Return the key of loss, sums and statistics of a step with `operators` operators."""
    return OperatorKey("others", (operators, 1, 1))


class MeasuredCosts(_CountedCosts):
    """`ComputeCosts` from measured times, otherwise interpolated times, otherwise rates.

    Args:
        times: times measured while as many ranks of a node compute as in the job.
        rates: costs of work without a measured time.
        speed: compute speed relative to the speed at the measurement; `rates` already include it.
    """

    def __init__(self, times: OperatorTimes, rates: RateCosts, speed: float = 1.0) -> None:
        super().__init__()
        self._times, self._rates, self._speed = times, rates, speed

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        """Return the measured or interpolated seconds; without either, the seconds from rates. 0 if the action does no work."""
        by_rate = self._rates.seconds(step, action, memory)
        if action in (Action.BEGIN, Action.FREE):
            return 0.0
        return self._either(self._times.seconds(operator_key(step, action, memory)), by_rate)

    def product_seconds(self, product: FactorProduct) -> float:
        """Return the measured or interpolated seconds; without either, the seconds from rates."""
        return self._either(self._times.seconds(product_key(product)), self._rates.product_seconds(product))

    def update_seconds(self, elements: int) -> float:
        """Return the seconds of an update, at the rate of the measured update of the nearest size."""
        if not elements:
            return 0.0
        return self._either(self._scaled(update_key(elements)), self._rates.update_seconds(elements))

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        """Return the seconds of a step outside operators and updates.

        The copy of the input has the nearest measured rate. The rest takes as long as in the measured step with the nearest
        number of operators.
        """
        copy = self._scaled(input_key(input_bytes)) if input_bytes else 0.0
        nearest = self._times.nearest(others_key(operators))
        measured = None if copy is None or nearest is None else copy + nearest[1]
        return self._either(measured, self._rates.step_seconds(input_bytes, operators))

    def _scaled(self, key: OperatorKey) -> float | None:
        """Return the interpolated seconds, or the seconds at the rate of the nearest measured size; None if there are none."""
        seconds = self._times.seconds(key)
        nearest = self._times.nearest(key)
        if seconds is not None or nearest is None or not nearest[0]:
            return seconds
        return nearest[1] * key.extents[0] / nearest[0]

    def _either(self, measured: float | None, by_rate: float) -> float:
        return self._counted(by_rate if measured is None else measured / self._speed, measured=measured is not None)


_PHASES = {Category.FORWARD: Action.FORWARD, Category.PARAMETERS: Action.PARAMETERS, Category.INPUT: Action.INPUT}


@dataclass(frozen=True)
class SampledTimes:
    """Medians of a rank's times, in seconds.

    Attributes:
        operators: seconds by (phase, name of the operator).
        others: seconds of named work outside operators, by name.
    """

    operators: Mapping[tuple[Action, str], float]
    others: Mapping[str, float]

    @classmethod
    def of(cls, events: Events) -> SampledTimes:
        """Return the medians of the events of some steps, as `TracingHooks` records them.

        If the events include steps, only events inside steps count.
        """
        events = _within_steps(events)
        phases = {
            (action, name): seconds
            for category, action in _PHASES.items()
            for name, seconds in _medians(events, category).items()
        }
        return cls(phases, _medians(events, Category.WORK))


def _within_steps(events: Events) -> Events:
    """Return the events that begin in a step; all events if no steps are recorded."""
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


class SampledCosts(_CountedCosts):
    """`ComputeCosts` of a run's ranks: the times of a sampled rank, scaled by other costs for ranks with other sizes.

    A sampled time contains all work of a rank between two hooks, so recomputed outputs count with the next operator. Operators
    that wait for other ranks (moves, merged batch statistics) are not taken from samples.

    Args:
        plan: plan of the sampled rank, with its micro-batch.
        times: times of that rank.
        costs: costs of any operator; their ratio at two sizes scales a sampled time.
        further_seconds: further seconds of a pass, in equal shares for its operators; if negative, all operators are scaled down.
    """

    def __init__(self, plan: ExecutionPlan, times: SampledTimes, costs: ComputeCosts, further_seconds: float = 0.0) -> None:
        super().__init__()
        self._costs = costs
        self._others_seconds = sum(times.others.values())
        spans = []
        for members in (*_spans(plan, plan.forward, times), *_spans(plan, plan.backward, times)):
            last, k = members[-1]
            planned = sum(costs.seconds(plan.steps[i], action, plan.memory[i]) for action, i in members)
            if planned > 0 and not any(_waits(plan.steps[i]) for _, i in members):
                spans.append((members, times.operators[last, plan.steps[k].name], planned))
        sampled_sum, planned_sum = sum(sampled for _, sampled, _ in spans), sum(planned for _, _, planned in spans)
        self._usual_factor = sampled_sum / planned_sum if planned_sum > 0 else 1.0
        share = max(0.0, further_seconds) / max(1, len(spans))
        scale = max(0.0, 1 + min(0.0, further_seconds) / sampled_sum) if sampled_sum > 0 else 1.0
        self._factors = {
            (action, plan.steps[i].name): (sampled * scale + share) / planned
            for members, sampled, planned in spans
            for action, i in members
        }

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        """Return the sampled seconds, scaled to the operator's size.

        Without a sample of the operator, return the other costs times the mean ratio of sampled times to other costs.
        """
        by_cost = self._costs.seconds(step, action, memory)
        factor = self._factors.get((action, step.name))
        return self._counted(by_cost * (self._usual_factor if factor is None else factor), measured=factor is not None)

    def product_seconds(self, product: FactorProduct) -> float:
        """Return the seconds by the other costs, because no sample contains only a product."""
        return self._counted(self._costs.product_seconds(product), measured=False)

    def update_seconds(self, elements: int) -> float:
        """Return the seconds by the other costs, because no sample contains only an update."""
        return self._counted(self._costs.update_seconds(elements), measured=False)

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        """Return the sampled seconds of all named work outside operators; the seconds by the other costs if there is none."""
        if not self._others_seconds:
            return self._counted(self._costs.step_seconds(input_bytes, operators), measured=False)
        return self._counted(self._others_seconds, measured=True)


def _spans(plan: ExecutionPlan, actions: Actions, times: SampledTimes) -> Iterator[list[tuple[Action, int]]]:
    """Yield the actions of a pass in groups; each group ends with a sampled action."""
    stretch: list[tuple[Action, int]] = []
    for action, k in actions:
        stretch.append((action, k))
        if (action, plan.steps[k].name) in times.operators:
            yield stretch
            stretch = []


def _waits(step: PlannedStep) -> bool:
    """Return whether the operator waits for other ranks."""
    return is_move(step.operator) or (step.node is not None and getattr(step.node.spec, "synchronised", False))


def sampled_rates(plan: ExecutionPlan, times: SampledTimes) -> dict[OperatorClass, OperatorRate]:
    """Return the rates of a rank's sampled operators, to scale times between sizes if no better rates are known.

    A class without operators gets the rate of the same operators in another precision, otherwise that of all operators together.

    Args:
        plan: plan of the sampled rank.
        times: times of that rank.
    """
    works = []
    for members in (*_spans(plan, plan.forward, times), *_spans(plan, plan.backward, times)):
        last, k = members[-1]
        work = work_of(plan.steps[k], last, plan.memory[k])
        if len(members) == 1 and not work.is_nothing and not _waits(plan.steps[k]):
            works.append((work, times.operators[last, plan.steps[k].name]))
    call_seconds = min((seconds for _, seconds in works), default=0.0)

    def rate(kind: OperatorClass) -> OperatorRate:
        own = [one for one in works if one[0].kind is kind]
        alike = [one for one in works if one[0].kind.of_dtype("float32") is kind.of_dtype("float32")]
        return _rate(own or alike or works, call_seconds)

    return {kind: rate(kind) for kind in OperatorClass}


def _rate(works: list[tuple[OperatorWork, float]], call_seconds: float) -> OperatorRate:
    """Return the rates of an operator class, from the operators with the largest numbers of operations and of bytes.

    The call overhead matters least in these operators.
    """
    flops = max(((work.flops, seconds) for work, seconds in works), default=(1, 1.0))
    n_bytes = max(((work.bytes, seconds) for work, seconds in works), default=(1, 1.0))
    return OperatorRate(max(1, flops[0]) / max(flops[1], 1e-9), max(1, n_bytes[0]) / max(n_bytes[1], 1e-9), call_seconds)
