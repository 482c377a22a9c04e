"""Seconds of operators as they were measured, and by rates where they were not."""

from __future__ import annotations

from hpctrain.nn.compile.plan import Action, PlannedStep, StepMemory
from hpctrain.planner.factor_products import FactorProduct
from hpctrain.planner.operator_key import OperatorKey, operator_key
from hpctrain.planner.operator_times import OperatorTimes
from hpctrain.planner.rate_costs import RateCosts


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
