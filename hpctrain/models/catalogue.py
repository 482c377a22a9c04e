"""All models by name: every module of this package with a `build` is a family, and its VARIANTS have names of their own.

A new model is one new file and no list is edited. Family names are module names ("vgg"); variants fix some of a family's options
("vgg16_bn").
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

import hpctrain.models
from hpctrain.errors import ConfigError
from hpctrain.nn.layer import Layer


@dataclass(frozen=True)
class Entry:
    """One name of the catalogue.

    builder: the family's `build`. fixed: options that the name stands for. image_shape: (H, W, C) the model is meant for.
    """

    builder: Callable[..., Layer]
    fixed: Mapping[str, object]
    image_shape: tuple[int, int, int]


def names() -> tuple[str, ...]:
    """Names of all families and variants, sorted."""
    return tuple(sorted(_entries()))


def options(name: str) -> dict[str, object]:
    """Options that the model takes, with their defaults.

    Raises:
        ConfigError: no model of this name.
    """
    entry = _entry(name)
    defaults = {option: parameter.default for option, parameter in inspect.signature(entry.builder).parameters.items()}
    return {**defaults, **entry.fixed}


def image_shape(name: str) -> tuple[int, int, int]:
    """(H, W, C) that the model is meant for.

    Raises:
        ConfigError: no model of this name.
    """
    return _entry(name).image_shape


def check(name: str, given: Mapping[str, object]) -> dict[str, Any]:
    """All options of the model: the defaults, what the name stands for, and what is given, as values of the right types.

    Raises:
        ConfigError: no model of this name, an option it does not take, a value of another type, or one that the name has fixed
            otherwise.
    """
    entry, known = _entry(name), options(name)
    hints = get_type_hints(entry.builder)
    for option, value in given.items():
        if option not in known:
            raise ConfigError(f"Model {name} has no option {option!r}; {_nearest(option, known)}")
        known[option] = _convert(name, option, value, hints[option])
        if option in entry.fixed and known[option] != entry.fixed[option]:
            raise ConfigError(f"Model {name} means {option} = {entry.fixed[option]!r}, not {value!r}; leave the option out.")
    return known


def build(name: str, given: Mapping[str, object]) -> Layer:
    """The model.

    Raises:
        ConfigError: as `check`, or options that the family refuses. ShapeError: sizes that do not fit together.
    """
    return _entry(name).builder(**check(name, given))


@cache
def _entries() -> Mapping[str, Entry]:
    entries: dict[str, Entry] = {}
    for found in pkgutil.iter_modules(hpctrain.models.__path__):
        module = importlib.import_module(f"{hpctrain.models.__name__}.{found.name}")
        if module.__name__ == __name__ or not hasattr(module, "VARIANTS"):
            continue
        for name, fixed in {found.name: {}, **module.VARIANTS}.items():
            assert name not in entries, f"two models are named {name}"
            entries[name] = Entry(module.build, fixed, module.IMAGE_SHAPE)
    return entries


def _entry(name: str) -> Entry:
    entries = _entries()
    if name not in entries:
        raise ConfigError(f"There is no model named {name!r}; {_nearest(name, entries)}")
    return entries[name]


def _convert(model: str, option: str, value: object, hint: Any) -> Any:
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].lower()
        raise ConfigError(f"Option {option} of model {model} cannot be {value!r}: {problem}.") from None


def _nearest(name: str, known: Iterable[str]) -> str:
    candidates = sorted(known)
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.0)
    return f"the nearest is {close[0]!r}; known are {', '.join(candidates)}."
