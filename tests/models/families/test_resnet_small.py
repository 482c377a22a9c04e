import pytest

from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.errors import ConfigError
from hpctrain.models import catalogue
from hpctrain.models.families import resnet_small
from hpctrain.testing.layer_gradients import check_gradients
from hpctrain.testing.models import exported_shapes, parameter_count

DEPTHS = (20, 32, 44, 56, 110)


def _count(depth: int) -> int:
    """Weights of He et al. 2016, section 4.2: no bias before a batch norm, no parameters in shortcuts."""
    n = (depth - 2) // 6
    total = 3 * 9 * 16 + 2 * 16
    for inside, planes in ((16, 16), (16, 32), (32, 64)):
        total += inside * 9 * planes + (2 * n - 1) * planes * 9 * planes + 2 * n * 2 * planes
    return total + 64 * 10 + 10


@pytest.mark.parametrize("depth", DEPTHS)
def test_parameter_counts_follow_the_papers_table(depth: int) -> None:
    assert parameter_count(catalogue.build(f"resnet{depth}", {})) == _count(depth)


def test_parameter_counts_of_resnet20_with_both_shortcuts() -> None:
    assert parameter_count(catalogue.build("resnet20", {})) == 269_722
    assert parameter_count(catalogue.build("resnet20", {"shortcut": "projection"})) == 272_474


@pytest.mark.parametrize("depth", DEPTHS)
def test_depth_is_the_number_of_layers_with_weights_on_the_longest_path(depth: int) -> None:
    names = exported_shapes(catalogue.build(f"resnet{depth}", {}))
    weighted = [name for name in names if name.endswith("weight") and ".bn" not in name and not name.startswith("bn")]
    assert len(weighted) == depth
    assert list(names)[:2] == ["conv1.weight", "bn1.weight"]
    assert f"layer3.{(depth - 2) // 6 - 1}.bn2.running_var" in names


def test_shortcuts_have_no_parameters_unless_asked_for() -> None:
    assert not [name for name in exported_shapes(catalogue.build("resnet20", {})) if "downsample" in name]
    projected = exported_shapes(catalogue.build("resnet20", {"shortcut": "projection"}))
    assert projected["layer2.0.downsample.0.weight"] == (32, 16, 1, 1)
    assert "layer1.0.downsample.0.weight" not in projected


@pytest.mark.slow
@pytest.mark.parametrize("shortcut", ["padding", "projection"])
def test_gradients(shortcut: str) -> None:
    options = {"shortcut": shortcut, "width": 0.2, "classes": 5}
    check_gradients(catalogue.build("resnet20", options), (9, 7, 3), tolerance=1e-6, step=1e-7, elements=2)


def test_images_of_any_size_fit() -> None:
    model = catalogue.build("resnet20", {"channels_in": 1})
    for rows, columns in ((1, 1), (7, 9), (33, 225)):
        assert model.output(TensorSpec((2, rows, columns, 1))).shape == (2, 10)


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no small ResNet of depth 18; .* the nearest is 20"):
        resnet_small.build(depth=18)
    with pytest.raises(ConfigError, match="is \"A\", but must be 'padding' or 'projection'"):
        catalogue.build("resnet20", {"shortcut": "A"})
