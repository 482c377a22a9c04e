"""What the families share: widths, and the chances of stochastic depth."""

import pytest

from hpctrain.errors import ConfigError, OptionError
from hpctrain.models import catalogue
from hpctrain.models.parts import MOST_CHANNELS, scaled, stochastic_depths


@pytest.mark.parametrize(
    ("channels", "width", "wanted"),
    [(64, 1.0, 64), (64, 0.001, 1), (3, 0.5, 2), (100, MOST_CHANNELS / 100, MOST_CHANNELS)],
)
def test_widths_are_rounded(channels: int, width: float, wanted: int) -> None:
    assert scaled(channels, width) == wanted


@pytest.mark.parametrize(("channels", "width"), [(64, 1e308), (64, float("inf")), (1, 1e7), (10**400, 1.0)])
def test_enormous_widths_are_refused(channels: int, width: float) -> None:
    with pytest.raises(ConfigError, match=r"makes more than 1,000,000 channels .* the largest width for this layer is"):
        scaled(channels, width)


@pytest.mark.parametrize("model", ["vgg16", "resnet50", "resnet20", "resnet9", "small"])
def test_every_family_refuses_an_enormous_width(model: str) -> None:
    with pytest.raises(ConfigError, match="the largest width for this layer is"):
        catalogue.build(model, {"width": 1e308})


@pytest.mark.parametrize("channels", [0, -1, -(10**400)])
def test_a_layer_without_channels_is_refused(channels: int) -> None:
    with pytest.raises(ConfigError, match="it must have at least 1"):
        scaled(channels, 1.0)


@pytest.mark.parametrize("options", [{"channels": [-4]}, {"channels": [4, 0]}, {"hidden": -1}])
def test_the_small_network_has_no_empty_layers(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="it must have at least 1"):
        catalogue.build("small", options)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *((model, {"width": -1.0}) for model in ("vgg11", "resnet18", "resnet20", "resnet9", "small")),
        *((model, {"depth": 17}) for model in ("vgg", "resnet", "resnet_small")),
        *((model, {"dropout": 1.0}) for model in ("vgg11", "small")),
        *((model, {"stochastic_depth": rate}) for model in ("resnet20", "resnet50") for rate in (1.0, -0.1, float("nan"))),
        ("resnet50", {"groups": 0}),
        ("resnet50", {"width_per_group": 0}),
        ("resnet50", {"width_per_group": 1_000_000}),
        ("resnet50", {"groups": 10**9}),
        ("small", {"channels": []}),
        ("small", {"channels": [4, 0]}),
        ("small", {"hidden": -1}),
    ],
)
def test_a_refusal_names_its_option(model: str, options: dict[str, object]) -> None:
    with pytest.raises(OptionError) as caught:
        catalogue.build(model, options)
    assert [caught.value.option] == list(options)


def test_depths_rise_linearly_to_the_last_block() -> None:
    ends = list(stochastic_depths(0.4, 5, 3))
    assert ends[0] == {}
    specs = [end["stochastic_depth"].spec("a") for end in ends[1:]]  # type: ignore[attr-defined]
    assert [spec.rate for spec in specs] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert all(spec.per_sample and spec.seed == 3 for spec in specs)
    assert list(stochastic_depths(0.0, 5, 3)) == [{}] * 5
