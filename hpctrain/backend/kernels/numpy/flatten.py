"""Flatten, and the identity: operators that only give memory another shape."""

from __future__ import annotations

from typing import ClassVar

from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.numpy.operator import NumpyOperator
from hpctrain.backend.kernels.specs import Spec, TensorSpec


class View(NumpyOperator):
    """The output is the input's memory under the output's shape."""

    view: ClassVar[bool] = True
    in_place: ClassVar[bool] = True
    can_accumulate: ClassVar[bool] = False

    def __init__(self, spec: Spec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, (x,), training=training)

    def forward(self, context: StepContext) -> None:
        return None

    def backward_input(self) -> None:
        return None
