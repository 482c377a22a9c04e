import pytest

from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.errors import ConfigError, ShapeError
from hpctrain.models import catalogue
from hpctrain.testing.layer_gradients import check_gradients
from hpctrain.testing.models import exported_shapes, parameter_count

OPTIONS = {"classes": 4, "channels": [3, 5], "hidden": 7, "grid": 2}


@pytest.mark.parametrize(
    "more", [{}, {"hidden": 0}, {"batch_norm": False}, {"dropout": 0.3}, {"dropout": 0.3, "hidden": 0}, {"grid": 1}]
)
def test_gradients(more: dict[str, object]) -> None:
    check_gradients(catalogue.build("small", {**OPTIONS, **more}), (9, 7, 1), step=1e-6, tolerance=1e-6)


def test_parameters() -> None:
    shapes = exported_shapes(catalogue.build("small", {**OPTIONS, "channels_in": 2}))
    trained = {name: shape for name, shape in shapes.items() if "running" not in name}
    assert trained == {
        "stage1.conv.weight": (3, 2, 3, 3),
        "stage1.bn.weight": (3,),
        "stage1.bn.bias": (3,),
        "stage2.conv.weight": (5, 3, 3, 3),
        "stage2.bn.weight": (5,),
        "stage2.bn.bias": (5,),
        "classifier.fc1.weight": (7, 20),
        "classifier.fc1.bias": (7,),
        "classifier.fc2.weight": (4, 7),
        "classifier.fc2.bias": (4,),
    }


def test_a_convolution_has_a_bias_only_without_batch_norm() -> None:
    with_norm, without = (parameter_count(catalogue.build("small", {**OPTIONS, "batch_norm": b})) for b in (True, False))
    assert with_norm - without == 3 + 5


def test_width_scales_channels_and_hidden_features() -> None:
    shapes = exported_shapes(catalogue.build("small", {**OPTIONS, "width": 2.0}))
    assert shapes["stage2.conv.weight"] == (10, 6, 3, 3)
    assert shapes["classifier.fc1.weight"] == (14, 40)


def test_images_that_vanish_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"stage3\.pool.*the smallest height that fits is 2"):
        catalogue.build("small", {"channels": [2, 2, 2]}).output(TensorSpec((1, 7, 28, 1)))


def test_a_network_without_stages_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one stage"):
        catalogue.build("small", {"channels": []})
