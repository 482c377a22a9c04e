from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.testing.layer_gradients import check_gradients


def test_gradients() -> None:
    check_gradients(Sequential([Conv2d(3, 2, 1), Flatten()]), (7, 9, 3))


def test_shape() -> None:
    assert Flatten().output(TensorSpec((3, 7, 9, 2))).shape == (3, 126)
    assert Flatten().output(TensorSpec((0, 7, 9, 2))).shape == (0, 126)
    assert Flatten().flops(TensorSpec((3, 7, 9, 2))) == 0
