"""The networks of the PyTorch peer are those of the catalogue."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (make parity installs it)")

import torch

from hpctrain.bench import torch_models
from hpctrain.models import catalogue

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("width", [1.0, 0.25])
@pytest.mark.parametrize(
    "name", ["small", "vgg11", "vgg19", "resnet9", "resnet18", "resnet34", "resnet50", "resnet101", "resnet20", "resnet56"]
)
def test_a_network_has_the_parameters_of_ours(name: str, width: float) -> None:
    width = 1.0 if name == "small" else width
    with torch.device("meta"):
        network, channels, classes = torch_models.build(name, width=width)
    ours = catalogue.build(name, {"width": width, "classes": classes})
    assert catalogue.image_shape(name)[2] == channels
    theirs = sorted(parameter.numel() for parameter in network.parameters())
    specs = (spec for _, layer in ours.walk() for spec in layer.parameters().values())
    assert theirs == sorted(math.prod(spec.shape) for spec in specs)


@pytest.mark.parametrize("name", ["small2", "vgg12", "resnet21", "alexnet"])
def test_a_name_without_a_counterpart_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no counterpart here"):
        torch_models.build(name)
