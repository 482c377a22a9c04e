"""Costs of computation on ranks that compute faster or slower than those that were measured."""

from __future__ import annotations

from hpctrain.nn.compile.plan import Action, PlannedStep, StepMemory
from hpctrain.planner.compute_costs_rest import ComputeCosts
from hpctrain.planner.factor_products import FactorProduct


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
