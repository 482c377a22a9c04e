"""Boxes that are copied and added between arrays are those that NumPy's slices are."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.kernels.cuda.box_copy import copy_box
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.boxes import Box, shape_of
from tests.support.emulated import CudaKernelsFactory

#: (target's shape and box, source's shape and box)
CASES: dict[str, tuple[tuple[int, ...], Box, tuple[int, ...], Box]] = {
    "rows of an image": ((2, 1, 5, 16), ((0, 2), (0, 1), (0, 5), (0, 16)), (2, 7, 5, 16), ((0, 2), (6, 7), (0, 5), (0, 16))),
    "a corner": ((3, 4, 5, 6), ((1, 3), (0, 2), (2, 5), (1, 4)), (2, 9, 9, 3), ((0, 2), (5, 7), (1, 4), (0, 3))),
    "packs at another place": ((2, 3, 2, 24), ((0, 2), (1, 3), (0, 2), (8, 16)), (2, 2, 4, 8), ((0, 2), (0, 2), (2, 4), (0, 8))),
    "an odd place": ((1, 2, 2, 16), ((0, 1), (0, 2), (0, 2), (1, 9)), (1, 2, 2, 8), ((0, 1), (0, 2), (0, 2), (0, 8))),
    "rows of an odd length": ((2, 2, 3, 17), ((0, 2), (0, 2), (0, 3), (0, 8)), (2, 2, 3, 8), ((0, 2), (0, 2), (0, 3), (0, 8))),
    "from rows of an odd length": (
        (2, 1, 3, 8),
        ((0, 2), (0, 1), (0, 3), (0, 8)),
        (2, 3, 3, 9),
        ((0, 2), (2, 3), (0, 3), (0, 8)),
    ),
    "more than all threads at once": (
        (2, 30, 50, 9),
        ((0, 2), (1, 30), (0, 49), (2, 9)),
        (2, 29, 49, 7),
        ((0, 2), (0, 29), (0, 49), (0, 7)),
    ),
    "two dims": ((5, 8), ((1, 4), (0, 8)), (3, 8), ((0, 3), (0, 8))),
    "one dim": ((50,), ((3, 40),), (37,), ((0, 37),)),
    "nothing": ((2, 3, 4, 5), ((0, 2), (1, 1), (0, 4), (0, 5)), (2, 3, 4, 5), ((0, 2), (3, 3), (0, 4), (0, 5))),
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_boxes(cuda_kernels: CudaKernelsFactory, case: str, dtype: str, accumulate: bool) -> None:
    target_shape, target_box, source_shape, source_box = CASES[case]
    random = np.random.default_rng(0)
    old, new = (random.integers(-9, 9, shape).astype(np.float64) for shape in (target_shape, source_shape))
    inside, origin = (tuple(slice(*interval) for interval in box) for box in (target_box, source_box))
    expected = old.copy()
    expected[inside] = new[origin] + accumulate * old[inside]
    for seed in range(3):
        kernels = cuda_kernels(seed=seed)
        target, source = (kernels.arithmetic.zeros(x.size, dtype).reshape(x.shape) for x in (old, new))
        kernels.arithmetic.from_host(target, old)
        kernels.arithmetic.from_host(source, new)
        copy_box(kernels.runtime, target, target_box, source, source_box, accumulate=accumulate)
        np.testing.assert_array_equal(kernels.arithmetic.to_host(target), expected)
        np.testing.assert_array_equal(kernels.arithmetic.to_host(source), new)


def _refused(kernels: CudaKernelSet, target_box: Box, source_box: Box, dtype: str = "float32") -> str:
    target, source = (kernels.arithmetic.zeros(6, name).reshape(2, 3) for name in ("float32", dtype))
    with pytest.raises(AssertionError) as error:
        copy_box(kernels.runtime, target, target_box, source, source_box)
    return str(error.value)


def test_boxes_that_do_not_fit_are_refused(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    box: Box = ((0, 2), (1, 3))
    assert "different shapes" in _refused(kernels, box, ((0, 2), (0, 3)))
    assert "leaves" in _refused(kernels, box, ((0, 2), (2, 4)))
    assert "leaves" in _refused(kernels, ((-1, 1), (0, 2)), box)
    assert "dtype" in _refused(kernels, box, box, "bfloat16")
    assert shape_of(box) == (2, 2)
