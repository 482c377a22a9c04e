"""From a YAML file and overrides to a checked, frozen configuration and the place of each of its values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpctrain.config.faults import faults, nearest_sibling, section_at
from hpctrain.config.schema import Config, Named, PlanConfig
from hpctrain.config.source import KeyPath, Source, dotted, read_yaml
from hpctrain.errors import ConfigError


def load(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, Source]:
    """The configuration in a YAML file, with overrides such as "optimizer.lr=0.2" (each value is YAML) applied in order.

    Names in registries and their options are not checked here; `Source` gives those who do the places for their messages.

    Raises:
        ConfigError: one sentence for each fault, each with its file and line or its override.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: The byte at {error.start} is not UTF-8; save the file as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{path}: The configuration cannot be read: {error.strerror}.") from None
    return parse(text, str(path), overrides)


def parse(text: str, label: str = "configuration", overrides: Sequence[str] = ()) -> tuple[Config, Source]:
    """As `load`, from text; `label` stands for the file's path in messages."""
    data, places = read_yaml(text, label)
    if data is None:
        data, places = {}, {(): label}
    for override in overrides:
        data = _override(data, places, override)
    source = Source(label, places)
    try:
        return Config.model_validate(data), source
    except ValidationError as error:
        found = [str(source.error(path, sentence)) for path, sentence in faults(error)]
    raise ConfigError("\n".join(dict.fromkeys(found)))


def _override(data: Any, places: dict[KeyPath, str], override: str) -> Any:
    """The data with one value replaced; notes the override as its place."""
    label = f'override "{override}"'
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{label}: An override must have the form key=value, such as optimizer.lr=0.2.")
    try:
        value, _ = read_yaml(text, label)
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"{label}:1:", f"{label}:", 1)) from None
    return _replaced(data, (), parts, value, places, label)


def _replaced(data: Any, path: KeyPath, parts: Sequence[str], value: Any, places: dict[KeyPath, str], label: str) -> Any:
    """`data`, which lies at `path`, with `value` at the keys `parts` below it."""
    if not parts:
        for known in [known for known in places if known[: len(path)] == path]:
            del places[known]
        places[path] = label
        return value
    if section_at(path) is PlanConfig:
        parts = [".".join(parts)]  # patterns of layer names have dots of their own
    key, rest = parts[0], parts[1:]
    if isinstance(data, list):
        index = _index(data, path, key, label)
        return [
            _replaced(item, (*path, position), rest, value, places, label) if position == index else item
            for position, item in enumerate(data)
        ]
    data = _as_mapping(data, path, key, label)
    places.setdefault(path, label)
    return {**data, key: _replaced(data.get(key), (*path, key), rest, value, places, label)}


def _index(data: Sequence[Any], path: KeyPath, key: str, label: str) -> int:
    if key.isdecimal() and int(key) < len(data):
        return int(key)
    legal = f"an index is 0 to {len(data) - 1}" if data else "the list is empty"
    raise ConfigError(f'{label}: {dotted(path) or "The configuration"} has no item "{key}"; {legal}.')


def _as_mapping(data: Any, path: KeyPath, key: str, label: str) -> dict[str, Any]:
    """The mapping in which a key is to be set; one that is absent is empty, a name alone is written out."""
    section = section_at(path)
    if isinstance(data, dict):
        return data
    if data is None and section is not None:
        return {}
    if isinstance(data, str) and section is not None and issubclass(section, Named):
        return {"name": data}
    if data is None:
        raise ConfigError(
            f'{label}: There is no {dotted(path)}, so its item "{key}" cannot be set{nearest_sibling(path)}; '
            f"set {dotted(path)} as a whole."
        )
    raise ConfigError(f'{label}: {dotted(path) or "The configuration"} is a single value and has no "{key}".')
