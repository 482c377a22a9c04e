"""What a model declares, against the network that is made of it."""

from __future__ import annotations

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.models import catalogue, interchange
from hpctrain.nn.network import Network
from hpctrain.testing.models import exported_shapes, parameter_count


@pytest.mark.parametrize(("name", "pixels", "options"), [("small", 9, {"hidden": 4}), ("resnet20", 8, {"width": 0.25})])
def test_declarations_are_those_of_the_network(name: str, pixels: int, options: dict[str, object]) -> None:
    model = catalogue.build(name, options)
    channels = catalogue.image_shape(name)[2]
    network = Network(model, (pixels, pixels, channels), NumpyKernelSet())
    assert parameter_count(model) == sum(parameter.data.size for parameter in network.parameters.values())
    exported = {key: array.shape for key, array in interchange.export(network).items() if not key.endswith("num_batches_tracked")}
    assert exported_shapes(model) == exported
