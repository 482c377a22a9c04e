"""From a YAML file and overrides to a checked, frozen configuration and the place of each of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpctrain.core import user_code
from hpctrain.config.data_section import SYNTHETIC, DataConfig
from hpctrain.config.faults import faults, names_in, nearest_sibling, section_at
from hpctrain.config.open_section import AUTO, OpenSection
from hpctrain.config.schema import Config, LostRankConfig, NonFiniteConfig, PlanConfig
from hpctrain.config.values import Named
from hpctrain.core.yaml_source import KeyPath, Source, dotted, read_yaml
from hpctrain.core.errors import ConfigError
from hpctrain.core.files import TEXT_BYTES, read_text

#: (path of a section, its name) -> the sentence that refuses the name; None where a registry has it
Refusal = Callable[[KeyPath, str], str | None]


def load(path: str | Path, overrides: Sequence[str] = (), refusal: Refusal | None = None) -> tuple[Config, Source]:
    """The configuration in a YAML file, with overrides such as "optimizer.lr=0.2" (each value is YAML) applied in order.

    Options are not checked here, and names in registries only where the configuration is refused for another reason: `Source`
    gives those who check them the places for their messages.

    Args:
        refusal: asked about every name once there is a fault, so that an unknown name is told before what follows from it.

    Raises:
        ConfigError: one sentence for each fault, each with its file and line or its override.
    """
    try:
        text = read_text(path, TEXT_BYTES, pipes=True)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: The byte at {error.start} is not UTF-8; save the file as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{path}: The configuration cannot be read: {error.strerror}.") from None
    user_code.search_beside(Path(path))
    return parse(text, str(path), overrides, refusal)


def parse(
    text: str, label: str = "configuration", overrides: Sequence[str] = (), refusal: Refusal | None = None
) -> tuple[Config, Source]:
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
        sentences = [str(source.error(path, sentence)) for path, sentence in _faults(error, data, source, refusal)]
    raise ConfigError("\n".join(dict.fromkeys(sentences)))


def _faults(error: ValidationError, data: Any, source: Source, refusal: Refusal | None) -> Iterator[tuple[KeyPath, str]]:
    """(key path, sentence) of each fault: names that no registry knows, then what the schema refuses."""
    refused = {} if refusal is None else {path: refusal(path, name) for path, name in names_in(data)}
    unknown = {path: sentence for path, sentence in refused.items() if sentence is not None}
    yield from (((*path, "name"), sentence) for path, sentence in unknown.items())
    for path, sentence in faults(error, unknown):
        yield path, sentence + _replaced_hint(path, data, source)


def _replaced_hint(path: KeyPath, data: Any, source: Source) -> str:
    """How to keep the keys of a section that an override has replaced as a whole, for a key that is now missing."""
    section = path[:-1]
    if not source.places.get(section, "").startswith("override"):
        return ""
    name = next((name for known, name in names_in(data) if known == section), None)
    if name is None or path[-1] in _at(data, section):
        return ""
    return f" The override replaces the whole of {dotted(section)}; {dotted(section)}.name={name} replaces the name alone."


def _at(data: Any, path: KeyPath) -> Mapping[str, Any]:
    """The mapping at a path of plain data; an empty one where there is something else."""
    for key in path:
        data = data[key]
    return data if isinstance(data, Mapping) else {}


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
    if data == AUTO and section is not None and issubclass(section, OpenSection):  # a value that is given ends the choice
        return {}
    if isinstance(data, str) and section is not None and issubclass(section, Named):
        return {"name": data}
    if isinstance(data, str) and section in (NonFiniteConfig, LostRankConfig):
        return {"action": data}
    if data == SYNTHETIC and section is DataConfig:
        return DataConfig.of_synthetic()
    if data is None:
        raise ConfigError(
            f'{label}: There is no {dotted(path)}, so its item "{key}" cannot be set{nearest_sibling(path)}; '
            f"set {dotted(path)} as a whole."
        )
    raise ConfigError(f'{label}: {dotted(path) or "The configuration"} is a single value and has no "{key}".')
