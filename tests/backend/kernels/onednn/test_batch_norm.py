"""Batch norm equals the float64 reference, fused or not, in every layout."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.kernels.abilities import JointBackward
from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.onednn.layouts import in_layout
from hpctrain.backend.kernels.specs import BatchNormSpec, TensorSpec
from tests.support.kernel_pairs import assert_close, run

FUSED = {"alone": {}, "relu": {"relu": True}, "add and relu": {"relu": True, "add": True}}


def arrays(spec: BatchNormSpec, shape: tuple[int, ...]):
    random = np.random.default_rng(0)
    inputs = [3.0 + random.standard_normal(shape) for _ in range(2 if spec.add else 1)]
    if spec.add:
        inputs[1] -= 3.0
    c = spec.channels
    parameters = {"weight": random.standard_normal(c), "bias": random.standard_normal(c)}
    statistics = {"running_mean": random.standard_normal(c), "running_var": random.uniform(0.5, 2, c)}
    return inputs, parameters, statistics | {"batch_mean": np.zeros(c), "batch_var": np.zeros(c)}, random.standard_normal(shape)


@pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED.keys())
@pytest.mark.parametrize("channels", [1, 3, 5, 16, 20])
@pytest.mark.parametrize("layout", ["NHWC", "nChw8c", "nChw16c"])
def test_training(onednn: KernelSet, reference: KernelSet, channels: int, fused: dict[str, bool], layout: str) -> None:
    spec = BatchNormSpec(channels, **fused)
    shape = (3, 9, 7, channels)
    inputs, parameters, statistics, dy = arrays(spec, shape)
    common = {"parameters": parameters, "statistics": statistics, "output_grad": dy}
    layouts = [in_layout(TensorSpec(shape), layout)] * len(inputs)
    wanted = run(reference, spec, inputs, dtype="float64", **common)
    # NumPy stands in where a machine's oneDNN has only plain loops for a layout, and has its parameters first.
    joint = isinstance(onednn.make(spec, tuple(layouts), training=True), JointBackward)
    assert joint or layout == "nChw16c"
    for in_place in (False, True):
        for input_first in (False, True) if joint else (False,):
            ours = run(onednn, spec, inputs, layouts=layouts, in_place=in_place, input_first=input_first, **common)
            assert_close(ours, wanted)


@pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED.keys())
@pytest.mark.parametrize("channels", [1, 5, 16])
def test_evaluation(onednn: KernelSet, reference: KernelSet, channels: int, fused: dict[str, bool]) -> None:
    spec = BatchNormSpec(channels, **fused)
    inputs, parameters, statistics, _ = arrays(spec, (3, 9, 7, channels))
    common = {"parameters": parameters, "statistics": statistics}
    assert_close(run(onednn, spec, inputs, **common), run(reference, spec, inputs, dtype="float64", **common))


def test_features_without_an_image(onednn: KernelSet, reference: KernelSet) -> None:
    spec = BatchNormSpec(20, relu=True)
    inputs, parameters, statistics, dy = arrays(spec, (33, 20))
    common = {"parameters": parameters, "statistics": statistics, "output_grad": dy}
    assert_close(run(onednn, spec, inputs, **common), run(reference, spec, inputs, dtype="float64", **common))


def test_a_residual_whose_gradient_nobody_wants(onednn: KernelSet, reference: KernelSet) -> None:
    spec = BatchNormSpec(16, relu=True, add=True)
    inputs, parameters, statistics, dy = arrays(spec, (3, 9, 7, 16))
    common = {"parameters": parameters, "statistics": statistics, "output_grad": dy, "wants": [True, False]}
    assert_close(run(onednn, spec, inputs, **common), run(reference, spec, inputs, dtype="float64", **common))


def test_synchronised_statistics_are_left_to_numpy(onednn: KernelSet) -> None:
    x = TensorSpec((3, 9, 7, 16), layout="nChw8c", padded_size=3 * 9 * 7 * 16)
    operator = onednn.make(BatchNormSpec(16, synchronised=True), (x,), training=True)
    assert operator.inputs == (x.plain(),)
