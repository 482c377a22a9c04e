from collections.abc import Iterator

import numpy as np
import pytest

from hpctrain.backend.kernels.graph import GraphBuilder
from hpctrain.backend.kernels.specs import Conv2dSpec, LinearSpec, TensorSpec
from hpctrain.errors import ConfigError
from hpctrain.models import catalogue
from hpctrain.nn import initialise
from hpctrain.nn.network import declared
from hpctrain.testing.models import exported_shapes, parameter_count


def test_weights_and_biases_are_the_published_ones() -> None:
    """Krizhevsky et al. 2012, section 3.5, each convolution over all channels of the one before it."""
    weights = [96 * 11 * 11 * 3, 256 * 5 * 5 * 96, 384 * 9 * 256, 384 * 9 * 384, 256 * 9 * 384]
    weights += [9216 * 4096, 4096 * 4096, 4096 * 1000]
    assert sum(weights) == 62_367_776
    biases = 96 + 256 + 384 + 384 + 256 + 4096 + 4096 + 1000
    assert parameter_count(catalogue.build("alexnet", {})) == sum(weights) + biases


def test_outputs_have_the_published_sizes() -> None:
    builder = GraphBuilder(TensorSpec((1, *catalogue.image_shape("alexnet"))))
    catalogue.build("alexnet", {}).lower(builder, 0, "")
    graph = builder.build(0)
    sizes = [graph.tensors[node.output].size for node in graph.nodes if isinstance(node.spec, Conv2dSpec | LinearSpec)]
    assert sizes == [290_400, 186_624, 64_896, 64_896, 43_264, 4096, 4096, 1000]


def test_names_and_shapes_of_2014s_are_torchvisions() -> None:
    model = catalogue.build("alexnet2014", {})
    assert parameter_count(model) == 61_100_840
    assert list(exported_shapes(model).items()) == list(_torchvision())


def _torchvision() -> Iterator[tuple[str, tuple[int, ...]]]:
    stack = ((0, 64, 3, 11), (3, 192, 64, 5), (6, 384, 192, 3), (8, 256, 384, 3), (10, 256, 256, 3))
    for position, outside, inside, kernel in stack:
        yield f"features.{position}.weight", (outside, inside, kernel, kernel)
        yield f"features.{position}.bias", (outside,)
    for position, outside, inside in ((1, 4096, 9216), (4, 4096, 4096), (6, 1000, 4096)):
        yield f"classifier.{position}.weight", (outside, inside)
        yield f"classifier.{position}.bias", (outside,)


def test_first_values_are_the_published_ones() -> None:
    """Section 5: weights of deviation 0.01; biases 1 in the second, fourth and fifth convolution and the hidden layers."""
    model = catalogue.build("alexnet", {"width": 0.25})
    builder = GraphBuilder(TensorSpec((1, 227, 227, 3)))
    specs, _ = declared(model, builder.build(model.lower(builder, 0, "")))
    values = {name: initialise.first_value(spec, name, seed=3) for name, spec in specs.items()}
    biases = [float(value.max()) for name, value in values.items() if name.endswith("bias") and value.max() == value.min()]
    assert biases == [0, 1, 0, 1, 1, 1, 1, 0]
    for name, value in values.items():
        if name.endswith("weight"):
            assert np.std(value) == pytest.approx(0.01, rel=0.03), name


def test_images_of_other_sizes_fit() -> None:
    model = catalogue.build("alexnet", {"width": 0.1, "classes": 7, "channels_in": 2})
    for rows, columns in ((67, 69), (224, 229)):
        assert model.output(TensorSpec((3, rows, columns, 2))).shape == (3, 7)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"channels": (1, 2)}, "AlexNet has five convolutions, so channels must be five numbers, not 2"),
        ({"padding": -1}, "A padding of -1 is not possible; the smallest is 0"),
        ({"dropout": 1.0}, "A dropout rate of 1.0 is outside"),
        ({"width": 0}, "width of 0.0 leaves no channels"),
    ],
)
def test_what_makes_no_network_is_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        catalogue.build("alexnet", options)
