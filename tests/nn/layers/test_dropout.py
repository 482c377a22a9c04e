import numpy as np
import pytest

from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.errors import ShapeError
from hpctrain.nn.layers.dropout import Dropout
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.network import Network
from hpctrain.testing.layer_gradients import check_gradients

IMAGE = (7, 9, 5)


def test_gradients() -> None:
    check_gradients(Sequential([Dropout(0.3, seed=3), Dropout(0.5)]), IMAGE)


def run(x: np.ndarray, ids: np.ndarray, *, rate: float = 0.3, seed: int = 0, step: int = 0, training: bool = True) -> np.ndarray:
    model = Sequential({"drop": Dropout(rate, seed), "flatten": Flatten()})
    program = Network(model, IMAGE, NumpyKernelSet(), dtype="float64").program(len(x), training=training)
    program.x[...] = x
    logits: np.ndarray = program.forward(StepContext(training=training, step=step, sample_ids=ids))
    return logits.reshape(x.shape).copy()


def test_keeps_the_mean_and_drops_the_rate() -> None:
    y = run(np.ones((64, *IMAGE)), np.arange(64))
    assert set(np.unique(y)) == {0.0, 1.0 / 0.7}
    assert (y == 0).mean() == pytest.approx(0.3, abs=0.01)


def test_a_samples_mask_follows_from_its_id_wherever_it_is() -> None:
    ones = np.ones((7, *IMAGE))
    whole = run(ones, np.arange(7) + 100)
    part = run(ones[:3], np.array([105, 100, 103]))
    np.testing.assert_array_equal(part, whole[[5, 0, 3]])


def test_masks_differ_between_steps_and_seeds() -> None:
    ones, ids = np.ones((5, *IMAGE)), np.arange(5)
    masks = [run(ones, ids, step=step, seed=seed) for step, seed in ((0, 0), (1, 0), (0, 1))]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        agree = (masks[a] == masks[b]).mean()
        assert agree == pytest.approx(0.3**2 + 0.7**2, abs=0.05)


def test_evaluation_and_rate_zero_are_the_identity() -> None:
    x = np.random.default_rng(0).standard_normal((3, *IMAGE))
    np.testing.assert_array_equal(run(x, np.arange(3), training=False), x)
    np.testing.assert_array_equal(run(x, np.arange(3), rate=0.0), x)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_rate_outside_its_range_is_refused(rate: float) -> None:
    with pytest.raises(ShapeError, match=r"outside \[0, 1\); the default is 0.5"):
        Dropout(rate)
