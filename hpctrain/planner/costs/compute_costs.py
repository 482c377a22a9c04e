"""Price the computation of one rank: the protocol `ComputeCosts` and its implementations.

`RateCosts` uses only the rates of a machine. `MeasuredCosts` uses measured times, and rates for operators that were not measured.
"""

from __future__ import annotations

import math
from typing import Protocol

from hpctrain.backend.operators import Operator
from hpctrain.backend.specs import item_bytes, parameter_dtype
from hpctrain.nn.compile.plan import Action, PlannedStep, StepMemory
from hpctrain.planner.costs.machine import Machine, OperatorClass
from hpctrain.planner.costs.operator_times import OperatorKey, OperatorTimes, operator_key
from hpctrain.planner.costs.operator_work import FactorProduct, OperatorWork, work_of


class ComputeCosts(Protocol):
    """Seconds of computation on one rank while all ranks of its node compute."""

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        """Return the seconds of an operator's phase (FORWARD, PARAMETERS, INPUT, RECOMPUTE, COPY); 0 for BEGIN and FREE.

        A move takes only the time of packing, copying and unpacking, and all of it counts in the phase that ends the move.
        `move_traffic` divides it into these parts.

        Args:
            memory: `plan.memory[k]` of the operator: requested gradients, gradients that are added to, and arrays that share
                memory. None: the gradients of all inputs are written.
        """

    def product_seconds(self, product: FactorProduct) -> float:
        """Return the seconds to compute a whole weight gradient from exchanged inputs and errors."""

    def update_seconds(self, elements: int) -> float:
        """Return the seconds of SGD's update of `elements` elements, with momentum, weight decay and the check of its result.

        The check finds non-finite values. `PlannedJob.element_seconds` returns the time of the job's optimiser.
        """

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        """Return the seconds of a step of `operators` operators outside these and updates: input copy, loss, sums, own work."""

    def measured_share(self) -> float:
        """Return the share, in [0, 1], of the seconds requested so far that comes from measured times."""


#: accesses per element of an update with momentum: reads of weight, gradient, momentum, and again of the weight for the check of
#: finite values; writes of weight and momentum.
UPDATE_ACCESSES = 6
# Number of calls in a step that cost about as much as an operator's call: loss, sums, message, learning rate, input.
_CALLS_OF_A_STEP = 20


class RateCosts:
    """`ComputeCosts` from operations, bytes and the rates of the machine's operator classes.

    Args:
        dtype: dtype of activations or of parameters.
    """

    def __init__(self, machine: Machine, dtype: str = "float32") -> None:
        self._machine, self._item_bytes = machine, item_bytes(parameter_dtype(dtype))

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        work = work_of(step, action, memory)
        return 0.0 if work.is_nothing else self._call_seconds(work)

    def product_seconds(self, product: FactorProduct) -> float:
        return self._call_seconds(OperatorWork(OperatorClass.PRODUCT, product.flops, product.bytes(self._item_bytes)))

    def update_seconds(self, elements: int) -> float:
        rate = self._machine.rates[OperatorClass.MEMORY]
        return UPDATE_ACCESSES * elements * self._item_bytes / rate.bytes_per_second

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        """Return the seconds to copy the input and to make a fixed number of calls. `seconds` includes the calls of operators."""
        rate = self._machine.rates[OperatorClass.MEMORY]
        return _CALLS_OF_A_STEP * rate.call_seconds + 2 * input_bytes / rate.bytes_per_second

    def measured_share(self) -> float:
        return 0.0

    def _call_seconds(self, work: OperatorWork) -> float:
        return work.seconds(self._machine.rate(work.kind))


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


class MeasuredCosts:
    """`ComputeCosts` from measured times, otherwise interpolated times, otherwise rates.

    Updates and the rest of a step follow from the nearest measured sizes, however far they are.

    Args:
        times: times measured while as many ranks of a node compute as in the job.
        speed: compute speed relative to the speed at the measurement; `rates` already include it.
    """

    def __init__(self, times: OperatorTimes, rates: RateCosts, speed: float = 1.0) -> None:
        self._times, self._rates, self._speed = times, rates, speed
        self._measured_seconds = self._all_seconds = 0.0
        self._known: dict[tuple[object, ...], tuple[Operator, StepMemory | None, float | None, float]] = {}

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        if action in (Action.BEGIN, Action.FREE):
            return 0.0
        # Programs of a search share operators and plans; the entry refers to both objects, so that their ids stay in use.
        operator, node = step.operator, step.node
        key = (id(operator), id(memory), action, len(step.inputs), node is None, step.has_parameters)
        if key not in self._known:
            measured = self._times.seconds(operator_key(step, action, memory))
            self._known[key] = operator, memory, measured, self._rates.seconds(step, action, memory)
        return self._either(*self._known[key][2:])

    def product_seconds(self, product: FactorProduct) -> float:
        return self._either(self._times.seconds(product_key(product)), self._rates.product_seconds(product))

    def update_seconds(self, elements: int) -> float:
        measured = self._times.seconds(update_key(elements), math.inf) if elements else 0.0
        return self._either(measured, self._rates.update_seconds(elements))

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        copy = self._times.seconds(input_key(input_bytes), math.inf) if input_bytes else 0.0
        others = self._times.seconds(others_key(operators), math.inf)
        measured = None if copy is None or others is None else copy + others
        return self._either(measured, self._rates.step_seconds(input_bytes, operators))

    def measured_share(self) -> float:
        return self._measured_seconds / self._all_seconds if self._all_seconds else 0.0

    def _either(self, measured: float | None, by_rate: float) -> float:
        seconds = by_rate if measured is None else measured / self._speed
        self._all_seconds += seconds
        self._measured_seconds += 0.0 if measured is None else seconds
        return seconds
