import math

import numpy as np
import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.models import catalogue
from hpctrain.nn import initialise
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import ParameterSpec


def test_a_value_depends_on_seed_and_name_only() -> None:
    spec = ParameterSpec((7, 9), initialise.normal(1.0))
    value = initialise.first_value(spec, "layer1.0.conv1.weight", 3)
    np.testing.assert_array_equal(initialise.first_value(spec, "layer1.0.conv1.weight", 3), value)
    for name, seed in (("layer1.0.conv2.weight", 3), ("layer1.0.conv1.weight", 4)):
        assert not np.array_equal(initialise.first_value(spec, name, seed), value)


def test_double_precision_starts_at_the_same_values() -> None:
    for drawn in (initialise.normal(0.1), initialise.uniform(0.1), initialise.kaiming_normal(9), initialise.constant(0.1)):
        spec = ParameterSpec((5, 3), drawn)
        single, double = (initialise.first_value(spec, "w", 0, dtype) for dtype in ("float32", "float64"))
        assert single.dtype == np.float32
        assert double.dtype == np.float64
        np.testing.assert_array_equal(double, single.astype(np.float64))


def test_distributions() -> None:
    shape = (200, 200)
    for drawn, deviation in (
        (initialise.normal(0.01), 0.01),
        (initialise.kaiming_normal(50), 0.2),
        (initialise.uniform(0.3), 0.3 / math.sqrt(3)),
    ):
        values = drawn(initialise.generator(0, "w"), shape)
        assert values.dtype == np.float32
        assert values.std() == pytest.approx(deviation, rel=0.02)
        assert abs(values.mean()) < 4 * deviation / math.sqrt(values.size)


def test_parameters_of_one_network_are_uncorrelated() -> None:
    network = Network(catalogue.build("vgg11", {"width": 0.125}), (32, 32, 3), NumpyKernelSet(), seed=5)
    first, second = (network.parameters[f"features.{i}.weight"].data.ravel() for i in (8, 11))
    count = min(first.size, second.size)
    assert abs(np.corrcoef(first[:count], second[:count])[0, 1]) < 5 / math.sqrt(count)


def test_inserting_a_layer_leaves_other_layers_as_they_were() -> None:
    small, large = (
        Network(catalogue.build("small", {"channels": channels, "hidden": 0, "grid": 3}), (28, 28, 1), NumpyKernelSet(), seed=1)
        for channels in ((8, 12), (8, 12, 16))
    )
    for name in ("stage1.conv.weight", "stage2.conv.weight"):
        np.testing.assert_array_equal(small.parameters[name].data, large.parameters[name].data)
