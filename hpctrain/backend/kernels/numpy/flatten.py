"""Flatten, and the identity: operators that only give memory another name."""

from __future__ import annotations

from hpctrain.backend.kernels.abilities import InputView
from hpctrain.backend.operators import Operator, StepContext
from hpctrain.backend.specs import Spec, TensorSpec


class View(InputView, Operator):
    """The output is the input's memory under the output's shape."""

    def __init__(self, spec: Spec, x: TensorSpec) -> None:
        self.spec, self.inputs = spec, (x.plain(),)
        self.output = spec.output(x.plain())

    def forward(self, context: StepContext) -> None:
        return None

    def backward_input(self) -> None:
        return None
