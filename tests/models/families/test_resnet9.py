import numpy as np
import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.errors import ConfigError
from hpctrain.models import catalogue
from hpctrain.models.families import resnet9
from hpctrain.nn.network import Network
from hpctrain.testing.layer_gradients import check_gradients
from hpctrain.testing.models import exported_shapes, parameter_count


def test_parameters_are_those_of_eight_convolutions_and_a_classifier() -> None:
    shapes = exported_shapes(catalogue.build("resnet9", {}))
    convolutions = {name: shape for name, shape in shapes.items() if len(shape) == 4}
    assert [shape[:2] for shape in convolutions.values()] == [
        *[(64, 3), (128, 64), (128, 128), (128, 128)],
        *[(256, 128), (512, 256), (512, 512), (512, 512)],
    ]
    assert {shape[2:] for shape in convolutions.values()} == {(3, 3)}
    batch_norm = 2 * (64 + 3 * 128 + 256 + 3 * 512)
    filters = 9 * (3 * 64 + 64 * 128 + 2 * 128 * 128 + 128 * 256 + 256 * 512 + 2 * 512 * 512)
    assert parameter_count(catalogue.build("resnet9", {})) == filters + batch_norm + 512 * 10 + 10 == 6_573_130


def test_names_follow_the_stages() -> None:
    names = list(exported_shapes(catalogue.build("resnet9", {})))
    assert names[:2] == ["layer0.conv.weight", "layer0.bn.weight"]
    assert "layer1.block.conv1.weight" in names
    assert "layer3.block.bn2.running_var" in names
    assert not [name for name in names if name.startswith("layer2.block")]
    assert names[-2:] == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize(("width", "channels"), [(0.5, 32), (0.01, 1), (2.0, 128)])
def test_width_is_a_factor_on_all_channels(width: float, channels: int) -> None:
    shapes = exported_shapes(resnet9.build(width=width, classes=7))
    assert shapes["layer0.conv.weight"] == (channels, 3, 3, 3)
    assert shapes["fc.weight"] == (7, round(512 * width))


def test_blocks_may_start_as_their_shortcuts() -> None:
    """The last batch norm of each starts at zero, and no other one."""
    network = Network(resnet9.build(width=0.05, zero_init_residual=True), (8, 8, 3), NumpyKernelSet())
    weights = {name: parameter.data for name, parameter in network.parameters.items() if "bn" in name and "weight" in name}
    assert len(weights) == 8
    for name, weight in weights.items():
        assert np.all(weight == (0.0 if name.endswith("block.bn2.weight") else 1.0))


@pytest.mark.slow
def test_gradients() -> None:
    model = catalogue.build("resnet9", {"width": 0.05, "classes": 5})
    check_gradients(model, (9, 8, 3), tolerance=1e-6, step=1e-7, elements=2)


def test_images_of_eight_pixels_and_more_fit() -> None:
    model = catalogue.build("resnet9", {"channels_in": 1})
    for rows, columns in ((8, 8), (9, 15), (32, 225)):
        assert model.output(TensorSpec((2, rows, columns, 1))).shape == (2, 10)


def test_a_width_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"A width of 0\.0 leaves no channels"):
        resnet9.build(width=0.0)
