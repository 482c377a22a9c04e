"""The peer in PyTorch: its networks are those of the catalogue, and it steps in a process of its own when it is asked to."""

from __future__ import annotations

import math
import os
import sys

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (make parity installs it)")

import torch

from hpctrain.bench import torch_models
from hpctrain.bench.interleaved import Rounds, Turn, interleave, peer, with_threads
from hpctrain.models import catalogue
from hpctrain.testing.layers import parameter_count

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("width", [1.0, 0.25])
@pytest.mark.parametrize(
    "name",
    [
        *("small", "vgg11", "vgg19", "resnet9", "resnet18", "resnet34", "resnet50", "resnet101", "resnet20", "resnet56"),
        *("wide_resnet50_2", "wide_resnet101_2", "resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d"),
        *("preact_resnet18", "wrn_16_8", "wrn_28_10", "vgg_small"),
    ],
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
    with pytest.raises(ValueError, match=f"{name} has no counterpart in PyTorch"):
        torch_models.build(name)


@pytest.mark.job
def test_the_peer_steps_in_a_process() -> None:
    settings = {"model": "small", "batch": 3, "pixels": 28, "threads": 1, "last": True, "fused": True, "compiled": False}
    series = interleave({"peer": (peer(sys.executable, settings), with_threads(os.environ, 1))}, Rounds(2, 3))["peer"]
    assert [type(turn) for turn in series.turns] == [Turn, Turn]
    assert all(turn.finite and turn.wall_seconds > 0 < turn.peak_bytes for turn in series.turns)
    assert series.facts["parameters"] == parameter_count(catalogue.build("small", {}))
