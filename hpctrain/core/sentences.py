"""Ends of error sentences: the known name that was probably meant, and the rule that a value breaks.

Rules are in our own words, from pydantic's types of errors to the second half of a sentence.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

_CUTOFF = 0.5  # of difflib's similarity: one wrong letter in three still finds a word
_MOST_LISTED = 30
_MOST_COMPARED = 200


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the most similar of `names`; None if none is similar."""
    if len(name) > _MOST_COMPARED:  # no name is similar to it, and the comparison would be slow
        return None
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=_CUTOFF)), None)


def choices(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence, without its full stop: the nearest of `names`, and the others where they are not too many."""
    quoted = {known: f'"{known}"' for known in names}
    if len(quoted) < 2:
        return f"there is only {next(iter(quoted.values()))}" if quoted else "there are none"
    listed = ", ".join(quoted.values())
    few = len(quoted) <= _MOST_LISTED
    near = nearest(name, quoted)
    if near is None:
        return f"there are {listed}" if few else f"there are {len(quoted)}, such as {next(iter(quoted.values()))}"
    return f"the nearest is {quoted[near]} (of {listed})" if few else f"the nearest is {quoted[near]}"


# By pydantic's type of error; {names} are those of its context. A test holds the schema and all options to this table.
_RULES: Mapping[str, str] = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
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
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "mapping_type": "must be a mapping",
    "missing": "must have more items",
    "model_type": "must be a mapping",
    "none_required": "must be null",
    "string_too_short": "must have at least {min_length} character",
    "string_type": "must be a string",
    "too_long": "must be a list of {max_length} items, not {actual_length}",
    "too_short": "must be a list of at least {min_length} items, not {actual_length}",
    "tuple_type": "must be a list",
}


def rule(item: Mapping[str, Any]) -> str:
    """Return the rule that a value breaks, such as "must be at least 1", from one of `ValidationError.errors()`.

    Errors of types that the program has made itself are sentences already.
    """
    template = _RULES.get(item["type"])
    if template is None:
        return str(item["msg"])
    context = item.get("ctx", {})
    return template.format(**{name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()})


def joined(rules: Iterable[str]) -> str:
    """Return rules of which one must be kept as one: "must be an integer or a list"."""
    first, *others = dict.fromkeys(rules)
    return " or ".join((first, *(other.removeprefix("must be ") for other in others)))
