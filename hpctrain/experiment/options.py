"""Every name that a configuration can choose, with its options: types, defaults and meanings, read from what is constructed.

Frozen dataclasses `Options` or constructors' signatures, with the "Args" of their docstrings, are the one source of what
`config show` fills in, of the JSON schema, of `hpctrain list` and of docs/options.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from hpctrain.config.schema import Config, Named
from hpctrain.data.augmentations import AUGMENTATIONS
from hpctrain.experiment import averager as averagers
from hpctrain.models import catalogue
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.optim.schedules import SCHEDULES
from hpctrain.registry import Registry, options_of, parameters_of

#: options of models that follow from the rest of the configuration where they are left out
FOLLOWING: Mapping[str, str] = {
    "classes": "Number of classes; left out, it is that of the training file.",
    "channels_in": "Channels of the images; left out, it is that of the training file.",
    "momentum": "Momentum of the running statistics; left out, it is batch_norm.momentum.",
    "epsilon": "Number added to variances; left out, it is batch_norm.epsilon.",
    "synchronised": "Batch statistics are those of all ranks; left out, it follows from batch_norm.statistics.",
    "seed": "Seed of dropout's masks; left out, it is the run's.",
}


@dataclass(frozen=True)
class Option:
    """One keyword that a configuration may give.

    schema: the JSON schema of its type. default: as plain data; without meaning where `needed`. meaning: in a sentence.
    """

    name: str
    schema: Mapping[str, Any]
    default: Any
    needed: bool
    meaning: str


@dataclass(frozen=True)
class Choice:
    """One name. sentence: what it stands for. options: in the constructor's order, those that follow from the data left out.

    family: the name that shares these options; `fixed`: those of the family's that this name has settled.
    """

    name: str
    sentence: str
    options: tuple[Option, ...]
    family: str
    fixed: Mapping[str, Any] = field(default_factory=dict)


#: section of a configuration -> kind, as `hpctrain list` calls it
SECTIONS = {"model": "models", "optimizer": "optimizers", "averager": "averagers", "schedule": "schedules"}
KINDS = (*SECTIONS.values(), "augmentations")


def registry(kind: str) -> Registry[Any]:
    """The registry of a kind; that of models has the families."""
    registries: Mapping[str, Registry[Any]] = {
        "models": catalogue.FAMILIES,
        "optimizers": OPTIMIZERS,
        "averagers": averagers.AVERAGERS,
        "schedules": SCHEDULES,
        "augmentations": AUGMENTATIONS,
    }
    return registries[kind]


def names(kind: str) -> tuple[str, ...]:
    """All names of a kind."""
    return catalogue.names() if kind == "models" else registry(kind).names()


def choice(kind: str, name: str) -> Choice:
    """One name of a kind.

    Raises:
        ConfigError: there is no such name.
    """
    if kind == "models":
        return _model(name)
    known = registry(kind)
    entry = known.find(name)
    return Choice(name, _sentence(entry), _options(entry, known.given), name)


def choices(kind: str) -> tuple[Choice, ...]:
    """All names of a kind: models, optimizers, averagers, schedules or augmentations."""
    return tuple(choice(kind, name) for name in names(kind))


def filled(config: Config) -> Config:
    """The same configuration with every option that it leaves to a default; `config` must have passed `check_names`.

    Options that follow from the data or from other keys stay out, and so do those that a model's name settles.
    """
    sections = {section: _filled(getattr(config, section), kind) for section, kind in SECTIONS.items()}
    images = config.data
    steps = {key: [_filled(step, "augmentations") for step in getattr(images, key)] for key in ("augment", "evaluate_augment")}
    images = images.model_copy(update={key: tuple(filled_steps) for key, filled_steps in steps.items()})
    return config.model_copy(update={**sections, "data": images})


def defaults(config: Config) -> dict[str, Any]:
    """The value of each option that may be left out, by dotted key ("optimizer.momentum"), for what the configuration names."""
    return {
        f"{section}.{option}": value
        for section, kind in SECTIONS.items()
        for option, value in _defaults(kind, getattr(config, section).name).items()
    }


def _defaults(kind: str, name: str) -> dict[str, Any]:
    return {option.name: option.default for option in choice(kind, name).options if not option.needed}


def _filled(section: Named, kind: str) -> Named:
    defaults = _defaults(kind, section.name)
    declared = {name: getattr(section, name) for name in type(section).model_fields}
    return type(section).model_validate({**declared, **defaults, **section.options})


def _model(name: str) -> Choice:
    known = catalogue.entry(name)
    height, width, channels = known.image_shape
    sentence = _sentence(known.builder)
    if known.family != name:
        settled = " and ".join(f"{option} {_spoken(value)}" for option, value in known.fixed.items())
        sentence = f"{known.family} with {settled}, for {height} x {width} x {channels} images."
    options = _options(known.builder, (*known.fixed, *FOLLOWING))
    return Choice(name, sentence, options, known.family, known.fixed)


def _spoken(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _options(entry: Callable[..., Any], left_out: Collection[str]) -> tuple[Option, ...]:
    taker = options_of(entry)
    meanings = _meanings(taker)
    return tuple(
        _option(parameter, meanings.get(name, "")) for name, parameter in parameters_of(taker).items() if name not in left_out
    )


def _option(parameter: inspect.Parameter, meaning: str) -> Option:
    needed = parameter.default is inspect.Parameter.empty
    default = None if needed else parameter.default
    if parameter.annotation is inspect.Parameter.empty or isinstance(parameter.annotation, str):
        return Option(parameter.name, {}, default, needed, meaning)
    adapter = TypeAdapter(parameter.annotation)
    default = adapter.dump_python(default, mode="json", warnings=False)  # a missing one is None, which the type may not allow
    return Option(parameter.name, adapter.json_schema(), default, needed, meaning)


def _sentence(entry: Callable[..., Any]) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(entry) or "").split("\n\n")[0].split())


def _meanings(entry: Callable[..., Any]) -> dict[str, str]:
    """Option -> sentence, from "Args" of a function or of a class and its bases: an option begins its own line."""
    documented = [cls.__doc__ for cls in reversed(entry.__mro__)] if inspect.isclass(entry) else [entry.__doc__]
    return dict(line for text in documented for line in _arguments(inspect.cleandoc(text or "")))


def _arguments(text: str) -> Iterator[tuple[str, str]]:
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    for match in re.finditer(r"^    (\w+): (.*(?:\n {8}.*)*)", section[1] if section else "", re.MULTILINE):
        yield match[1], " ".join(match[2].split())
