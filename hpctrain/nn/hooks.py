"""Events between the operators of a step, for others: averaging, progress, tracing. The engine knows none of them."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.backend.operators import Array
from hpctrain.nn.parameter import Parameter


class StepHooks:
    """Does nothing; a subclass overrides what it wants. Called by `Program` in a fixed order, the same on every rank."""

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        """The next operator reads these parameters: they must hold this step's values when this returns."""

    def takes_sufficient_factors(self, parameters: Sequence[Parameter]) -> bool:
        """True for a linear layer whose gradients are made elsewhere, from its input and its output's gradient.

        It then gets `input_ready` in forward and `error_ready` in backward, and no `grad_ready` for its parameters.
        """
        return False

    def input_ready(self, parameters: Sequence[Parameter], x: Array) -> None:
        """Forward: x (N, in) of a layer that gives sufficient factors; its memory is reused once this returns. Must not wait."""

    def error_ready(self, parameters: Sequence[Parameter], dy: Array) -> None:
        """Backward, before the input's gradient: dy (N, out) of such a layer; its memory is reused. Must not wait."""

    def grad_ready(self, parameter: Parameter) -> None:
        """`parameter.grad` is final for this backward pass. Must not wait."""

    def data_free(self, parameter: Parameter) -> None:
        """This backward pass no longer reads `parameter.data`."""

    def operator_done(self, name: str, phase: str) -> None:
        """One operator has run; `phase` is "forward", "parameters" or "input". Must not wait."""
