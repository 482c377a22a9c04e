import numpy as np
import pytest

from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.errors import ShapeError
from hpctrain.nn.layers.batch_norm import BatchNorm
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.network import Network
from hpctrain.testing.layer_gradients import check_gradients


@pytest.mark.parametrize("image_shape", [(7, 9, 4), (1, 1, 3), (225, 1, 1)])
def test_gradients(image_shape: tuple[int, int, int]) -> None:
    check_gradients(BatchNorm(image_shape[2], epsilon=0.01), image_shape, batch=5)


def test_gradients_of_the_synchronised_mode_alone() -> None:
    check_gradients(BatchNorm(4, synchronised=True), (5, 7, 4))


def make_network(layer: BatchNorm, image_shape: tuple[int, int, int]) -> Network:
    return Network(Sequential({"bn": layer, "flatten": Flatten()}), image_shape, NumpyKernelSet(), dtype="float64")


def run(network: Network, x: np.ndarray, *, training: bool) -> np.ndarray:
    program = network.program(len(x), training=training)
    program.x[...] = x
    context = StepContext(training=training, sample_ids=np.arange(len(x)), global_count=len(x))
    logits: np.ndarray = program.forward(context)
    return logits.reshape(x.shape).copy()


def test_training_output_has_mean_zero_and_variance_one() -> None:
    x = 5.0 + 3.0 * np.random.default_rng(0).standard_normal((5, 7, 9, 3))
    y = run(make_network(BatchNorm(3, epsilon=1e-12), (7, 9, 3)), x, training=True)
    np.testing.assert_allclose(y.mean((0, 1, 2)), 0.0, atol=1e-12)
    np.testing.assert_allclose(y.var((0, 1, 2)), 1.0, rtol=1e-10)


def test_evaluation_uses_running_statistics_blended_with_momentum() -> None:
    x = 2.0 + np.random.default_rng(0).standard_normal((5, 7, 9, 3))
    network = make_network(BatchNorm(3, epsilon=0.01, momentum=0.3), (7, 9, 3))
    run(network, x, training=True)
    network.statistics.blend(5 * network.statistics.batch, 5)
    mean = 0.3 * x.mean((0, 1, 2))
    variance = 0.7 + 0.3 * x.var((0, 1, 2), ddof=1)
    np.testing.assert_allclose(network.statistics.views["bn.running_mean"], mean, rtol=1e-12)
    np.testing.assert_allclose(network.statistics.views["bn.running_var"], variance, rtol=1e-12)
    np.testing.assert_allclose(run(network, x, training=False), (x - mean) / np.sqrt(variance + 0.01), rtol=1e-10)


def test_parameters_and_statistics() -> None:
    layer = BatchNorm(5, momentum=0.2, weight=0.0)
    assert {role: (spec.shape, spec.decay) for role, spec in layer.parameters().items()} == {
        "weight": ((5,), False),
        "bias": ((5,), False),
    }
    assert {role: (s.fill, s.momentum) for role, s in layer.statistics().items()} == {
        "running_mean": (0.0, 0.2),
        "running_var": (1.0, 0.2),
    }
    values = {role: spec.initialise(np.random.default_rng(0), (5,)) for role, spec in layer.parameters().items()}
    assert not values["weight"].any()
    assert not values["bias"].any()
    assert (BatchNorm(5).parameters()["weight"].initialise(np.random.default_rng(0), (5,)) == 1.0).all()


def test_options_outside_their_range_are_refused() -> None:
    for refused in ({"channels": 0}, {"channels": 3, "momentum": 1.5}, {"channels": 3, "epsilon": 0.0}):
        with pytest.raises(ShapeError, match=r"is (empty|outside \[0, 1\]|not positive); (it needs|the default)"):
            BatchNorm(**refused)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="batch norm was built for 3 channels, its input has 4"):
        BatchNorm(3).output(TensorSpec((1, 2, 2, 4)))
