import math

import numpy as np
import pytest

from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.errors import ShapeError
from hpctrain.nn.layers.adaptive_average_pool import AdaptiveAveragePool
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.network import Network
from hpctrain.testing.layer_gradients import check_gradients

SIZES = [(1, (7, 9)), (7, (7, 7)), ((3, 2), (7, 9)), (7, (2, 1)), ((4, 5), (9, 3)), (2, (225, 3))]


@pytest.mark.parametrize(("size", "image"), SIZES)
def test_gradients(size: int | tuple[int, int], image: tuple[int, int]) -> None:
    check_gradients(AdaptiveAveragePool(size), (*image, 3))


@pytest.mark.parametrize(("size", "image"), SIZES)
def test_output_is_the_mean_of_its_window(size: int | tuple[int, int], image: tuple[int, int]) -> None:
    rows, columns = (size, size) if isinstance(size, int) else size
    x = np.random.default_rng(0).standard_normal((3, *image, 2))
    network = Network(Sequential([AdaptiveAveragePool(size), Flatten()]), (*image, 2), NumpyKernelSet(), dtype="float64")
    program = network.program(3, training=False)
    program.x[...] = x
    y = program.forward(StepContext(training=False)).reshape(3, rows, columns, 2)
    for i in range(rows):
        for j in range(columns):
            window = x[:, _window(i, image[0], rows), _window(j, image[1], columns)]
            np.testing.assert_allclose(y[:, i, j], window.mean((1, 2)), rtol=1e-12, atol=1e-14)


def _window(i: int, size: int, parts: int) -> slice:
    return slice(math.floor(i * size / parts), math.ceil((i + 1) * size / parts))


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"pooled image size of \(0, 7\).*\(1, 7\)"):
        AdaptiveAveragePool((0, 7))
