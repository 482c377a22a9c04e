from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.relu import ReLU
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.testing.layer_gradients import check_gradients


def test_gradients() -> None:
    check_gradients(ReLU(), (7, 9, 3))


def test_gradients_behind_a_layer_whose_output_it_overwrites() -> None:
    check_gradients(Sequential([Conv2d(3, 4, 3), ReLU(), Conv2d(4, 3, 3), ReLU()]), (7, 9, 3))
