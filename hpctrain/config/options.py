"""Every name that a configuration can choose, with its options: types, defaults and meanings, read from what is constructed.

Frozen dataclasses `Options` or constructors' signatures, with the "Args" of their docstrings, are the one source of what
`config show` fills in, of `hpctrain list`, of docs/options.md, and of the JSON schema by which editors complete and check.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from pydantic import PydanticUserError, TypeAdapter

from hpctrain.averaging import averagers
from hpctrain.config import load
from hpctrain.config.schema import Config, OptimizerConfig, ScheduleConfig
from hpctrain.config.values import AUTO, Named, plain
from hpctrain.core.errors import ConfigError
from hpctrain.core.registry import Registry, options_of, parameters_of
from hpctrain.core.yaml_source import KeyPath
from hpctrain.data.augmentations import AUGMENTATIONS
from hpctrain.models import catalogue
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.optim.schedules import SCHEDULES
from hpctrain.train.reporters import REPORTERS

#: options of models that follow from the rest of the configuration where they are left out
FOLLOWING: Mapping[str, str] = {
    "classes": "Number of classes; left out, it is that of the training file.",
    "channels_in": "Channels of the images; left out, it is that of the training file.",
    "momentum": "Momentum of the running statistics; left out, it is batch_norm.momentum.",
    "epsilon": "Number added to variances; left out, it is batch_norm.epsilon.",
    "synchronised": "Batch statistics are those of all ranks; left out, it follows from batch_norm.statistics.",
    "seed": "Seed of what dropout and stochastic depth drop; left out, it is the run's.",
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


#: in place of an averaging strategy; it has no options, and is none itself
AUTOMATIC = Choice(AUTO, "The averaging strategy that is the fastest by prediction, chosen at the start of a run.", (), AUTO)

#: section of a configuration -> kind, as `hpctrain list` calls it
SECTIONS = {"model": "models", "optimizer": "optimizers", "averager": "averagers", "schedule": "schedules"}
KINDS = (*SECTIONS.values(), "augmentations", "reporters")

#: kind -> keys of its section that are no options
_KEYS = {"optimizers": tuple(OptimizerConfig.model_fields), "schedules": tuple(ScheduleConfig.model_fields)}

#: lists of a configuration -> kind of their items
LISTS = {
    ("data", "augment"): "augmentations",
    ("data", "evaluate_augment"): "augmentations",
    ("metrics", "reporters"): "reporters",
}


def kind_of(path: KeyPath) -> str:
    """Return the kind of the name at a path of a configuration, such as ("model",) or ("data", "augment", 0)."""
    return SECTIONS[str(path[0])] if len(path) == 1 else LISTS[str(path[0]), str(path[1])]


def registry(kind: str) -> Registry[Any]:
    """Return the registry of a kind; that of models has the families."""
    registries: Mapping[str, Registry[Any]] = {
        "models": catalogue.FAMILIES,
        "optimizers": OPTIMIZERS,
        "averagers": averagers.AVERAGERS,
        "schedules": SCHEDULES,
        "augmentations": AUGMENTATIONS,
        "reporters": REPORTERS,
    }
    return registries[kind]


def names(kind: str) -> tuple[str, ...]:
    """Return all of hpctrain's own names of a kind."""
    return catalogue.names() if kind == "models" else registry(kind).names()


def choice(kind: str, name: str) -> Choice:
    """Return one name of a kind, which may be a reference to code of the user's.

    Raises:
        ConfigError: there is no such name or no such code, or an option has the name of a key of the section.
    """
    if (kind, name) == ("averagers", AUTO):
        return AUTOMATIC
    known = registry(kind)
    if kind == "models":
        described = _model(name)
    else:
        entry = known.find(name)
        described = Choice(name, _sentence(entry), _options(entry, known.given), name)
    for option in described.options:
        if option.name in _KEYS.get(kind, ("name",)):
            raise ConfigError(
                f'The {known.kind} "{name}" cannot have an option "{option.name}", which is a key of its section already; '
                f"give that keyword of its constructor another name."
            )
    return described


def choices(kind: str) -> tuple[Choice, ...]:
    """Return all of hpctrain's own names of a kind: models, optimizers, averagers, schedules, augmentations or reporters."""
    return tuple(choice(kind, name) for name in names(kind))


