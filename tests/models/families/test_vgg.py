from collections.abc import Iterator

import pytest

from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.errors import ConfigError
from hpctrain.models import catalogue
from hpctrain.models.families import vgg
from hpctrain.testing.models import exported_shapes, parameter_count

COUNTS = {
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "vgg11_bn": 132_868_840,
    "vgg13_bn": 133_053_736,
    "vgg16_bn": 138_365_992,
    "vgg19_bn": 143_678_248,
}
STACKS = {  # Simonyan and Zisserman 2015, table 1, columns A, B, D, E
    11: "64 M 128 M 256 256 M 512 512 M 512 512 M",
    13: "64 64 M 128 128 M 256 256 M 512 512 M 512 512 M",
    16: "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M",
    19: "64 64 M 128 128 M 256 256 256 256 M 512 512 512 512 M 512 512 512 512 M",
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert parameter_count(catalogue.build(name, {})) == COUNTS[name]


@pytest.mark.parametrize("name", COUNTS)
def test_names_and_shapes_are_torchvisions(name: str) -> None:
    depth, batch_norm = int(name[3:5]), name.endswith("_bn")
    assert list(exported_shapes(catalogue.build(name, {})).items()) == list(_torchvision(depth, batch_norm))


def _torchvision(depth: int, batch_norm: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    position, inside = 0, 3
    for entry in STACKS[depth].split():
        if entry == "M":
            position += 1
            continue
        outside = int(entry)
        yield f"features.{position}.weight", (outside, inside, 3, 3)
        yield f"features.{position}.bias", (outside,)
        if batch_norm:
            for role in ("weight", "bias", "running_mean", "running_var"):
                yield f"features.{position + 1}.{role}", (outside,)
        position += 3 if batch_norm else 2
        inside = outside
    for position, outside, inside in ((0, 4096, 25088), (3, 4096, 4096), (6, 1000, 4096)):
        yield f"classifier.{position}.weight", (outside, inside)
        yield f"classifier.{position}.bias", (outside,)


def test_any_image_that_survives_five_halvings_fits() -> None:
    model = catalogue.build("vgg16_bn", {"width": 0.125, "classes": 7, "channels_in": 2})
    for rows, columns in ((32, 32), (65, 33), (225, 224)):
        assert model.output(TensorSpec((3, rows, columns, 2))).shape == (3, 7)


def test_a_depth_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no VGG of depth 15; known depths are \[11, 13, 16, 19\], the nearest is 16"):
        vgg.build(depth=15)
    with pytest.raises(ConfigError, match=r"width of 0 leaves no channels"):
        vgg.build(width=0)
