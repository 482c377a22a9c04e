"""Which oneDNN operators give a number for NaN, as docs/onednn.md says: training must look elsewhere (`train.finiteness`)."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.kernels.fused_specs import WithRelu
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet
from hpctrain.backend.kernels.specs import AddSpec, BatchNormSpec, Conv2dSpec, PoolSpec, ReluSpec, Spec, Window
from tests.support.kernel_pairs import Result, run

C = 16
WINDOW = Window((2, 2), (2, 2), (0, 0, 0, 0))
CONV = Conv2dSpec(C, C, Window((3, 3), (1, 1), (1, 1, 1, 1)))
#: operator -> (spec, number of inputs, NaN in the input is NaN in the output)
OPERATORS: dict[str, tuple[Spec, int, bool]] = {
    "convolution": (CONV, 1, True),
    "sum": (AddSpec(), 2, True),
    "average pooling": (PoolSpec("average", WINDOW), 1, True),
    "batch norm": (BatchNormSpec(C), 1, True),
    "ReLU": (ReluSpec(), 1, False),
    "convolution, ReLU": (WithRelu(CONV), 1, False),
    "sum, ReLU": (AddSpec(relu=True), 2, False),
    "max pooling": (PoolSpec("max", WINDOW), 1, False),
    "batch norm, ReLU": (BatchNormSpec(C, relu=True), 1, False),
    "batch norm, sum, ReLU": (BatchNormSpec(C, relu=True, add=True), 2, False),
}


def _run(onednn: OnednnKernelSet, spec: Spec, inputs: int, value: float) -> Result:
    random = np.random.default_rng(0)
    xs = [random.standard_normal((2, 8, 8, C)).astype(np.float32) for _ in range(inputs)]
    xs[0][0, 2, 3, 1] = value
    parameters, statistics = {}, {}
    if isinstance(spec, BatchNormSpec):
        parameters = {role: np.ones(C, np.float32) for role in ("weight", "bias")}
        statistics = {role: np.ones(C, np.float32) for role in ("running_mean", "running_var", "batch_mean", "batch_var")}
    elif isinstance(spec, Conv2dSpec | WithRelu):
        parameters = {"weight": random.standard_normal((C, 3, 3, C)).astype(np.float32), "bias": np.zeros(C, np.float32)}
    size = 4 if isinstance(spec, PoolSpec) else 8
    return run(
        onednn, spec, xs, parameters=parameters, statistics=statistics, output_grad=np.ones((2, size, size, C), np.float32)
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_nan_passes_or_becomes_a_number(onednn: OnednnKernelSet, name: str) -> None:
    spec, inputs, passes = OPERATORS[name]
    result = _run(onednn, spec, inputs, np.nan)
    assert np.isnan(result.output).any() == passes


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [name for name in OPERATORS if "conv" in name or "norm" in name])
def test_gradients_of_parameters_and_batch_statistics_tell(onednn: OnednnKernelSet, name: str, value: float) -> None:
    """Zero times NaN is NaN: what a ReLU hides in forward is seen in the gradient of the layer before it."""
    spec, inputs, _ = OPERATORS[name]
    result = _run(onednn, spec, inputs, value)
    assert not np.isfinite(result.gradients["weight"]).all()
    if isinstance(spec, BatchNormSpec):
        assert not np.isfinite(result.statistics["batch_mean"][1])
        assert not np.isfinite(result.statistics["batch_var"][1])
