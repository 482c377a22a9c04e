"""Operations that only fusion makes."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.backend.specs import Conv2dSpec, LinearSpec, TensorSpec


@dataclass(frozen=True)
class WithRelu:
    """A convolution or linear layer with a ReLU behind it."""

    inner: Conv2dSpec | LinearSpec

    def output(self, x: TensorSpec) -> TensorSpec:
        return self.inner.output(x)

    def flops(self, x: TensorSpec) -> int:
        return self.inner.flops(x)
