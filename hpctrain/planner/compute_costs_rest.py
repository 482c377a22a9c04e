"""The seam between programs and times: seconds of an operator's phase on one rank."""

from __future__ import annotations

from typing import Protocol

from hpctrain.nn.compile.plan import Action, PlannedStep, StepMemory
from hpctrain.planner.factor_products import FactorProduct


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
