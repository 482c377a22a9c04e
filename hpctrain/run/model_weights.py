"""Weights together with the model that they belong to: of a file from elsewhere or of a checkpoint, on the way to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.config.grid import model_options
from hpctrain.config.images import training_shape
from hpctrain.config.load import parse
from hpctrain.config.options import named, names
from hpctrain.config.schema import Config
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.data.image_file import DataFacts
from hpctrain.models import catalogue
from hpctrain.models.onnx_model import onnx_model
from hpctrain.models.state_dict import (
    StateEntry,
    check_finite,
    check_fits,
    classes_in,
    declared_state,
    is_counter,
    with_counters,
)
from hpctrain.nn.layers import Layer
from hpctrain.run.resume import data_of
from hpctrain.storage import checkpoint, weights_file
from hpctrain.storage.atomic_write import write_bytes
from hpctrain.storage.checkpoint import CheckpointContent, parameter_key, statistic_key
from hpctrain.storage.weights_file import WeightsFile
from hpctrain.train.snapshot import Position, averaged_keys

ONNX = ".onnx"
#: endings of the files that are written
SUFFIXES = (*weights_file.SUFFIXES, ONNX)
_CHANGED = "the code of the model has changed since it was written"


@dataclass(frozen=True)
class ModelWeights:
    """A model and its weights.

    Attributes:
        model: whose weights they are. image_shape: (H, W, C) that it is meant for; None: that is not known.
        state: in torchvision's names, layouts and order, counters of batch norms included where the source had them.
        metadata: of a file of these weights.
    """

    model: Layer
    image_shape: tuple[int, int, int] | None
    state: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]

    def write(self, path: Path) -> None:
        """Write a safetensors, PyTorch or ONNX file, by its name's ending; whole or not at all.

        Raises:
            CheckpointError: another ending, or more than such a file holds. BackendError: no ONNX is to be had of this model.
            OSError: it cannot be written.
        """
        if weights_file.check_suffix(path, SUFFIXES) != ONNX:
            weights_file.write(path, WeightsFile(self.state, self.metadata))
            return
        if self.image_shape is None:
            raise ConfigError("An ONNX file is made for images of one size, which is not known here; export safetensors instead.")
        single = {name: array.astype(np.float32) for name, array in self.state.items() if not is_counter(name)}
        proto = onnx_model(self.model, self.image_shape, single, self.metadata)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, proto.SerializeToString())


def of_file(path: Path, name: str | None, classes: int | None, options: Mapping[str, Any]) -> ModelWeights:
    """Return the weights of a file, all of which fit the model.

    Args:
        name: of the model; None: the one that the file names. classes: number of them; None: as many as the last layer of the
            file has. options: further ones of the model.

    Raises:
        CheckpointError: the file cannot be read, names no model, or has other arrays than the model.
        ConfigError: no such model or option.
    """
    content = weights_file.read(path)
    name = content.metadata.get("model") if name is None else name
    if name is None:
        raise CheckpointError(f"{path} does not say of which model it is; give --model, as in `--model resnet50`.")
    given = {**_options_in(content.metadata, name), **options}
    model = _model_with_classes(name, given, classes, content.tensors)
    entries = declared_state(model)
    check_fits(entries, content.tensors, source=str(path), model=name)
    state = {key: content.tensors[key] for key in _names(entries, content.tensors)}
    shape = tuple(json.loads(content.metadata["image_shape"])) if "image_shape" in content.metadata else None
    usual_shape = catalogue.entry(name).image_shape
    metadata = _metadata(name, given, {key: content.metadata[key] for key in _KEPT if key in content.metadata})
    return ModelWeights(model, usual_shape if shape is None else shape, state, metadata)


def of_checkpoint(
    path: Path,
    name: str | None = None,
    classes: int | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    averaged: bool = False,
) -> ModelWeights:
    """Return the weights in a checkpoint of any layout and grid, every checksum verified.

    Args:
        name: name of the model; required if the model is user code, or if `job.save` wrote the checkpoint.
        classes: number of classes of the model, for a checkpoint without a configuration; default: that of its last layer.
        options: further options of the model, for a checkpoint without a configuration.
        averaged: whether to return the average of the weights instead of the weights.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model, lacks the facts of its data or the average, or has
            numbers that are not finite.
        ConfigError: its configuration cannot be used, or names code that `name` does not.
    """
    content = checkpoint.read(path)
    if "config" not in content.meta:
        return _of_own_loop(content, path, name, classes, options or {}, averaged=averaged)
    if classes is not None or options:
        raise CheckpointError(f"{path} contains the options of its model; leave --classes and --option out.")
    config = parse(str(content.meta["config"]), str(path))[0]
    given = config.model.name
    if name is not None and name != given:
        raise CheckpointError(f"{path} has weights of the model {given}, not of {name}; leave --model out.")
    if name is None and given not in catalogue.names():
        raise ConfigError(f'The model of {path} is code of your own; give --model "{given}" to have it loaded.')
    data = data_of(content)
    if data is None:
        raise CheckpointError(
            f"{path} has format version 1 and does not know its classes; resume from it for an epoch, and export the next one."
        )
    shape = _image_shape(config, data)
    channels = data.shape[2]
    options = model_options(config, len(data.class_names), shape or (1, 1, channels))
    model = catalogue.build(given, options)
    position = Position.from_meta(content.meta)
    keys = averaged_keys(content) if averaged else {}
    state = with_counters(
        _exported(content, declared_state(model), path, keys, _CHANGED), position.global_step * config.micro_batches
    )
    check_finite(state, str(path))
    facts = {
        "classes": json.dumps(data.class_names),
        **({} if shape is None else {"image_shape": json.dumps(shape)}),
        "mean": json.dumps(data.mean if config.data.normalise else [0.0] * channels),
        "std": json.dumps(data.std if config.data.normalise else [1.0] * channels),
        "step": str(position.global_step),
        **({"averaged": "true"} if averaged else {}),
    }
    return ModelWeights(model, shape, state, _metadata(given, config.model.options, facts))


def _of_own_loop(
    content: CheckpointContent, path: Path, name: str | None, classes: int | None, options: Mapping[str, Any], *, averaged: bool
) -> ModelWeights:
    """Return the weights in a checkpoint that `job.save` wrote: it contains no model, no image size and no facts of the data."""
    if name is None:
        raise CheckpointError(
            f"{path} was written by job.save and does not name its model; give --model, as in `--model resnet50`."
        )
    parameters = {key.removeprefix(parameter_key("")): array for key, array in content.tensors.items()}
    model = _model_with_classes(name, options, classes, parameters)
    keys = averaged_keys(content) if averaged else {}
    position = Position.from_meta(content.meta)
    advice = "give --model, --classes and --option as in the program that saved it"
    state = with_counters(_exported(content, declared_state(model), path, keys, advice), position.global_step)
    check_finite(state, str(path))
    facts = {"step": str(position.global_step), **({"averaged": "true"} if averaged else {})}
    return ModelWeights(model, None, state, _metadata(name, options, facts))


def _image_shape(config: Config, data: DataFacts) -> tuple[int, int, int] | None:
    """Return (H, W, C) of images as the network sees them; None if augmentations are the user's code, which is not imported."""
    foreign = any(kind == "augmentations" and name not in names(kind) for kind, name in named(config))
    return None if foreign else training_shape(config, data)


