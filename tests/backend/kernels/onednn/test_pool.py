"""Pooling equals the float64 reference, also where oneDNN has no kernel for it."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.onednn.layouts import in_layout
from hpctrain.backend.kernels.onednn.pool import plain_pool
from hpctrain.backend.kernels.specs import AdaptiveAveragePoolSpec, PoolSpec, TensorSpec, Window
from tests.support.kernel_pairs import assert_close, run

WINDOWS = {
    "2x2": Window((2, 2), (2, 2), (0, 0, 0, 0)),
    "3x3 strided and padded": Window((3, 3), (2, 2), (1, 1, 1, 1)),
    "overlapping": Window((3, 3), (1, 1), (1, 1, 1, 1)),
    "asymmetric": Window((3, 2), (2, 1), (1, 0, 0, 1)),
    "dilated": Window((2, 2), (1, 1), (0, 0, 0, 0), (2, 2)),
}


@pytest.mark.parametrize("layout", ["NHWC", "nChw8c"])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("kind", ["max", "include padding", "exclude padding"])
@pytest.mark.parametrize("channels", [1, 16, 20])
def test_equals_the_reference(
    onednn: KernelSet, reference: KernelSet, kind: str, window: Window, ceil_mode: bool, channels: int, layout: str
) -> None:
    spec = PoolSpec("max" if kind == "max" else "average", window, ceil_mode, count_include_pad=kind == "include padding")
    if spec.kind == "average" and window.dilation != (1, 1):
        return
    random = np.random.default_rng(0)
    shape = (3, 10, 7, channels)
    x = random.standard_normal(shape)
    dy = random.standard_normal(spec.output(TensorSpec(shape)).shape)
    ours = run(onednn, spec, [x], output_grad=dy, layouts=[in_layout(TensorSpec(shape), layout)])
    assert_close(ours, run(reference, spec, [x], output_grad=dy, dtype="float64"))
    assert_close(run(onednn, spec, [x]), run(reference, spec, [x], dtype="float64"))


@pytest.mark.parametrize("size", [(1, 1), (2, 7), (5, 1), (3, 2), (10, 7)])
@pytest.mark.parametrize("channels", [1, 16, 20])
def test_adaptive(onednn: KernelSet, reference: KernelSet, size: tuple[int, int], channels: int) -> None:
    spec = AdaptiveAveragePoolSpec(size)
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 10, 7, channels))
    dy = random.standard_normal((3, *size, channels))
    wanted = run(reference, spec, [x], output_grad=dy, dtype="float64")
    for layout in ("NHWC", "nChw8c"):
        ours = run(onednn, spec, [x], output_grad=dy, layouts=[in_layout(TensorSpec(x.shape), layout)])
        if size == (10, 7):
            np.testing.assert_array_equal(ours.output, x.astype(np.float32))
        else:
            assert_close(ours, wanted)


def test_global_pooling_ends_in_plain_memory(onednn: KernelSet) -> None:
    x = in_layout(TensorSpec((3, 7, 7, 16)), "nChw8c")
    assert onednn.make(AdaptiveAveragePoolSpec((1, 1)), (x,), training=True).output == TensorSpec((3, 1, 1, 16))


def test_windows_of_changing_size_are_left_to_numpy() -> None:
    assert plain_pool(AdaptiveAveragePoolSpec((3, 2)), TensorSpec((1, 10, 7, 4))) is None
