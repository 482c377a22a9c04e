"""The weights of a checkpoint with their model: what a checkpoint must know, and whose code is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.experiment.model_weights import ModelWeights, of_checkpoint, of_file
from hpctrain.models import catalogue, interchange
from hpctrain.nn.network import Network
from hpctrain.optim.ema import EMA
from hpctrain.storage.checkpoint import (
    CheckpointContent,
    averaged_statistic_key,
    checkpoint_path,
    optimizer_key,
    parameter_key,
    statistic_key,
    write,
)

CONFIG: dict[str, Any] = {
    "model": {"name": "small", "channels": [3], "hidden": 4},
    "data": {"train": "train.h5", "normalise": False},
    "batch": 4,
    "micro_batches": 2,
    "epochs": 1,
    "optimizer": {"name": "sgd", "lr": 0.1},
    "schedule": "constant",
}
DATA = {
    "samples": 8,
    "shape": [9, 8, 1],
    "images": "0",
    "labels": "0",
    "class_names": ["ant", "bee"],
    "mean": [0.5],
    "std": [0.25],
}
SUMS = {"loss": 0.0, "top1": 0, "top5": 0, "count": 0}


def network() -> Network:
    model = catalogue.build("small", {"channels": (3,), "hidden": 4, "classes": 2})
    return Network(model, (9, 8, 1), NumpyKernelSet(), dtype="float64", seed=1)


def checkpoint(folder: Path, averaged: Sequence[str] = (), **others: Any) -> Path:
    """A checkpoint after three steps; `others` replaces its configuration's keys, or its metadata's.

    averaged: names of parameters and statistics that have an average, which is their negative.
    """
    whole = network()
    tensors = {parameter_key(name): one.data for name, one in whole.parameters.items()}
    tensors |= {statistic_key(name): view for name, view in whole.statistics.views.items()}
    tensors |= {optimizer_key(EMA, name): -one.data for name, one in whole.parameters.items() if name in averaged}
    views = whole.statistics.views
    tensors |= {averaged_statistic_key(name): -view for name, view in views.items() if name in averaged}
    position = {"epoch": 0, "samples": 4, "global_step": 3, "sums": SUMS}
    config = {**CONFIG, **{key: value for key, value in others.items() if key in CONFIG}}
    meta = {"config": yaml.safe_dump(config), "position": position, "data": others.get("facts", DATA)}
    path = checkpoint_path(folder, 3)
    write(path, CheckpointContent(tensors, {key: value for key, value in meta.items() if value is not None}))
    return path


def test_a_checkpoint_has_its_model_and_what_a_reader_must_know(tmp_path: Path) -> None:
    content = of_checkpoint(checkpoint(tmp_path))
    wanted = interchange.export(network())
    assert content.state.keys() - wanted.keys() == {"stage1.bn.num_batches_tracked"}
    assert all(content.state[name].tobytes() == array.tobytes() for name, array in wanted.items())
    assert content.state["stage1.bn.num_batches_tracked"] == 6  # of two micro-batches each
    assert content.image_shape == (9, 8, 1)
    facts = {key: json.loads(content.metadata[key]) for key in ("classes", "mean", "std", "step")}
    assert facts == {"classes": ["ant", "bee"], "mean": [0.0], "std": [1.0], "step": 3}  # images are not normalised


def test_written_and_read_again_it_is_the_same(tmp_path: Path) -> None:
    content = of_checkpoint(checkpoint(tmp_path))
    content.write(tmp_path / "w.safetensors")
    again = of_file(tmp_path / "w.safetensors", None, None, {})
    assert again.metadata == content.metadata
    assert again.image_shape == content.image_shape
    assert list(again.state) == list(content.state)
    assert all(again.state[name].tobytes() == array.tobytes() for name, array in content.state.items())


def test_averages_are_exported_where_there_are_any(tmp_path: Path) -> None:
    """Layers that were frozen have none, and are their own."""
    plain, whole = of_checkpoint(checkpoint(tmp_path)), network()
    names = [name for name in (*whole.parameters, *whole.statistics.views) if not name.startswith("stage1.")]
    assert names
    path = checkpoint(tmp_path, averaged=names)
    content = of_checkpoint(path, averaged=True)
    assert content.state.keys() == plain.state.keys()
    for name, values in content.state.items():
        np.testing.assert_array_equal(values, -plain.state[name] if name in names else plain.state[name])
    assert content.metadata == {**plain.metadata, "averaged": "true"}
    assert of_checkpoint(path).metadata == plain.metadata
    content.write(tmp_path / "w.safetensors")
    assert of_file(tmp_path / "w.safetensors", None, None, {}).metadata == content.metadata
    with pytest.raises(CheckpointError, match=r"has no average of weights; .* train with ema\.decay\."):
        of_checkpoint(checkpoint(tmp_path), averaged=True)


def test_what_a_checkpoint_does_not_know_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has format version 1 and does not know its classes"):
        of_checkpoint(checkpoint(tmp_path, facts=None))
    with pytest.raises(CheckpointError, match="has weights of the model small, not of resnet18"):
        of_checkpoint(checkpoint(tmp_path), "resnet18")
    with pytest.raises(CheckpointError, match=r"has shape \(3, 3, 3, 1\), its model's has \(5, 3, 3, 1\)"):
        of_checkpoint(checkpoint(tmp_path, model={"name": "small", "channels": [5], "hidden": 4}))
    with pytest.raises(CheckpointError, match=r"lacks stage2\.conv\.weight, which its model has"):
        of_checkpoint(checkpoint(tmp_path, model={"name": "small", "channels": [3, 4], "hidden": 4}))


def test_code_of_the_users_is_loaded_where_it_is_named_only(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import pathlib\n"
        "from hpctrain.models.families.small import build\n"
        f"pathlib.Path({str(tmp_path / 'loaded')!r}).touch()\n"
        "def model(*, classes=2):\n    return build(classes=classes, channels=(3,), hidden=4)\n"
    )
    reference = f"{tmp_path}/own.py:model"
    path = checkpoint(tmp_path, model={"name": reference})
    with pytest.raises(ConfigError, match="is code of your own; give --model"):
        of_checkpoint(path)
    assert not (tmp_path / "loaded").exists()
    assert of_checkpoint(path, reference).state.keys() == of_checkpoint(checkpoint(tmp_path)).state.keys()


def test_an_onnx_file_needs_the_images_size(tmp_path: Path) -> None:
    content = of_checkpoint(checkpoint(tmp_path))
    unknown = ModelWeights(content.model, None, content.state, {})
    with pytest.raises(ConfigError, match="images of one size, which is not known here"):
        unknown.write(tmp_path / "w.onnx")
    unknown.write(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="does not say of which model it is"):
        of_file(tmp_path / "w.safetensors", None, None, {})
    assert not (tmp_path / "w.onnx").exists()
