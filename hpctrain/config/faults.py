"""Faults of a configuration, in sentences: from pydantic's errors to key paths and full sentences."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from hpctrain.config.data_section import SYNTHETIC, DataConfig
from hpctrain.config.open_section import AUTO, OpenSection
from hpctrain.config.schema import Config
from hpctrain.config.values import Named
from hpctrain.core.yaml_source import KeyPath, dotted
from hpctrain.nearest import nearest
from hpctrain.core.text import escaped
from hpctrain.core.sentences import rule

_SHOWN_CHARACTERS = 60

#: the keys whose values are lists of names with options
NAMED_LISTS = (("data", "augment"), ("data", "evaluate_augment"), ("metrics", "reporters"))


def section_at(path: KeyPath) -> type[BaseModel] | None:
    """The schema of the mapping at a path; None where there is none."""
    kind: Any = Config
    for part in path:
        if isinstance(part, int):
            kind = get_args(kind)[0] if get_origin(kind) is tuple else None
        else:
            field = kind.model_fields.get(part) if _is_section(kind) else None
            kind = field.annotation if field is not None else None
    return kind if _is_section(kind) else None


def known_paths(path: KeyPath = ()) -> Iterator[KeyPath]:
    """Every key path of the schema below a mapping's, in order; list items are left out."""
    section = section_at(path)
    for key in section.model_fields if section is not None else ():
        yield (*path, key)
        yield from known_paths((*path, key))


def faults(error: ValidationError, unknown: Collection[KeyPath] = ()) -> list[tuple[KeyPath, str]]:
    """(key path, sentence) of each fault, in the order of the schema.

    A key that is missing because it is misspelt beside is one fault, not two. What a section lacks is not told where its name
    is unknown.

    Args:
        unknown: paths of the sections whose names no registry knows.
    """
    items = error.errors(include_url=False)
    meant = {_meant(tuple(item["loc"])) for item in items if item["type"] == "extra_forbidden"}
    paths = [(tuple(item["loc"]), item["type"] == "missing") for item in items]
    told = [not (missing and (path in meant or path[:-1] in unknown)) for path, missing in paths]
    return [_fault(item) for item, tell in zip(items, told, strict=True) if tell]


def names_in(data: Any) -> Iterator[tuple[KeyPath, str]]:
    """(path of a section that stands for a registered name, the name) of each in plain data that may not fit the schema."""
    if not isinstance(data, Mapping):
        return
    for key, field in Config.model_fields.items():
        section = section_at((key,))
        if section is not None and issubclass(section, Named):
            yield from _name((key,), data.get(key, field.default))
    for outer, key in NAMED_LISTS:
        section = data.get(outer)
        named = section.get(key) if isinstance(section, Mapping) else None
        for index, item in enumerate(named if isinstance(named, list) else ()):
            yield from _name((outer, key, index), item)


def _name(path: KeyPath, section: Any) -> Iterator[tuple[KeyPath, str]]:
    name = section.get("name") if isinstance(section, Mapping) else section
    if isinstance(name, str):
        yield path, name


def show(value: Any) -> str:
    """A value as YAML in one line, shortened."""
    if isinstance(value, str):
        value = value[: 2 * _SHOWN_CHARACTERS]
    try:
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    except yaml.YAMLError:
        text = repr(value)
    text = " ".join(text.removesuffix("\n").removesuffix("\n...").split("\n"))
    text = escaped(text)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def nearest_sibling(path: KeyPath) -> str:
    """'; the nearest known key is "x"' for a key that its mapping does not have; empty where none is near."""
    near = _meant(path) if path else None
    return "" if near is None or near == path else f'; the nearest known key is "{dotted(near)}"'


def _fault(item: Mapping[str, Any]) -> tuple[KeyPath, str]:
    path: KeyPath = tuple(item["loc"])
    context = item.get("ctx", {})
    if item["type"] == "extra_forbidden":
        return path, f'Unknown key "{dotted(path)}"; {_nearest_key(path)}.'
    if item["type"] == "missing" and isinstance(path[-1], int):
        return path[:-1], f"{dotted(path[:-1])} is {show(item['input'])}, but must be a list of {_items(path[:-1])} items."
    if item["type"] == "missing":
        return path, f'The key "{dotted(path)}" is missing{_meaning(path)}'
    if item["type"] == "option":
        return (*path, context["option"]), f"{dotted((*path, context['option']))} must be {context['rule']}."
    if not path:
        return path, f"The configuration must be a mapping of keys such as model, data, batch; it is {show(item['input'])}."
    return path, f"{dotted(path)} is {show(item['input'])}, but {_rule(item, path)}."


def _items(path: KeyPath) -> int:
    """How many items the list at a path has."""
    section = section_at(path[:-1])
    assert section is not None
    kinds = (section.model_fields[str(path[-1])].annotation, *get_args(section.model_fields[str(path[-1])].annotation))
    return next(len(get_args(kind)) for kind in kinds if get_origin(kind) is tuple)


def _rule(item: Mapping[str, Any], path: KeyPath) -> str:
    """The rule that a value breaks, with the nearest legal one where there is one."""
    context, section = item.get("ctx", {}), section_at(path)
    if item["type"] == "model_type" and section is not None:
        name = "a name or " if issubclass(section, Named) else f"{AUTO} or " if issubclass(section, OpenSection) else ""
        name = f"{SYNTHETIC} or " if section is DataConfig else name
        return f"must be {name}a mapping with keys such as {', '.join(section.model_fields)}"
    message = rule(item)
    bound = context.get("ge", context.get("le"))
    if bound is not None:
        return f"{message}; the nearest legal value is {show(bound)}"
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        legal = [part.strip("' ") for part in context["expected"].replace(" or ", ",").split(",")]
        near = nearest(str(item["input"]), [value for value in legal if _digits(value) == _digits(str(item["input"]))])
        return f"{message}; the nearest is '{near}'" if near else message
    return message


def _meaning(path: KeyPath) -> str:
    section = section_at(path[:-1])
    description = section.model_fields[str(path[-1])].description if section is not None else None
    return f": {description}" if description else "."


def _meant(path: KeyPath) -> KeyPath | None:
    """The key of the same mapping that an unknown one is nearest to."""
    section = section_at(path[:-1])
    near = nearest(str(path[-1]), section.model_fields if section is not None else ())
    return None if near is None else (*path[:-1], near)


def _nearest_key(path: KeyPath) -> str:
    """The nearest key of the same mapping, else one of that name elsewhere, else all keys of the mapping."""
    section = section_at(path[:-1])
    keys = tuple(section.model_fields) if section is not None else ()
    near = _meant(path)
    if near is not None:
        return f'the nearest known key is "{dotted(near)}"'
    # Names of different sections name different things.
    elsewhere = next((known for known in known_paths() if known[-1] == path[-1] != "name"), None)
    if elsewhere is not None:
        return f'the nearest known key is "{dotted(elsewhere)}"'
    return f"known keys are {', '.join(keys)}"


def _digits(text: str) -> list[str]:
    # float16 is no misspelt float64: other digits mean another thing. float46 is one.
    return sorted(character for character in text if character.isdigit())
