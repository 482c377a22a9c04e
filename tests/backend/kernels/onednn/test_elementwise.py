"""ReLU and sums equal the float64 reference in every layout."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.onednn.layouts import in_layout
from hpctrain.backend.kernels.specs import AddSpec, ReluSpec, TensorSpec
from tests.support.kernel_pairs import assert_close, difference, run

SHAPE = (3, 9, 7, 20)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("shape", "layout"), [(SHAPE, "NHWC"), (SHAPE, "nChw8c"), ((33, 7), "NHWC")])
def test_relu(onednn: KernelSet, reference: KernelSet, shape: tuple[int, ...], layout: str, in_place: bool) -> None:
    random = np.random.default_rng(0)
    x, dy = random.standard_normal(shape), random.standard_normal(shape)
    x.reshape(-1)[::5] = 0.0
    spec = TensorSpec(shape) if layout == "NHWC" else in_layout(TensorSpec(shape), layout)
    ours = run(onednn, ReluSpec(), [x], output_grad=dy, layouts=[spec], in_place=in_place)
    assert_close(ours, run(reference, ReluSpec(), [x], output_grad=dy, dtype="float64"))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("layouts", [("NHWC", "NHWC"), ("nChw8c", "nChw8c"), ("NHWC", "nChw8c")])
@pytest.mark.parametrize("adds", [(False, False), (True, False), (False, True), (True, True)])
def test_add(onednn: KernelSet, reference: KernelSet, relu: bool, layouts: tuple[str, str], adds: tuple[bool, bool]) -> None:
    random = np.random.default_rng(0)
    a, b, dy, *before = (random.standard_normal(SHAPE) for _ in range(5))
    old = [value if add else None for value, add in zip(before, adds, strict=True)]
    specs = [in_layout(TensorSpec(SHAPE), layout) for layout in layouts]
    ours = run(onednn, AddSpec(relu), [a, b], output_grad=dy, layouts=specs, accumulate=old)
    wanted = run(reference, AddSpec(relu), [a, b], output_grad=dy, dtype="float64")
    wanted.input_grads = [grad + (0 if held is None else held) for grad, held in zip(wanted.input_grads, old, strict=True)]
    assert_close(ours, wanted)


def test_add_in_place_hands_the_gradient_on(onednn: KernelSet) -> None:
    random = np.random.default_rng(0)
    a, b, dy = (random.standard_normal(SHAPE) for _ in range(3))
    ours = run(onednn, AddSpec(relu=True), [a, b], output_grad=dy, in_place=True)
    for grad in ours.input_grads:
        assert difference(grad, dy * (a + b > 0)) <= 1e-6
