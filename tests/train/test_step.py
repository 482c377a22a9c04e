"""Gradients of micro-batches: one sum, which the last of them takes parameter by parameter."""

from __future__ import annotations

import numpy as np

from hpctrain.train.step import GradientSum
from tests.support.averaging import make_group


def test_the_last_micro_batch_takes_the_sum_of_those_before_it() -> None:
    group = make_group()
    total = GradientSum(group)
    random = np.random.default_rng(1)
    for _ in range(2):  # nothing is left of the step before
        gradients = random.standard_normal((3, group.size)).astype(group.dtype)
        total.start()
        for number, gradient in enumerate(gradients[:2]):
            group.grad[...] = gradient
            for parameter in group.parameters.values():
                total.add(parameter, number)
            total.end_pass()
        group.grad[...] = gradients[2]
        for number, parameter in enumerate(reversed(group.parameters.values())):
            before = group.grad.copy()
            total.complete(parameter)
            segment = group.segment(parameter.name)
            assert np.array_equal(group.grad[: segment.start], before[: segment.start]), f"parameter {number} changes another one"
        assert np.array_equal(group.grad, gradients[2] + (gradients[0] + gradients[1]))
