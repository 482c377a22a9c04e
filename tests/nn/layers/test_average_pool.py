import numpy as np
import pytest

from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.errors import ShapeError
from hpctrain.nn.layers.average_pool import AveragePool
from hpctrain.testing.layer_gradients import check_gradients

CASES = {
    "2x2": (AveragePool(2), (7, 9, 3)),
    "overlapping, padding counted": (AveragePool(3, 2, 1), (9, 7, 3)),
    "overlapping, padding left out": (AveragePool(3, 2, 1, count_include_pad=False), (9, 7, 3)),
    "ceil mode": (AveragePool((3, 2), 2, ceil_mode=True), (8, 7, 3)),
    "ceil mode, padding left out": (AveragePool(3, 2, 1, ceil_mode=True, count_include_pad=False), (8, 6, 2)),
    "one pixel of two": (AveragePool(1, 2), (7, 9, 3)),
    "stride beyond the kernel": (AveragePool(2, 3), (7, 9, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str) -> None:
    layer, image_shape = CASES[case]
    check_gradients(layer, image_shape)


def test_stride_defaults_to_the_kernel() -> None:
    assert AveragePool((2, 3)).output(TensorSpec((1, 7, 9, 4))).shape == (1, 3, 3, 4)
    assert AveragePool((2, 3)).window == AveragePool((2, 3), (2, 3)).window


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ShapeError, match="at most 1 is allowed"):
        AveragePool(2, padding=2)
    with pytest.raises(ShapeError, match=r"stride of \(0, 0\)"):
        AveragePool(2, 0)
    with pytest.raises(ShapeError, match="average pooling"):
        AveragePool(2).output(TensorSpec((3, 8)))


def test_the_window_is_known_for_splitting_images() -> None:
    window = AveragePool(3, 2, (1, 0, 1, 0)).window
    assert window is not None
    assert np.array_equal([window.kernel, window.stride], [(3, 3), (2, 2)])
    assert window.padding == (1, 0, 1, 0)
