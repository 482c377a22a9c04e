"""Every name that a configuration can choose, with types, defaults and descriptions of its options.

Options are read from the frozen dataclasses `Options` or the signatures of constructors, and from the "Args" of their docstrings.
They are the single source of the values that `config show` fills in, of `hpctrain list`, of docs/options.md, and of the JSON
schema that editors use for completion and checks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

import yaml
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
from hpctrain.training.reporters import REPORTERS

#: options of models that follow from the rest of the configuration unless they are given
FOLLOWING: Mapping[str, str] = {
    "classes": "Number of classes; default: that of the training file.",
    "channels_in": "Number of channels of the images; default: that of the training file.",
    "momentum": "Momentum of the running statistics; default: batch_norm.momentum.",
    "epsilon": "Number added to variances; default: batch_norm.epsilon.",
    "synchronised": "Whether batch statistics are computed over all ranks; default: by batch_norm.statistics.",
    "seed": "Seed of dropout and stochastic depth; default: the seed of the run.",
}


@dataclass(frozen=True)
class Option:
    """Option of a named object, such as "momentum" of the optimiser "sgd".

    Attributes:
        schema: JSON schema of its type.
        default: default as plain data; meaningless if `needed`.
        needed: whether the option has no default.
        meaning: description; that of a needed option contains "such as" and an example value in YAML.
    """

    name: str
    schema: Mapping[str, Any]
    default: Any
    needed: bool
    meaning: str

    @property
    def example(self) -> Any:
        """Example value from the description of a needed option; None for other options, or if the description has no example."""
        match = re.search(r"\bsuch as (\[.*?\]|[\w.+-]*\w)", self.meaning) if self.needed else None
        return None if match is None else yaml.safe_load(match[1])


@dataclass(frozen=True)
class Choice:
    """Name of a kind, such as the optimiser "sgd".

    Attributes:
        sentence: description.
        options: options in the constructor's order, without those that the program sets, follow from the data or are `fixed`.
        family: name of the family of models that has these options; `name` itself if there is no family.
        fixed: options of the family whose values this name fixes.
    """

    name: str
    sentence: str
    options: tuple[Option, ...]
    family: str
    fixed: Mapping[str, Any] = field(default_factory=dict)


#: entry for the automatic choice of an averaging strategy, which has no options
AUTOMATIC = Choice(AUTO, "The averaging strategy with the shortest predicted step time, chosen at the start of a run.", (), AUTO)

#: section of a configuration -> kind, by its name in `hpctrain list`
SECTIONS = {"model": "models", "optimizer": "optimizers", "averager": "averagers", "schedule": "schedules"}
KINDS = (*SECTIONS.values(), "augmentations", "reporters")

#: kind -> keys of its section that are not options
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
    """Return the registry of a kind; for models, the registry of families."""
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
    """Return one name of a kind. The name may be a reference to user code.

    Raises:
        ConfigError: the name or the code does not exist, or an option has the name of a key of the section.
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
                f'The {known.kind} "{name}" cannot have an option "{option.name}", because its section has a key of that name; '
                f"rename the keyword of its constructor."
            )
    return described


def choices(kind: str) -> tuple[Choice, ...]:
    """Return all of hpctrain's own names of a kind: models, optimizers, averagers, schedules, augmentations or reporters."""
    return tuple(choice(kind, name) for name in names(kind))


def named(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of all names in a configuration."""
    yield from ((kind, getattr(config, section).name) for section, kind in SECTIONS.items())
    for (outer, key), kind in LISTS.items():
        yield from ((kind, item.name) for item in getattr(getattr(config, outer), key))


def filled(config: Config) -> Config:
    """Return the configuration with the default of every option that it does not set; `config` must have no faults.

    Options that follow from the data or from other keys stay out, and so do those that the name of a model fixes.
    """
    sections: dict[str, Any] = {section: _filled(getattr(config, section), kind) for section, kind in SECTIONS.items()}
    for (outer, key), kind in LISTS.items():
        section = sections.get(outer, getattr(config, outer))
        items = tuple(_filled(item, kind) for item in getattr(section, key))
        sections[outer] = section.model_copy(update={key: items})
    return config.model_copy(update=sections)


def defaults(config: Config) -> dict[str, Any]:
    """Return the default of each optional option for a configuration, by dotted key, such as "optimizer.momentum"."""
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
    """Return whether a configuration can hold the value; it cannot hold a type of user code."""
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
    options = _options(known.builder, frozenset((*known.fixed, *FOLLOWING)))
    return Choice(name, sentence, options, known.family, known.fixed)


def _spoken(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


@cache
def _options(entry: Callable[..., Any], left_out: frozenset[str]) -> tuple[Option, ...]:
    options_type = options_of(entry)
    documented = reversed(options_type.__mro__) if inspect.isclass(options_type) else (options_type,)  # with a class's bases
    meanings = dict(line for one in documented for line in _arguments(inspect.cleandoc(one.__doc__ or "")))
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
        default = adapter.dump_python(
            default, mode="json", warnings=False
        )  # no warning: the type may not allow a default of None
        return Option(parameter.name, adapter.json_schema(), default, needed, meaning)
    except PydanticUserError:  # a type of user code that YAML cannot express
        return unknown


def _sentence(entry: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join((inspect.getdoc(entry) or "").split("\n\n")[0].split())


def _arguments(text: str) -> Iterator[tuple[str, str]]:
    """Yield (option, description) from the entries of "Args" in a docstring. Each entry must begin a line."""
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
    "description": "Your own code: module:Name or path/to/file.py:Name.",
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
    """Return the listed choices of a kind, and for averagers also the automatic one."""
    return (*choices(kind), *((AUTOMATIC,) if kind == "averagers" else ()))


def _of_the_user(whole: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    """Yield the schema of user code or a name offered by an installed package: as a string, and as a mapping with any options."""
    offered = list(dict.fromkeys(offer.name for offer in registry(kind).offers()))
    name = {"anyOf": [_REFERENCE, {"enum": offered}]} if offered else _REFERENCE
    yield name
    yield {**whole, "properties": {**whole["properties"], "name": name}, "additionalProperties": True}


def _alternatives(whole: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    """Yield the schemas of one section: one for each family of names, with all options of the family."""
    by_family = sorted(_all_choices(kind), key=lambda choice: choice.family)
    for family, group in groupby(by_family, key=lambda choice: choice.family):
        members = list(group)
        options = max((choice.options for choice in members), key=len)
        names = {"enum": [choice.name for choice in members], "description": whole["properties"]["name"]["description"]}
        required = [*whole.get("required", ()), *(option.name for option in options if option.needed)]
        yield {
            **whole,
            "title": family,
            "description": next(choice.sentence for choice in members if choice.name == family),
            "properties": {
                **whole["properties"],
                "name": names,
                **({key: {"description": meaning} for key, meaning in FOLLOWING.items()} if kind == "models" else {}),
                **{
                    option.name: {
                        **option.schema,
                        **({} if option.needed else {"default": option.default}),
                        "description": option.meaning,
                    }
                    for option in options
                },
            },
            "required": required,
            "additionalProperties": False,
        }
