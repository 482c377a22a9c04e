"""Faults of a site profile, in sentences: from pydantic's errors to key paths and full sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from hpctrain.config.faults import show
from hpctrain.core.yaml_source import KeyPath, dotted
from hpctrain.nearest import choices, nearest
from hpctrain.core.sentences import rule
from hpctrain.site.profile import SiteProfile

# What patterns of the schema ask for, in words.
_PATTERNS = {"time": "a time such as 06:00:00"}


def faults(error: ValidationError) -> Iterator[tuple[KeyPath, str]]:
    """(key path, sentence) of each fault; a key that is missing because it is misspelt beside is one fault."""
    items = error.errors(include_url=False)
    paths = [tuple(item["loc"]) for item in items]
    meant = {_meant(path) for item, path in zip(items, paths, strict=True) if item["type"] == "extra_forbidden"}
    for item, path in zip(items, paths, strict=True):
        if item["type"] != "missing" or path not in meant:
            yield path, _sentence(dict(item), path)


def _sentence(item: Mapping[str, Any], path: KeyPath) -> str:
    fields = _fields(path[:-1])
    if item["type"] == "extra_forbidden":
        return f'Unknown key "{dotted(path)}"; {choices(str(path[-1]), fields)}.'
    if item["type"] == "missing":
        return f'The key "{dotted(path)}" is missing: {fields[str(path[-1])].description}'
    if not path:
        return f"A site profile must be a mapping of keys such as description, scheduler, node; it is {show(item['input'])}."
    if item["type"] == "ranks":
        return f"{dotted(path)} {item['msg']}."
    return f"{dotted(path)} is {show(item['input'])}, but {_rule(item, path)}."


def _rule(item: Mapping[str, Any], path: KeyPath) -> str:
    context = item.get("ctx", {})
    if item["type"] == "string_pattern_mismatch":
        return f"must be {_PATTERNS.get(str(path[-1]), 'text in one line')}"
    if item["type"] == "literal_error":
        legal = [part.strip("' ") for part in context["expected"].replace(" or ", ",").split(",")]
        near = nearest(str(item["input"]), legal)
        return rule(item) + (f"; the nearest is '{near}'" if near else "")
    bound = context.get("ge")
    return rule(item) + ("" if bound is None else f"; the nearest legal value is {show(bound)}")


def _fields(path: KeyPath) -> Mapping[str, Any]:
    """The fields of the section at a path of the schema; none where there is no section."""
    kind: Any = SiteProfile
    for part in path:
        if _is_section(kind):
            field = kind.model_fields.get(part)
            kind = None if field is None else field.annotation
        else:  # an item of a list, or of a mapping by name
            kind = get_args(kind)[0 if get_origin(kind) is tuple else -1] if get_args(kind) else None
        kind = next((inner for inner in get_args(kind) if _is_section(inner) and get_args(kind)[-1] is type(None)), kind)
    return kind.model_fields if _is_section(kind) else {}


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _meant(path: KeyPath) -> KeyPath | None:
    """The key of the same mapping that an unknown one is nearest to."""
    near = nearest(str(path[-1]), _fields(path[:-1]))
    return None if near is None else (*path[:-1], near)
