"""What somebody outside may do between the operators of a step: averaging, progress, tracing. The engine knows none of them."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.nn.parameter import Parameter


class StepHooks:
    """Does nothing; a subclass overrides what it wants. Called by `Program` in a fixed order, the same on every rank."""

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        """The next operator reads these parameters: they must hold this step's values when this returns."""

    def grad_ready(self, parameter: Parameter) -> None:
        """`parameter.grad` is final for this backward pass. Must not wait."""

    def data_free(self, parameter: Parameter) -> None:
        """This backward pass no longer reads `parameter.data`."""

    def operator_done(self, name: str, phase: str) -> None:
        """One operator has run; `phase` is "forward", "parameters" or "input". Must not wait."""
