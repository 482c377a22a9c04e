import numpy as np
import pytest

from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.errors import ShapeError
from hpctrain.nn.layers.max_pool import MaxPool
from hpctrain.testing.layer_gradients import check_gradients

CASES = {
    "2x2": (MaxPool(2), (8, 6, 3)),
    "2x2 with a row left over": (MaxPool(2), (7, 9, 3)),
    "3x3 stride 2 overlapping": (MaxPool(3, 2, padding=1), (9, 7, 3)),
    "ceil mode": (MaxPool(3, 2, ceil_mode=True), (8, 6, 3)),
    "ceil mode with padding": (MaxPool((3, 2), (2, 3), (1, 1), ceil_mode=True), (9, 7, 2)),
    "dilated": (MaxPool(2, 1, dilation=(2, 3)), (7, 9, 2)),
    "stride beyond the kernel": (MaxPool(2, 3), (7, 9, 2)),
    "four edges": (MaxPool(3, 2, (1, 0, 0, 1)), (7, 9, 2)),
    "whole image": (MaxPool((7, 9)), (7, 9, 3)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str) -> None:
    layer, image_shape = CASES[case]
    check_gradients(layer, image_shape)


@pytest.mark.parametrize("size", [7, 8, 9, 225])
def test_ceil_mode_counts_windows_that_start_inside(size: int) -> None:
    for kernel, stride, padding in ((2, 2, 0), (3, 2, 1), (3, 3, 1), (2, 3, 1)):
        starts = np.arange(0, size + padding, stride)
        reached = starts - stride + kernel < size + 2 * padding  # the window before ends inside, so this one has work left
        expected = int(np.count_nonzero(reached | (starts == 0)))
        shape = MaxPool(kernel, stride, padding, ceil_mode=True).output(TensorSpec((1, size, size, 1))).shape
        assert shape == (1, expected, expected, 1), (kernel, stride, padding)


def test_padding_of_more_than_half_the_kernel_is_refused() -> None:
    with pytest.raises(ShapeError, match="at most 1 is allowed"):
        MaxPool(3, padding=2)
