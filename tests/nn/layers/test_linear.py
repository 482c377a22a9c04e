import math

import numpy as np
import pytest

from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.errors import ShapeError
from hpctrain.nn import initialise
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.testing.layer_gradients import check_gradients


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [1, 5])
def test_gradients(bias: bool, batch: int) -> None:
    check_gradients(Sequential([Flatten(), Linear(3 * 5 * 2, 7, bias)]), (3, 5, 2), batch=batch)


def test_exported_weight_behind_an_image_acts_on_channels_first() -> None:
    """x flattened as (H, W, C) times our weight = x flattened as (C, H, W) times the exported one."""
    random = np.random.default_rng(0)
    spec = Linear(3 * 5 * 2, 7, image_shape=(3, 5, 2)).parameters()["weight"]
    weight = random.standard_normal(spec.shape)
    x = random.standard_normal((4, 3, 5, 2))
    exported = spec.interchange.export(weight)
    assert exported.shape == (7, 30)
    ours = x.reshape(4, -1) @ weight
    theirs = x.transpose(0, 3, 1, 2).reshape(4, -1) @ exported.T
    np.testing.assert_allclose(theirs, ours, rtol=1e-12)
    np.testing.assert_array_equal(spec.interchange.restore(exported, spec.shape), weight)


def test_exported_weight_behind_a_vector_is_the_transpose() -> None:
    spec = Linear(5, 3).parameters()["weight"]
    weight = np.random.default_rng(0).standard_normal((5, 3))
    np.testing.assert_array_equal(spec.interchange.export(weight), weight.T)
    np.testing.assert_array_equal(spec.interchange.restore(weight.T, (5, 3)), weight)


def test_first_values_are_uniform_within_one_over_the_root_of_fan_in() -> None:
    bound = 1 / math.sqrt(400)
    for role, spec in Linear(400, 300).parameters().items():
        values = initialise.first_value(spec, role, 0)
        assert np.abs(values).max() <= bound
        assert np.abs(values).max() > 0.95 * bound
        assert values.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match="both must be at least 1"):
        Linear(0, 3)
    with pytest.raises(ShapeError, match=r"image of shape \(3, 5, 2\) has 30 elements, the linear layer takes 31"):
        Linear(31, 3, image_shape=(3, 5, 2))
    with pytest.raises(ShapeError, match=r"inputs of shape \(N, 5\), not \(2, 6\)"):
        Linear(5, 3).output(TensorSpec((2, 6)))
