import numpy as np
import pytest

from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.errors import ShapeError
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.residual import Residual
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.layers.stochastic_depth import StochasticDepth
from hpctrain.nn.network import Network
from hpctrain.testing.layer_gradients import check_gradients

IMAGE = (7, 9, 5)


def _block(rate: float) -> Residual:
    return Residual({"conv": Conv2d(5, 5, 3, padding=1), "depth": StochasticDepth(rate, seed=3)})


def test_gradients_of_blocks_that_may_be_dropped() -> None:
    check_gradients(Sequential([_block(0.5), _block(0.3)]), IMAGE, batch=5)


def test_a_dropped_sample_is_its_shortcut_and_the_others_are_scaled() -> None:
    model = Sequential({"block": _block(0.75), "flatten": Flatten()})
    x = np.random.default_rng(0).standard_normal((16, *IMAGE))
    results = []
    for training in (True, False):
        program = Network(model, IMAGE, NumpyKernelSet(), dtype="float64").program(16, training=training)
        program.x[...] = x
        results.append(program.forward(StepContext(training=training, sample_ids=np.arange(16))).reshape(x.shape) - x)
    trained, evaluated = results
    dropped = ~trained.any(axis=(1, 2, 3))
    assert 0 < dropped.sum() < 16
    np.testing.assert_allclose(trained[~dropped], 4 * evaluated[~dropped], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_rate_outside_its_range_is_refused(rate: float) -> None:
    with pytest.raises(ShapeError, match=r"outside \[0, 1\); 0 switches it off"):
        StochasticDepth(rate)
