"""A model and its weights, read from a foreign file or a checkpoint, and written to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.assembly.images import described_training, training_shape
from hpctrain.assembly.options import named, names
from hpctrain.assembly.recipe import ImageFacts, Recipe
from hpctrain.config.load import parse
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
from hpctrain.run.resume import stored_data
from hpctrain.storage import checkpoint, weights_file
from hpctrain.storage.atomic_write import write_bytes
from hpctrain.storage.checkpoint import CheckpointContent, parameter_key, statistic_key
from hpctrain.storage.weights_file import WeightsFile
from hpctrain.training.snapshot import Position, averaged_keys

ONNX = ".onnx"
#: suffixes of the files that can be written
SUFFIXES = (*weights_file.SUFFIXES, ONNX)
_CHANGED = "the code of the model has changed since it was written"


@dataclass(frozen=True)
class ModelWeights:
    """A model and its weights.

    Attributes:
        image_shape: input shape (H, W, C); None if unknown.
        state: tensors in torchvision's names, layouts and order, with counters of batch norms if the source has them.
        metadata: facts about model and training, which a file stores next to the tensors (see `_metadata`).
    """

    model: Layer
    image_shape: tuple[int, int, int] | None
    state: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]

    def write(self, path: Path) -> None:
        """Write a safetensors, PyTorch or ONNX file, according to the name's suffix. The file is complete or absent.

        Raises:
            CheckpointError: the suffix is unknown, or the weights exceed the format's limits.
            BackendError: the model cannot be exported to ONNX.
            ConfigError: an ONNX file is requested, but the input shape is unknown.
            OSError: the file cannot be written.
        """
        if weights_file.check_suffix(path, SUFFIXES) != ONNX:
            weights_file.write(path, WeightsFile(self.state, self.metadata))
            return
        if self.image_shape is None:
            raise ConfigError(
                "An ONNX file needs the size of its images, which is not known for these weights; export safetensors instead."
            )
        single = {name: array.astype(np.float32) for name, array in self.state.items() if not is_counter(name)}
        proto = onnx_model(self.model, self.image_shape, single, self.metadata)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, proto.SerializeToString(deterministic=True))


def of_file(path: Path, name: str | None, classes: int | None, options: Mapping[str, Any]) -> ModelWeights:
    """Return the weights of a file, after checking that all of them fit the model.

    Args:
        name: name of the model; None: the model that the file names.
        classes: number of classes; None: the number of outputs of the file's last layer.
        options: options of the model, which override those in the file.

    Raises:
        CheckpointError: the file cannot be read, names no model, or has other tensors than the model.
        ConfigError: the model or an option is unknown.
    """
    content = weights_file.read(path)
    name = content.metadata.get("model") if name is None else name
    if name is None:
        raise CheckpointError(f"{path} does not name its model; give --model, as in `--model resnet50`.")
    stored = json.loads(content.metadata.get("model_options", "{}")) if content.metadata.get("model") == name else {}
    given = {**stored, **options}
    model = _model_with_classes(name, given, classes, content.tensors)
    entries = declared_state(model)
    check_fits(entries, content.tensors, source=str(path), model=name, named=content.metadata.get("model"))
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
    """Return the weights in a checkpoint of any layout and grid, after verifying all checksums.

    Args:
        name: name of the model; required if the model is user code, or if `job.save` wrote the checkpoint.
        classes: number of classes of the model, for a checkpoint without a configuration; default: number of outputs of its last
            layer.
        options: further options of the model, for a checkpoint without a configuration.
        averaged: whether to return the averaged weights.

    Raises:
        CheckpointError: the checkpoint is damaged, belongs to another model, lacks facts about its data or averaged weights, or
            has values that are not finite.
        ConfigError: the checkpoint's configuration is invalid, or its model is user code and `name` is None.
    """
    content = checkpoint.read(path)
    if "config" not in content.meta:
        return _of_own_loop(content, path, name, classes, options or {}, averaged=averaged)
    if classes is not None or options:
        raise CheckpointError(f"{path} contains the options of its model; leave --classes and --option out.")
    config = parse(str(content.meta["config"]), str(path), stored=True)[0]
    given = config.model.name
    if name is not None and name != given:
        raise CheckpointError(f"{path} has weights of the model {given}, not of {name}; leave --model out.")
    if name is None and given not in catalogue.names():
        raise ConfigError(f'The model of {path} is user code, which is loaded only on request; give --model "{given}".')
    data = stored_data(content, path)
    shape = _image_shape(config, data)
    model = Recipe.of(config, ImageFacts((shape or (1, 1, data.shape[2]),), len(data.class_names))).model
    position = Position.from_meta(content.meta)
    keys = averaged_keys(content) if averaged else {}
    state = with_counters(
        _exported(content, declared_state(model), path, keys, _CHANGED), position.global_step * config.micro_batches
    )
    check_finite(state, str(path))
    described = described_training(config, data, shape)
    facts = {
        **{key: json.dumps(value) for key, value in described.items() if value is not None},
        "step": str(position.global_step),
        **({"averaged": "true"} if averaged else {}),
    }
    return ModelWeights(model, shape, state, _metadata(given, config.model.options, facts))


def _of_own_loop(
    content: CheckpointContent, path: Path, name: str | None, classes: int | None, options: Mapping[str, Any], *, averaged: bool
) -> ModelWeights:
    """Return the weights in a checkpoint that `job.save` wrote.

    The checkpoint contains no model, no image size and no facts about the data.
    """
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
    """Return the network's input shape (H, W, C); None if augmentations are user code, which is not imported."""
    foreign = any(kind == "augmentations" and name not in names(kind) for kind, name in named(config))
    return None if foreign else training_shape(config, data)


#: keys of a file's metadata that are copied to a file written from it
_KEPT = ("classes", "image_shape", "fit", "value_range", "mean", "std", "step", "averaged")


def _metadata(name: str, options: Mapping[str, Any], facts: Mapping[str, str]) -> dict[str, str]:
    """Return metadata as text, as safetensors and ONNX store them. "format": "pt" marks PyTorch's layouts for other programs."""
    return {"format": "pt", "model": name, "model_options": json.dumps(dict(options)), **facts}


def _model_with_classes(name: str, options: Mapping[str, Any], classes: int | None, state: Mapping[str, np.ndarray]) -> Layer:
    model = catalogue.build(name, options)
    if "classes" not in catalogue.options(name) or "classes" in options:
        return model
    count = classes_in(model, state) if classes is None else classes
    return model if count is None else catalogue.build(name, {**options, "classes": count})


def _names(entries: Mapping[str, StateEntry], given: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names in `given` in the order of the model, including counters if present."""
    order = with_counters({name: np.zeros(0) for name in entries}, 0)
    return [name for name in order if name in given]


def _exported(
    content: CheckpointContent, entries: Mapping[str, StateEntry], path: Path, averages: Mapping[str, str], advice: str
) -> dict[str, np.ndarray]:
    """Return a checkpoint's tensors in torchvision's layouts.

    Args:
        averages: keys of averaged tensors, by the key of the tensor that each replaces.
        advice: end of the error message if the tensors do not fit the model.

    Raises:
        CheckpointError: a tensor is missing, or has another shape than in the model.
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
