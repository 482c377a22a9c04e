"""All models by name: each module of `families` is one, and its VARIANTS have names of their own.

A new model is one new file and no list is edited. Family names are module names ("vgg"); variants fix some of a family's options
("vgg16_bn").
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import OptionError
from hpctrain.nn.layer import Layer
from hpctrain.registry import Registry, check_options, unknown

FAMILIES: Registry[Layer] = Registry("hpctrain.models.families", "model", None)


@dataclass(frozen=True)
class Entry:
    """One name of the catalogue.

    family: the module. builder: its `build`. fixed: options that the name stands for.
    image_shape: (H, W, C) the model is meant for.
    """

    family: str
    builder: Callable[..., Layer]
    fixed: Mapping[str, object]
    image_shape: tuple[int, int, int]


def names() -> tuple[str, ...]:
    """Names of all families and variants, sorted."""
    return tuple(sorted(_entries()))


def entry(name: str) -> Entry:
    """The family behind a name, and what the name fixes of its options.

    Raises:
        ConfigError: no model of this name.
    """
    entries = _entries()
    if name not in entries:
        raise unknown(FAMILIES.kind, name, names())
    return entries[name]


def options(name: str) -> dict[str, object]:
    """Options that the model takes, with their defaults.

    Raises:
        ConfigError: no model of this name.
    """
    known = entry(name)
    defaults = {option: parameter.default for option, parameter in inspect.signature(known.builder).parameters.items()}
    return {**defaults, **known.fixed}


def image_shape(name: str) -> tuple[int, int, int]:
    """(H, W, C) that the model is meant for.

    Raises:
        ConfigError: no model of this name.
    """
    return entry(name).image_shape


def check(name: str, given: Mapping[str, object]) -> dict[str, Any]:
    """All options of the model: the defaults, what the name stands for, and what is given, as values of the right types.

    Raises:
        ConfigError: no model of this name. OptionError: an option it does not take, a value of another type, or one that the
            name fixes otherwise.
    """
    known = entry(name)
    converted = check_options(known.builder, f'model "{name}"', given)
    for option, value in known.fixed.items():
        if converted.get(option, value) != value:
            raise OptionError(f'Model "{name}" means {option} = {value}, not {given[option]}; leave the option out.', option)
    return {**options(name), **converted}


def build(name: str, given: Mapping[str, object]) -> Layer:
    """The model.

    Raises:
        ConfigError: as `check`, or options that the family refuses. ShapeError: sizes that do not fit together.
    """
    return entry(name).builder(**check(name, given))


def _entries() -> Mapping[str, Entry]:
    entries: dict[str, Entry] = {}
    for family in FAMILIES.names():
        build = FAMILIES.find(family)
        module = sys.modules[build.__module__]
        for name, fixed in {family: {}, **module.VARIANTS}.items():
            assert name not in entries, f"two models are named {name}"
            entries[name] = Entry(family, build, fixed, module.IMAGE_SHAPE)
    return entries
