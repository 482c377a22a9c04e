"""YAML as plain data, with the position of every value: file and line, or the override that set it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from hpctrain.core.errors import ConfigError
from hpctrain.core.files import TEXT_BYTES
from hpctrain.core.text import forbidden, shortened

KeyPath = tuple[str | int, ...]

_MERGE = "tag:yaml.org,2002:merge"
_MAPPING = "tag:yaml.org,2002:map"
_SEQUENCE = "tag:yaml.org,2002:seq"
_SHOWN_CHARACTERS = 80


def dotted(path: KeyPath) -> str:
    """Return a key path as `data.augment.0.padding`."""
    return ".".join(str(part) for part in path)


@dataclass(frozen=True)
class Source:
    """Positions of the values of a configuration.

    Attributes:
        label: name of the whole configuration, usually the path of its file.
        places: key path -> "file:line" or the override.
    """

    label: str
    places: Mapping[KeyPath, str]

    def locate(self, path: KeyPath) -> str:
        """Return the position of a value, or of the nearest enclosing mapping if the value itself is not set."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.label

    def error(self, path: KeyPath, sentence: str) -> ConfigError:
        """Return an error about one value. Its message begins with the position of the value."""
        return ConfigError(f"{self.locate(path)}: {sentence}")


class _YamlLoader(yaml.SafeLoader):
    """Loader with the plain scalars of YAML 1.2, except that only decimal numbers are numbers.

    010 (8 in YAML 1.1), 0x10, 1_000, 1:30 (90), yes, off and 2026-01-31 are strings. Keys whose values are numbers reject the
    first four. Values written by `yaml.safe_dump` survive the round trip.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  PyYAML declares it so


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)(?:[eE][-+][0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _YamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)


def read_yaml(text: str, label: str) -> tuple[Any, dict[KeyPath, str]]:
    """Return the document in `text` as plain data, and the position ("label:line") of every key and item. An empty text is None.

    Raises:
        ConfigError: the text is not valid YAML, has a duplicate key, a key that is no printable string or lacks the blank after
            its colon, an alias that contains itself, a tag that is unknown or does not fit its value, too many levels, or more
            than `TEXT_BYTES` characters, also with aliases expanded.
    """
    if len(text) > TEXT_BYTES:
        raise ConfigError(f"{label}: The text has {len(text):,} characters; the maximum is {TEXT_BYTES:,}.")
    try:
        loader = _YamlLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None, {}
            if _length(root, {}) > TEXT_BYTES:
                raise ConfigError(
                    f"{label}: The text is too long after its aliases are expanded; the maximum is {TEXT_BYTES:,} characters."
                )
            reader = _Reader(loader, label)
            return reader.value(root, ()), reader.places
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = label if mark is None else f"{label}:{mark.line + 1}"
        raise ConfigError(f"{place}: This is not valid YAML: {error.problem or error.context}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{label}: This is not valid YAML: {str(error).splitlines()[0]}.") from None
    except RecursionError:
        raise ConfigError(f"{label}: Lists or mappings are nested too deeply; no key needs more than a few levels.") from None


class _Reader:
    """Converter of a document's nodes into data and positions."""

    def __init__(self, loader: _YamlLoader, label: str) -> None:
        self.loader = loader
        self.label = label
        self.places: dict[KeyPath, str] = {}
        self.open: list[yaml.Node] = []  # from the root down, to find an alias that contains itself

    def _place(self, node: yaml.Node) -> str:
        return f"{self.label}:{node.start_mark.line + 1}"

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if any(node is outer for outer in self.open):
            raise ConfigError(f"{self._place(node)}: The alias at {dotted(path)} contains itself; write the value out.")
        # For items of lists and the document itself; the line of a key overwrites it below.
        self.places.setdefault(path, self._place(node))
        self.open.append(node)
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _MAPPING:
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == _SEQUENCE:
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            if isinstance(node, yaml.ScalarNode):
                return self._scalar(node, path)
        finally:
            self.open.pop()
        raise ConfigError(f"{self._place(node)}: The tag {shortened(node.tag)} is not known; use plain mappings and lists.")

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        try:
            return self.loader.construct_object(node)
        except (ValueError, LookupError):  # a tag that the text does not fit
            rule = f"must fit its tag !!{node.tag.rpartition(':')[2]}"
            name = dotted(path) or "The value"
            raise ConfigError(f"{self._place(node)}: {name} is {shortened(node.value)}, but {rule}.") from None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        self._check_keys(node, path)
        self.loader.flatten_mapping(node)  # puts entries merged by "<<" first, so that the mapping's own entries replace them
        result = {}
        for key_node, value_node in node.value:
            inner = (*path, key_node.value)
            if inner in self.places:  # of a merged value, which this one replaces
                for known in [known for known in self.places if known[: len(inner)] == inner]:
                    del self.places[known]
            self.places[inner] = self._place(key_node)
            result[key_node.value] = self.value(value_node, inner)
        return result

    def _check_keys(self, node: yaml.MappingNode, path: KeyPath) -> None:
        first: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                continue
            if node.flow_style and _lacks_blank(key, value):
                name, _, rest = key.value.partition(":")
                raise ConfigError(
                    f'{self._place(key)}: The key "{key.value}" has no value, because the blank after the colon is missing; '
                    f"write {name}: {rest}."
                )
            if not isinstance(key, yaml.ScalarNode) or not isinstance(self._scalar(key, (*path, key.value)), str):
                shown = key.value[:_SHOWN_CHARACTERS] if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise ConfigError(f"{self._place(key)}: The key {shown} is not a string; put it in quotes.")
            if key.value in first:
                line = first[key.value].start_mark.line + 1
                raise ConfigError(
                    f'{self._place(key)}: The key "{dotted((*path, key.value))}" is given twice, first in line {line}; '
                    f"remove one of them."
                )
            character = forbidden(key.value)
            if character is not None:
                raise ConfigError(f"{self._place(key)}: The key {shortened(key.value)} must not have the character {character}.")
            first[key.value] = key


def _length(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of characters of a node with its aliases expanded; an alias to an enclosing node counts as 0.

    Each value counts its number of characters plus one, which is less than in any text without aliases.

    Args:
        known: lengths of nodes by identity; 0 while a node is being counted.
    """
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = 0
    children = node.value if isinstance(node, yaml.SequenceNode) else ()
    if isinstance(node, yaml.MappingNode):
        children = [child for entry in node.value for child in entry]
    own = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
    known[id(node)] = 1 + own + sum(_length(child, known) for child in children)
    return known[id(node)]


def _lacks_blank(key: yaml.Node, value: yaml.Node) -> bool:
    """Return whether an entry lacks the space after its colon, as in `key:value`, which YAML reads as a key without a value."""
    plain = isinstance(key, yaml.ScalarNode) and key.style is None and not key.value.endswith(":")
    return plain and ":" in key.value and isinstance(value, yaml.ScalarNode) and value.start_mark.index == value.end_mark.index
