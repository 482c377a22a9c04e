"""Keywords of the Python API that are keys of the configuration, whose types, defaults and rules apply to them.

Some keywords are in no table, because a configuration writes them in another form: a model, optimiser or class weights that a
program has made, pairs of sizes, and values for which a key also accepts a path or "auto".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from hpctrain.config.schema import SYNTHETIC, Config
from hpctrain.core.answers import config_error, schema_faults, sibling
from hpctrain.core.registry import check_types, native
from hpctrain.core.yaml_source import KeyPath

#: keywords of `start`
START_KEYS: Mapping[str, KeyPath] = {
    "batch": ("batch",),
    "rows": ("grid", "rows"),
    "cols": ("grid", "cols"),
    "progress": ("progress",),
    "deadline_seconds": ("deadline_seconds",),
}

#: keywords of `Job.replica` and `Automatic`
REPLICA_KEYS: Mapping[str, KeyPath] = {
    "averager": ("averager",),
    "plan": ("plan",),
    "tiles": ("grid", "tiles"),
    "micro_batches": ("micro_batches",),
    "exact_shards": ("exact", "shards"),
    "backend": ("backend",),
    "dtype": ("dtype",),
    "precision": ("precision",),
    "seed": ("seed",),
    "label_smoothing": ("loss", "label_smoothing"),
    "ema_decay": ("ema", "decay"),
    "checks_every_steps": ("checks", "every_steps"),
    "on_nonfinite": ("on_nonfinite",),
    "frozen": ("init", "freeze"),
}

#: keywords of `Job.loader` and `Job.array_loader`
LOADER_KEYS: Mapping[str, KeyPath] = {
    "batch": ("batch",),
    "seed": ("seed",),
    "augment": ("data", "augment"),
    "mixing": ("data", "mixing"),
    "prefetch": ("data", "prefetch"),
    "cache": ("data", "cache"),
}

# Keys without a default. A program has a model, data and a learning rate of its own, so nothing reads these values.
_UNREAD: Mapping[str, Any] = {
    "model": "own",
    "data": {"train": SYNTHETIC},
    "epochs": 0,
    "optimizer": {"name": "own", "lr": 1.0},
    "schedule": "constant",
}


def keyword_config(
    function: Callable[..., Any], keys: Mapping[str, KeyPath], arguments: Mapping[str, Any], *, batch: int = 1
) -> Config:
    """Return the configuration that the arguments of a function describe. Keys without an argument have their defaults.

    An argument that is None leaves its key out if None is the argument's default. Types are strict: "3", 3.0 and True are no
    integers. NumPy's numbers are accepted, and lists and arrays for tuples.

    Args:
        function: function or class whose signature has the types of the arguments that are no keys, as for `check_types`.
        keys: key of each keyword.
        arguments: arguments by name.
        batch: batch, if no argument sets it.

    Raises:
        ConfigError: an argument has another type than the signature, or breaks the rule of its key. All broken rules of keys are
            reported.
    """
    check_types(function, {name: value for name, value in arguments.items() if name not in keys})
    parameters = inspect.signature(function).parameters
    values: dict[str, Any] = {**deepcopy(_UNREAD), "batch": batch}
    for name, value in arguments.items():
        if name in keys and not (value is None and parameters[name].default is None):
            *sections, key = map(str, keys[name])
            section = values
            for part in sections:
                section = section.setdefault(part, {})
            section[key] = native(value)

    def renamed(path: KeyPath) -> KeyPath:
        starts = ((name, *path[len(key) :]) for name, key in keys.items() if path[: len(key)] == key)
        return next(starts, path)

    def meant(path: KeyPath) -> KeyPath | None:
        near = sibling(Config, path)
        return None if near is None else renamed(near)

    try:
        return Config.model_validate(values, strict=True)
    except ValidationError as error:
        faults = [replace(fault, path=renamed(fault.path)) for fault in schema_faults(error, Config, meant=meant)]
    raise config_error(faults)
