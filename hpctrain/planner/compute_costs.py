"""The seam between programs and times: seconds of an operator's phase on one rank."""

from __future__ import annotations

from typing import Protocol

from hpctrain.nn.compile.plan import Action, PlannedStep


class ComputeCosts(Protocol):
    """Seconds of computation on one rank while all ranks of its node compute."""

    def seconds(self, step: PlannedStep, action: Action) -> float:
        """Of an operator's phase (FORWARD, PARAMETERS, INPUT, RECOMPUTE, COPY); of a move's, packing and unpacking alone."""
        ...

    def update_seconds(self, elements: int) -> float:
        """Of the optimiser's update of so many elements."""
        ...

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        """Of what a step does beside operators: the input's copy, the loss, looking at finite numbers, the program itself."""
        ...

    def measured_share(self) -> float:
        """The share of the seconds asked for so far that follows from measured times, 0 .. 1."""
        ...
