"""Specs that only fusion makes: of one shape and cost with what is fused."""

from __future__ import annotations

import pytest

from hpctrain.backend.kernels.fused_specs import WithRelu
from hpctrain.backend.kernels.specs import Conv2dSpec, LinearSpec, TensorSpec, Window


@pytest.mark.parametrize(
    ("inner", "shape"), [(Conv2dSpec(3, 8, Window((3, 3), (2, 2), (1, 1, 1, 1))), (2, 7, 9, 3)), (LinearSpec(5, 7), (2, 5))]
)
def test_a_relu_changes_neither_shape_nor_multiply_adds(inner, shape) -> None:
    x = TensorSpec(shape, "bfloat16")
    assert WithRelu(inner).output(x) == inner.output(x)
    assert WithRelu(inner).flops(x) == inner.flops(x)
