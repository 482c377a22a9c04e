"""The JSON schema of a configuration file with the options of every name: what editors complete and check by."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from hpctrain.config import dump
from hpctrain.config.options import AUTOMATIC, FOLLOWING, SECTIONS, Choice, Option, choices, registry

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
    """The JSON schema (draft 2020-12): every key, and for every name its options with types, defaults and meanings."""
    schema = dump.json_schema()
    for section, kind in _KINDS.items():
        name_alone, whole = schema["$defs"][section]["anyOf"]
        listed = {**name_alone, "enum": [choice.name for choice in _all_choices(kind)]}
        schema["$defs"][section]["anyOf"] = [listed, *_alternatives(whole, kind), *_of_the_user(whole, kind)]
    return schema


def _all_choices(kind: str) -> tuple[Choice, ...]:
    """Those that are listed, and the one that leaves the strategy to the start of a run."""
    return (*choices(kind), *((AUTOMATIC,) if kind == "averagers" else ()))


def _of_the_user(whole: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    """A reference to code of the user's or a name that an installed package offers: alone, and with any options."""
    offered = list(dict.fromkeys(offer.name for offer in registry(kind).offers()))
    name = {"anyOf": [_REFERENCE, {"enum": offered}]} if offered else _REFERENCE
    yield name
    yield {**whole, "properties": {**whole["properties"], "name": name}, "additionalProperties": True}


def _alternatives(whole: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    """The mapping of one section, once for each set of options; names with the same ones are alternatives of one."""
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
