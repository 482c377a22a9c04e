"""The fully connected layer equals the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.fused_specs import WithRelu
from hpctrain.backend.kernels.specs import LinearSpec
from tests.support.kernel_pairs import assert_close, run


def arrays(spec: LinearSpec, batch: int):
    random = np.random.default_rng(0)
    parameters = {"weight": random.standard_normal(spec.weight_shape) / np.sqrt(spec.features_in)}
    if spec.bias:
        parameters["bias"] = random.standard_normal(spec.features_out)
    return random.standard_normal((batch, spec.features_in)), parameters, random.standard_normal((batch, spec.features_out))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1), (225, 10), (20, 7), (512, 1000), (64, 64)])
@pytest.mark.parametrize("batch", [1, 5, 33])
def test_equals_the_reference(onednn: KernelSet, reference: KernelSet, sizes: tuple[int, int], batch: int, bias: bool) -> None:
    spec = LinearSpec(*sizes, bias)
    x, parameters, dy = arrays(spec, batch)
    ours = run(onednn, spec, [x], parameters=parameters, output_grad=dy)
    assert_close(ours, run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64"))
    np.testing.assert_allclose(run(onednn, spec, [x], parameters=parameters).output, ours.output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("input_first", [False, True])
def test_relu_behind_it(onednn: KernelSet, reference: KernelSet, input_first: bool) -> None:
    spec = LinearSpec(225, 20)
    x, parameters, dy = arrays(spec, 7)
    ours = run(onednn, WithRelu(spec), [x], parameters=parameters, output_grad=dy, input_first=input_first)
    before = run(reference, spec, [x], parameters=parameters, output_grad=dy, dtype="float64").output
    wanted = run(reference, spec, [x], parameters=parameters, output_grad=dy * (before > 0), dtype="float64")
    wanted.output = np.maximum(before, 0)
    assert_close(ours, wanted)