#: facts of a file that are passed on to the next one
_KEPT = ("classes", "image_shape", "mean", "std", "step", "averaged")


def _metadata(name: str, options: Mapping[str, Any], facts: Mapping[str, str]) -> dict[str, str]:
    """Return metadata as safetensors and ONNX keep them, as text. format: of the layouts, by which others know these files."""
    return {"format": "pt", "model": name, "model_options": json.dumps(dict(options)), **facts}


def _options_in(metadata: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return the options of the model that a file of ours keeps, if it is of this model."""
    if metadata.get("model") != name:
        return {}
    options: dict[str, Any] = json.loads(metadata.get("model_options", "{}"))
    return options


def _model_with_classes(name: str, options: Mapping[str, Any], classes: int | None, state: Mapping[str, np.ndarray]) -> Layer:
    model = catalogue.build(name, options)
    if "classes" not in catalogue.options(name) or "classes" in options:
        return model
    count = classes_in(model, state) if classes is None else classes
    return model if count is None else catalogue.build(name, {**options, "classes": count})


def _names(entries: Mapping[str, StateEntry], given: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of a state in the order of the model, counters where the file has them."""
    order = with_counters({name: np.zeros(0) for name in entries}, 0)
    return [name for name in order if name in given]


def _exported(
    content: CheckpointContent, entries: Mapping[str, StateEntry], path: Path, averages: Mapping[str, str], advice: str
) -> dict[str, np.ndarray]:
    """Return a checkpoint's tensors in torchvision's layouts.

    Args:
        averages: key of the average by the key of the tensor that it replaces.
        advice: end of the error message if the tensors do not fit the model.
    """
    state = {}
    for name, entry in entries.items():
        key = statistic_key(name) if entry.spec is None else parameter_key(name)
        shape = entry.shape if entry.spec is None else entry.spec.shape
        if key not in content.tensors:
            raise CheckpointError(f"{path} lacks {name}, which the model has; {advice}.")
        tensor = content.tensors[averages.get(key, key)]
        if tensor.shape != shape:
            raise CheckpointError(f"{name} has shape {tensor.shape} in {path}, and {shape} in the model; {advice}.")
        state[name] = entry.export(np.asarray(tensor))
    return state
