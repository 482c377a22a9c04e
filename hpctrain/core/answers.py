"""Answers to wrong keys and values: one sentence for each fault that pydantic finds in a schema.

The rule, with the list of legal names, is the answer. A hint follows only if the rule does not imply it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from hpctrain.core.errors import ConfigError
from hpctrain.core.text import escaped, nearest, synonyms
from hpctrain.core.yaml_source import KeyPath, Source, dotted

_SHOWN_CHARACTERS = 60

#: values of a fault whose sentence shows no value, and of a fault whose rule is the whole sentence, such as that of an error
NONE, WHOLE = object(), object()
#: rules of keys
UNKNOWN = "is unknown"
MISSING = "is missing"


@dataclass(frozen=True)
class Fault:
    """A key or value that breaks a rule. Its text is a sentence: "batch is -5, but must be at least 1".

    Attributes:
        path: path of the key; empty for the whole file.
        rule: rule as the continuation of the key, such as "must be at least 1"; UNKNOWN or MISSING for the key itself.
        value: wrong value; NONE if the sentence shows no value, WHOLE if the rule is the whole sentence.
        hint: words after the rule, with the character that separates them.
    """

    path: KeyPath
    rule: str
    value: object = NONE
    hint: str = ""

    def __str__(self) -> str:
        name = dotted(self.path) or "The file"
        if self.value is WHOLE:
            text = self.rule.removesuffix(".")
        elif self.rule == UNKNOWN:
            text = f'Unknown key "{name}"'
        elif self.rule == MISSING:
            text = f'The key "{name}" is missing'
        else:
            text = f"{name} {self.rule}" if self.value is NONE else f"{name} is {show(self.value)}, but {self.rule}"
        return f"{text}{self.hint.removesuffix('.')}."


def show(value: Any) -> str:
    """Return a value as YAML in one line, shortened if it is long."""
    if isinstance(value, str):
        value = value[: 2 * _SHOWN_CHARACTERS]
    try:
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    except yaml.YAMLError:
        text = repr(value)
    text = escaped(" ".join(text.removesuffix("\n").removesuffix("\n...").split("\n")))
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


# Rule by pydantic's type of error, with {names} of the error's context. A test checks that no type is missing.
_RULES: Mapping[str, str] = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "callable_type": "must be a function",
    "dataclass_exact_type": "must be an instance of {class_name}",
    "dict_type": "must be a mapping",
    "enum": "must be {expected}",
    "extra_forbidden": "must not be given",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "must be an integer of fewer digits",
    "int_type": "must be an integer",
    "is_instance_of": "must be an instance of {class}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "mapping_type": "must be a mapping",
    "model_type": "must be a mapping",
    "none_required": "must be null",
    "sequence_str": "must be a list",
    "string_too_short": "must have at least {min_length} character",
    "string_type": "must be a string",
    "too_long": "must be a list of {max_length} items, not {actual_length}",
    "too_short": "must be a list of at least {min_length} items, not {actual_length}",
    "tuple_type": "must be a list",
}


def rule_of(item: Mapping[str, Any]) -> str:
    """Return the rule that a value breaks, such as "must be at least 1", from an item of `ValidationError.errors()`.

    For the program's own error types, the rule is their message. If the value is another framework's word for a legal name, the
    name follows.
    """
    if item["type"] == "missing" and isinstance(item["loc"][-1], int):
        return f"must be a list of at least {item['loc'][-1] + 1} items"
    template = _RULES.get(item["type"])
    if template is None:
        return str(item["msg"])
    context = item.get("ctx", {})
    if context.get("class") in ("Path", "PathLike", "Sequence"):
        return "must be a list" if context["class"] == "Sequence" else "must be a path"
    rule = template.format(**{name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()})
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        meant = next((f"'{word}'" for word in synonyms(item["input"]) if f"'{word}'" in context["expected"]), None)
        return rule if meant is None else f"{rule}; the nearest is {meant}"
    return rule


def section_at(schema: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """Return the section of a schema at a path; None if there is no section. All items of a list or mapping have one type."""
    kind: Any = schema
    for part in path:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            field = kind.model_fields.get(str(part))
            kind = None if field is None else field.annotation
        else:
            inner = get_args(kind) or (None,)
            kind = inner[0] if get_origin(kind) is tuple else inner[-1]
        if get_origin(kind) in (Union, UnionType):
            kind = next((member for member in get_args(kind) if isinstance(member, type) and issubclass(member, BaseModel)), kind)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def sibling(schema: type[BaseModel], path: KeyPath) -> KeyPath | None:
    """Return the key of a section that is similar to its unknown key `path`; None if no key is similar."""
    section = section_at(schema, path[:-1])
    near = None if section is None else nearest(str(path[-1]), section.model_fields)
    return None if near is None else (*path[:-1], near)


def schema_faults(
    error: ValidationError, schema: type[BaseModel], *, meant: Callable[[KeyPath], KeyPath | None] | None = None
) -> list[Fault]:
    """Return the faults that pydantic has found, in the order of the schema. A misspelt key is one fault, not also a missing key.

    Args:
        meant: function that returns the known key that an unknown one means, or None; default: a similar key of the same section.
    """
    find = partial(sibling, schema) if meant is None else meant
    items = error.errors(include_url=False)
    misspelt = {find(tuple(item["loc"])) for item in items if item["type"] == "extra_forbidden"}
    wanted = (item for item in items if item["type"] != "missing" or tuple(item["loc"]) not in misspelt)
    return [_fault(item, schema, find) for item in wanted]


def _fault(item: Mapping[str, Any], schema: type[BaseModel], meant: Callable[[KeyPath], KeyPath | None]) -> Fault:
    path: KeyPath = tuple(item["loc"])
    value, context, inner = item["input"], item.get("ctx", {}), section_at(schema, path)
    if item["type"] in ("extra_forbidden", "missing") and not isinstance(path[-1], int):
        section = section_at(schema, path[:-1])
        fields = {} if section is None else section.model_fields
        if item["type"] == "missing":
            return Fault(path, MISSING, hint=f"; it is described as: {fields[str(path[-1])].description}")
        near = meant(path)
        known = f"known keys are {', '.join(fields)}" if near is None else f'the nearest known key is "{dotted(near)}"'
        return Fault(path, UNKNOWN, hint=f"; {known}")
    if item["type"] == "missing":
        return Fault(path[:-1], rule_of(item), value)
    if "key" in context:  # an error of a whole section that is about one of its keys
        return Fault((*path, context["key"]), rule_of(item), context.get("value", NONE))
    if item["type"] == "model_type" and inner is not None:
        keys = [key for key, field in inner.model_fields.items() if field.is_required()] or list(inner.model_fields)[:4]
        alone = getattr(inner, "alone", "")
        return Fault(path, f"must be {alone + ' or ' if alone else ''}a mapping with keys such as {', '.join(keys)}", value)
    is_whole = item["type"] not in _RULES and isinstance(value, Mapping) and inner is not None
    return Fault(path, rule_of(item), NONE if is_whole else value)


def config_error(faults: Iterable[Fault], source: Source | None = None) -> ConfigError:
    """Return the error with the sentence of each fault, and its position if there is a source."""
    sentences = (str(fault) if source is None else str(source.error(fault.path, str(fault))) for fault in faults)
    return ConfigError("\n".join(dict.fromkeys(sentences)))
