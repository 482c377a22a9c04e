"""Products of exchanged inputs and errors: the gradient of a linear layer's weight, made by its owners over all samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.kernels.abilities import SufficientFactors
from hpctrain.backend.kernels.fused_specs import WithRelu
from hpctrain.backend.specs import LinearSpec
from hpctrain.nn.compile.plan import ExecutionPlan, PlannedStep

_WARM_UP = 2


@dataclass(frozen=True)
class FactorProduct:
    """x^T dy of x (samples, inputs) and dy (samples, outputs)."""

    samples: int
    inputs: int
    outputs: int

    @property
    def flops(self) -> int:
        return 2 * self.samples * self.inputs * self.outputs

    def bytes(self, item_bytes: int) -> int:
        """Bytes read and written."""
        read = self.samples * (self.inputs + self.outputs)
        return (read + self.inputs * self.outputs) * item_bytes


def product_of(step: PlannedStep, samples: int) -> FactorProduct | None:
    """The product that makes the weight's gradient of a linear layer over so many samples; None of other steps."""
    spec = step.operator.spec if step.node is not None else None
    inner = spec.inner if isinstance(spec, WithRelu) else spec
    if not isinstance(step.operator, SufficientFactors) or not isinstance(inner, LinearSpec):
        return None
    return FactorProduct(samples, inner.features_in, inner.features_out)


def products_of(plan: ExecutionPlan, samples: int) -> list[FactorProduct]:
    """The products of all linear layers of a plan."""
    products = (product_of(step, samples) for step in plan.steps)
    return [product for product in products if product is not None]


def time_product(
    product: FactorProduct, dtype: str, steps: int, clock: Callable[[], float], before: Callable[[], None] = lambda: None
) -> float:
    """The median of the seconds of so many products; two come before. before: see `TimedProgram.measure`."""
    random = np.random.default_rng(0)
    inputs, errors = (
        random.standard_normal((product.samples, width), np.float32).astype(dtype) for width in (product.inputs, product.outputs)
    )
    gradient = np.zeros((product.inputs, product.outputs), dtype)
    seconds = []
    for _ in range(_WARM_UP + steps):
        before()
        begin = clock()
        np.matmul(inputs.T, errors, out=gradient)
        seconds.append(clock() - begin)
    return float(np.median(seconds[_WARM_UP:]))