def named(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of all that a configuration names."""
    yield from ((kind, getattr(config, section).name) for section, kind in SECTIONS.items())
    for (outer, key), kind in LISTS.items():
        yield from ((kind, item.name) for item in getattr(getattr(config, outer), key))


def filled(config: Config) -> Config:
    """Return the same configuration with every option that it leaves to a default; `config` must have passed `check_names`.

    Options that follow from the data or from other keys stay out, and so do those that a model's name settles.
    """
    sections: dict[str, Any] = {section: _filled(getattr(config, section), kind) for section, kind in SECTIONS.items()}
    for (outer, key), kind in LISTS.items():
        section = sections.get(outer, getattr(config, outer))
        items = tuple(_filled(item, kind) for item in getattr(section, key))
        sections[outer] = section.model_copy(update={key: items})
    return config.model_copy(update=sections)


def defaults(config: Config) -> dict[str, Any]:
    """Return the default of each option that may be left out, by dotted key ("optimizer.momentum"), for a configuration."""
    return {
        f"{section}.{option}": value
        for section, kind in SECTIONS.items()
        for option, value in _defaults(kind, getattr(config, section).name).items()
    }


def _defaults(kind: str, name: str) -> dict[str, Any]:
    return {
        option.name: option.default for option in choice(kind, name).options if not option.needed and _is_plain(option.default)
    }


def _is_plain(value: Any) -> bool:
    """Return True for what a configuration can hold: no default of a type of the user's."""
    try:
        plain(value)
    except ValueError:
        return False
    return True


def _filled(section: Named, kind: str) -> Named:
    defaults = _defaults(kind, section.name)
    declared = {name: getattr(section, name) for name in type(section).model_fields}
    return type(section).model_validate({**declared, **defaults, **section.options})


def _model(name: str) -> Choice:
    known = catalogue.entry(name)
    sentence = _sentence(known.builder)
    if known.family != name:
        height, width, channels = catalogue.image_shape(name)
        settled = " and ".join(f"{option} {_spoken(value)}" for option, value in known.fixed.items())
        sentence = f"{known.family} with {settled}, for {height} x {width} x {channels} images."
    options = _options(known.builder, (*known.fixed, *FOLLOWING))
    return Choice(name, sentence, options, known.family, known.fixed)


def _spoken(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _options(entry: Callable[..., Any], left_out: Collection[str]) -> tuple[Option, ...]:
    options_type = options_of(entry)
    meanings = _meanings(options_type)
    return tuple(
        _option(parameter, meanings.get(name, ""))
        for name, parameter in parameters_of(options_type).items()
        if name not in left_out
    )


def _option(parameter: inspect.Parameter, meaning: str) -> Option:
    needed = parameter.default is inspect.Parameter.empty
    default = None if needed else parameter.default
    unknown = Option(parameter.name, {}, default, needed, meaning)
    if parameter.annotation is inspect.Parameter.empty or isinstance(parameter.annotation, str):
        return unknown
    try:
        adapter = TypeAdapter(parameter.annotation)
        default = adapter.dump_python(default, mode="json", warnings=False)  # a missing one is None, which the type may not allow
        return Option(parameter.name, adapter.json_schema(), default, needed, meaning)
    except PydanticUserError:  # a type of the user's, which no configuration can hold
        return unknown


def _sentence(entry: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring, in one line."""
    return " ".join((inspect.getdoc(entry) or "").split("\n\n")[0].split())


def _meanings(entry: Callable[..., Any]) -> dict[str, str]:
    """Return option -> sentence, from "Args" of a function or of a class and its bases: an option begins its own line."""
    documented = [cls.__doc__ for cls in reversed(entry.__mro__)] if inspect.isclass(entry) else [entry.__doc__]
    return dict(line for text in documented for line in _arguments(inspect.cleandoc(text or "")))


def _arguments(text: str) -> Iterator[tuple[str, str]]:
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    for match in re.finditer(r"^    (\w+): (.*(?:\n {8}.*)*)", section[1] if section else "", re.MULTILINE):
        yield match[1], " ".join(match[2].split())


_KINDS = {
    **{f"{section.capitalize()}Config": kind for section, kind in SECTIONS.items()},
    "AugmentConfig": "augmentations",
    "ReporterConfig": "reporters",
}

_REFERENCE = {
    "type": "string",
    "pattern": "^[^:]+:[A-Za-z_][A-Za-z0-9_]*$",
    "description": "Code of your own: module:Name or path/to/file.py:Name.",
}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12): every key, and for every name its options with types, defaults and meanings."""
    schema = load.keys_schema()
    for section, kind in _KINDS.items():
        name_alone, whole = schema["$defs"][section]["anyOf"]
        listed = {**name_alone, "enum": [choice.name for choice in _all_choices(kind)]}
        schema["$defs"][section]["anyOf"] = [listed, *_alternatives(whole, kind), *_of_the_user(whole, kind)]
    return schema


def _all_choices(kind: str) -> tuple[Choice, ...]:
    """Return those that are listed, and the one that leaves the strategy to the start of a run."""
    return (*choices(kind), *((AUTOMATIC,) if kind == "averagers" else ()))


def _of_the_user(whole: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    """Yield a reference to code of the user's or a name that an installed package offers: alone, and with any options."""
    offered = list(dict.fromkeys(offer.name for offer in registry(kind).offers()))
    name = {"anyOf": [_REFERENCE, {"enum": offered}]} if offered else _REFERENCE
    yield name
    yield {**whole, "properties": {**whole["properties"], "name": name}, "additionalProperties": True}


def _alternatives(whole: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    """Yield the mapping of one section, once for each set of options; names with the same ones are alternatives of one."""
    by_family = sorted(_all_choices(kind), key=lambda choice: choice.family)
    for family, group in groupby(by_family, key=lambda choice: choice.family):
        members = list(group)
        options = _most_options(members)
        names = {"enum": [choice.name for choice in members], "description": whole["properties"]["name"]["description"]}
        required = [*whole.get("required", ()), *(option.name for option in options if option.needed)]
        yield {
            **whole,
            "title": family,
            "description": next(choice.sentence for choice in members if choice.name == family),
            "properties": {
                **whole["properties"],
                "name": names,
                **(_following() if kind == "models" else {}),
                **{option.name: _property(option) for option in options},
            },
            "required": required,
            "additionalProperties": False,
        }


def _most_options(members: list[Choice]) -> tuple[Option, ...]:
    return max((choice.options for choice in members), key=len)


def _following() -> dict[str, Any]:
    return {name: {"description": meaning} for name, meaning in FOLLOWING.items()}


def _property(option: Option) -> dict[str, Any]:
    default = {} if option.needed else {"default": option.default}
    return {**option.schema, **default, "description": option.meaning}
