"""Catalogue of all models. Each module of `families` is a model family; its VARIANTS are further model names.

A new family needs one new file and no entry in any list. Family names are module names ("vgg"). A variant is a name that fixes
some of the family's options ("vgg16_bn").
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.core.errors import ConfigError, OptionError
from hpctrain.core.registry import Registry, check_options, parameters_of
from hpctrain.nn.layers import Layer

FAMILIES: Registry[Layer] = Registry("hpctrain.models.families", "model", None)

_A_MODEL = (
    "a model must be a class derived from hpctrain.nn.layers.Layer, or a function that returns a layer (such as Sequential)"
)

#: values for options that normally follow from the data or from other keys, to build a model without these
_PLACEHOLDERS: Mapping[str, object] = {
    "classes": 10,
    "channels_in": 3,
    "seed": 0,
    "momentum": 0.1,
    "epsilon": 1e-5,
    "synchronised": False,
}


@dataclass(frozen=True)
class Entry:
    """Catalogue entry of one model name.

    Attributes:
        family: name of the family, or of a model in the user's code.
        builder: function or class that builds the model.
        fixed: options that the name fixes.
        image_shape: (H, W, C) of the images that the model is designed for; None if the user's code has no IMAGE_SHAPE.
    """

    family: str
    builder: Callable[..., Layer]
    fixed: Mapping[str, object]
    image_shape: tuple[int, int, int] | None


def names() -> tuple[str, ...]:
    """Return the names of all families and variants, sorted."""
    return tuple(sorted(_entries(FAMILIES.names())))


def entry(name: str) -> Entry:
    """Return the entry of a model name. A model in the user's code is a family with one name.

    Raises:
        ConfigError: there is no model of this name, or the user's code is not a model.
    """
    families = FAMILIES.names()
    entries = _entries([name] if name in families else families)  # the name of a family needs no import of other families
    builder = FAMILIES.find_outside(name, entries)
    if builder is None:
        return entries[name]
    if inspect.isclass(builder) and not issubclass(builder, Layer):
        raise ConfigError(f'"{name}" is {builder!r}, but {_A_MODEL}.')
    return Entry(name, builder, {}, getattr(sys.modules[builder.__module__], "IMAGE_SHAPE", None))


def options(name: str) -> dict[str, object]:
    """Return the model's options with their defaults; options without one, such as `classes`, with typical values.

    Raises:
        ConfigError: there is no model of this name.
    """
    known = entry(name)
    defaults = {option: parameter.default for option, parameter in parameters_of(known.builder).items()}
    return {**defaults, **_placeholders(known), **known.fixed}


def image_shape(name: str) -> tuple[int, int, int]:
    """Return the (H, W, C) of the images that the model is designed for.

    Raises:
        ConfigError: there is no model of this name, or its module has no IMAGE_SHAPE.
    """
    shape = entry(name).image_shape
    if shape is None:
        raise ConfigError(
            f'The code of model "{name}" does not declare the size of its images; add a line such as '
            f"IMAGE_SHAPE = (32, 32, 3), height, width and channels, to its module."
        )
    return shape


def check(name: str, given: Mapping[str, object]) -> dict[str, Any]:
    """Return all options of the model, converted to their types: defaults, options that the name fixes, and `given`.

    Raises:
        ConfigError: there is no model of this name.
        OptionError: an option is unknown, has a value of a wrong type, or differs from the value that the name fixes.
    """
    known = entry(name)
    converted = check_options(known.builder, f'model "{name}"', {**_placeholders(known), **given})
    meant = check_options(known.builder, f'model "{name}"', {**_placeholders(known), **known.fixed})
    for option, value in known.fixed.items():
        if converted.get(option, meant[option]) != meant[option]:
            raise OptionError(f'Model "{name}" fixes {option} = {value}, not {given[option]}; remove the option.', option)
    return {**options(name), **converted}


def build(name: str, given: Mapping[str, object]) -> Layer:
    """Build the model with the options `given`.

    Raises:
        ConfigError: there is no model of this name, or the family rejects the options.
        OptionError: see `check`.
        ShapeError: the sizes do not fit together.
    """
    builder = entry(name).builder
    with FAMILIES.refusals(name):
        model = builder(**check(name, given))
    if not isinstance(model, Layer):
        raise ConfigError(f'"{name}" makes {model!r}, but {_A_MODEL}.')
    return model


def _placeholders(known: Entry) -> dict[str, object]:
    """Return placeholder values for the options without a default, which a configuration derives from its other parts."""
    values = _PLACEHOLDERS if known.image_shape is None else {**_PLACEHOLDERS, "channels_in": known.image_shape[2]}
    parameters = parameters_of(known.builder)
    return {
        option: values[option]
        for option in values
        if option in parameters and parameters[option].default is parameters[option].empty
    }


def _entries(families: Iterable[str]) -> Mapping[str, Entry]:
    """Return the entries of these families and their variants, by name."""
    entries: dict[str, Entry] = {}
    for family in families:
        build = FAMILIES.find(family)
        module = sys.modules[build.__module__]
        for name, fixed in {family: {}, **module.VARIANTS}.items():
            assert name not in entries, f"two models are named {name}"
            entries[name] = Entry(family, build, fixed, module.IMAGE_SHAPE)
    return entries
