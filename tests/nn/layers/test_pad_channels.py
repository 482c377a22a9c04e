import numpy as np
import pytest

from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.errors import ShapeError
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.pad_channels import PadChannels
from hpctrain.nn.layers.residual import Residual
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.network import Network
from hpctrain.testing.layer_gradients import check_gradients


@pytest.mark.parametrize(("before", "after"), [(2, 2), (0, 3), (1, 0), (0, 0)])
def test_gradients(before: int, after: int) -> None:
    check_gradients(PadChannels(before, after), (7, 9, 3))


def test_gradients_where_the_input_is_read_twice() -> None:
    """The input's gradient is the sum of two: the pad adds to what the body has written, or the other way round."""
    check_gradients(Sequential([Conv2d(3, 3, 1), Residual({"conv": Conv2d(3, 8, 3, padding=1)}, PadChannels(2, 3))]), (5, 7, 3))


def test_zeros_stand_around_the_input() -> None:
    model = Sequential([PadChannels(1, 2), Flatten()])
    program = Network(model, (2, 3, 2), NumpyKernelSet(), dtype="float64").program(3, training=False)
    for _ in range(2):  # memory that the first run left behind must not show in the second
        x = np.random.default_rng(0).standard_normal((3, 2, 3, 2))
        program.x[...] = x
        y = program.forward(StepContext(training=False)).reshape(3, 2, 3, 5)
        np.testing.assert_array_equal(y, np.pad(x, ((0, 0), (0, 0), (0, 0), (1, 2))))
        program.logits[...] = np.nan


def test_shape_and_refusal() -> None:
    assert PadChannels(1, 2).output(TensorSpec((0, 5, 7, 4))).shape == (0, 5, 7, 7)
    with pytest.raises(ShapeError, match=r"\(-1, 2\) are negative; the nearest legal ones are \(0, 2\)"):
        PadChannels(-1, 2)
