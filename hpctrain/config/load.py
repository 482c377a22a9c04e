"""Read a YAML file and overrides into a checked, frozen configuration with the position of each value; write it back as text.

Faults of the schema become sentences (`core.answers`), with the key of another section that an unknown one means.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from hpctrain.config.schema import SYNTHETIC, Config, DataConfig, NonFiniteConfig, PlanConfig
from hpctrain.config.values import AUTO, Named, OpenSection
from hpctrain.core import answers, user_code
from hpctrain.core.errors import ConfigError
from hpctrain.core.files import TEXT_BYTES, read_text
from hpctrain.core.text import MISSPELT, SYNONYMS, choices, nearest, shortened, synonyms
from hpctrain.core.yaml_source import KeyPath, Source, dotted, read_yaml


def dump(config: Config) -> str:
    """Return the whole configuration as YAML, including defaults; `parse(dump(config))` returns an equal configuration."""
    # No allow_unicode: PyYAML would write U+0085 and similar characters as line breaks, which become spaces when read.
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=120)


def keys_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a configuration file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


#: keys whose values are lists of names with options
NAMED_LISTS = (("data", "augment"), ("data", "evaluate_augment"), ("metrics", "reporters"))


def section_at(path: KeyPath) -> type[BaseModel] | None:
    """Return the section of a configuration at a path; None if there is no section."""
    return answers.section_at(Config, path)


def known_paths(path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield every key path of the schema below a mapping, in order, without items of lists."""
    section = section_at(path)
    for key in section.model_fields if section is not None else ():
        yield (*path, key)
        yield from known_paths((*path, key))


def names_in(data: Any) -> Iterator[tuple[KeyPath, str]]:
    """Yield (path of a section, its registered name) for each section in plain data, which need not fit the schema."""
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


def keyword_overrides(overrides: Mapping[str, Any]) -> list[str]:
    """Return keywords of `hpctrain.train` as overrides KEY=VALUE.

    Raises:
        ConfigError: a keyword means a key of a section, such as optimizer_lr, or is a mapping without the name of its section.
            The message has the form with a dot, which Python's keywords cannot have.
    """
    for name, value in overrides.items():
        section = section_at((name,))
        meant = _meant((name,)) if name.isidentifier() and name not in Config.model_fields else None
        if meant is not None and len(meant) > 1:
            form = _as_keywords({dotted(meant): value})
            raise ConfigError(f'Unknown key "{name}"; the nearest known key is "{dotted(meant)}", as in {form}.')
        if isinstance(value, Mapping) and value and section is not None and issubclass(section, Named) and "name" not in value:
            keys = {f"{name}.{key}": item for key, item in value.items()}
            raise ConfigError(f'The key "{name}.name" is missing; to change only these keys, use {_as_keywords(keys)}.')
    return [f"{key}={flow(value)}" for key, value in overrides.items()]


def _as_keywords(keys: Mapping[str, Any]) -> str:
    items = ", ".join(f'"{key}": {shortened(value)}' for key, value in keys.items())
    return f"**{{{items}}}"


def _meant(path: KeyPath, options: Collection[str] = ()) -> KeyPath | None:
    """Return the key that an unknown one means, among all keys and the `options` of its mapping; None if no key is similar.

    The result is the first of these that exists:

    - for an unknown key of the top level, the key of a section with an underscore instead of the dot, as in optimizer_lr,
    - the key that a usual word such as batch_size means there,
    - a very similar key of the same mapping, or the one that the word means there,
    - the key of another section that the word means,
    - a key of the same name in another section,
    - a similar key of the same mapping.
    """
    section, name = section_at(path[:-1]), str(path[-1])
    if len(path) == 1 and "__" in name:  # keywords of Python cannot have dots
        parts = tuple(name.split("__"))
        return parts if parts in known_paths() or dotted(parts) in SYNONYMS else _meant(parts)
    keys_with_dots = [key for key in (*map(dotted, known_paths()), *SYNONYMS) if "." in key]
    flat = next((key for key in keys_with_dots if len(path) == 1 and key.replace(".", "_") == name), None)
    if flat is not None:
        return tuple(flat.split("."))
    keys = (*(section.model_fields if section is not None else ()), *options)
    here = [(*path[:-1], near) for near in (nearest(name, keys, MISSPELT), nearest(name, keys)) if near is not None]
    usual = [tuple(key.split(".")) for key in synonyms(name) if key.partition(".")[0] in Config.model_fields]
    # `name` has another meaning in each section, and options have names of their own.
    same = [known for known in known_paths() if known[-1] == name != "name"] if not options else []
    top = usual if len(path) == 1 else []  # the word for data.threads does not mean the key threads
    meant: list[KeyPath] = [*top, *here[:-1], *usual, *same, *here]
    return next((key for key in meant if key != path), None)


def nearest_key(path: KeyPath, options: Collection[str] = ()) -> str:
    """Return the end of a sentence about an unknown key: the key that it means, else all keys of the mapping.

    Args:
        options: names of the options in the mapping, for the section of a name.
    """
    section = section_at(path[:-1])
    keys = (*(key for key in (section.model_fields if section is not None else ()) if key != "name" or not options), *options)
    near = _meant(path, options)
    if options and (near is None or near[:-1] == path[:-1]):
        return choices(str(path[-1]), keys)
    return f"known keys are {', '.join(keys)}" if near is None else f'the nearest known key is "{dotted(near)}"'


#: callback: (path of a section, its name) -> error message for an unknown name; None if a registry has the name
Refusal = Callable[[KeyPath, str], str | None]


def load(path: str | Path, overrides: Sequence[str] = (), refusal: Refusal | None = None) -> tuple[Config, Source]:
    """Return the configuration in a YAML file, with overrides such as "optimizer.lr=0.2" (each value is YAML) applied in order.

    Options are not checked here. Names in registries are checked only if there is another fault. The returned `Source` has the
    positions for messages of later checks.

    Args:
        refusal: callback for every name, called once there is a fault, so that an unknown name is reported before the faults that
            follow from it.

    Raises:
        ConfigError: one sentence for each fault, each with its file and line or its override.
    """
    if Path(path).suffix == ".py":
        raise ConfigError(
            f"{path} is a Python program, but a configuration must be a YAML file; run the program with `hpctrain script {path}`."
        )
    try:
        text = read_text(path, TEXT_BYTES, pipes=True)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: Byte {error.start} is not valid UTF-8; save the file as UTF-8.") from None
    except IsADirectoryError:
        raise ConfigError(_directory_message(Path(path))) from None
    except OSError as error:
        advice = "; give the path of a YAML file" if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EINVAL) else ""
        raise ConfigError(f"The configuration {path} cannot be read ({error.strerror}){advice}.") from None
    user_code.search_next_to(Path(path))
    return parse(text, str(path), overrides, refusal)


def _directory_message(path: Path) -> str:
    """Return the message for a directory that is given as a configuration file."""
    if (path / "config.yaml").is_file():
        return (
            f"{path} is the directory of a run, but a configuration must be a YAML file; write {path}/config.yaml, with "
            f"--checkpoint {path} to evaluate or predict, or --resume {path} to train."
        )
    names = sorted(file.name for suffix in ("yaml", "yml") for file in path.glob(f"*.{suffix}"))
    near = "quickstart.yaml" if "quickstart.yaml" in names else names[0] if names else None
    advice = "give the path of a YAML file" if near is None else f"name one of its files, such as {path / near}"
    return f"{path} is a directory, but a configuration must be a YAML file; {advice}."


def parse(
    text: str,
    label: str = "configuration",
    overrides: Sequence[str] = (),
    refusal: Refusal | None = None,
    *,
    stored: bool = False,
    located: bool = True,
) -> tuple[Config, Source]:
    """Return the configuration in a text; otherwise as `load`.

    Args:
        label: path of the file in messages.
        stored: whether a run or checkpoint stores the text. Keys that only earlier releases had are then ignored.
        located: whether messages name lines of the text, or only its label.
    """
    data, places = read_yaml(text, label)
    if data is None or not located:
        data, places = data or {}, {(): label}
    for override, following in zip(overrides, (*overrides, "")[1:], strict=True):
        data = _override(data, places, override, following)
    source = Source(label, places)
    _drop_removed(data, source, stored=stored)
    try:
        return Config.model_validate(data), source
    except ValidationError as error:
        sentences = [str(source.error(path, sentence)) for path, sentence in _faults(error, data, refusal)]
    raise ConfigError("\n".join(dict.fromkeys(sentences)))


def from_mapping(
    mapping: Mapping[str, Any], overrides: Sequence[str] = (), refusal: Refusal | None = None
) -> tuple[Config, Source]:
    """Return the configuration in a mapping, whose values may also be paths and NumPy's numbers; otherwise as `load`."""
    return parse(flow(mapping), "config", overrides, refusal, located=False)


#: keys that earlier releases had -> (default, which their stored configurations contain; what to do instead)
_REMOVED: Mapping[KeyPath, tuple[Any, str]] = {
    ("grid", "overlap"): ([], "leave it out, because computing interiors first made no network faster"),
    ("on_lost_rank",): (
        {"action": "stop", "least": 1},
        "leave it out, and start the training by `hpctrain run`, which restarts it from its checkpoint without the lost node",
    ),
    ("data", "cache", "keep"): (False, "leave it out, because each run copies the samples again in its first epoch"),
    ("averager", "sizes"): ("rule", "leave it out, because sizes for a measured link made no network faster"),
}


def _drop_removed(data: Any, source: Source, *, stored: bool) -> None:
    """Delete removed keys and `progress: auto` if they have their former default, or if a run has stored them (`stored`).

    In a stored configuration, the removed wire type float16 becomes bfloat16.

    Raises:
        ConfigError: removed keys have other values.
    """
    if isinstance(data, dict) and data.get("progress") in (("auto", "posting") if stored else ("auto",)):
        del data["progress"]
    if stored and isinstance(data, dict) and isinstance(averager := data.get("averager"), dict):  # old wires
        averager |= {key: "bfloat16" for key, value in averager.items() if value == "float16"}
    changed = _changed(data)
    if changed and not stored:
        raise ConfigError("\n".join(str(source.error(path, _removed(path))) for path in changed))


def _changed(data: Any) -> list[KeyPath]:
    """Delete removed keys from plain data, and return the paths of those that did not have their former default."""
    changed = []
    for path, (default, _) in _REMOVED.items():
        section = reduce(lambda at, key: at.get(key) if isinstance(at, dict) else None, path[:-1], data)
        if not isinstance(section, dict) or ":" in str(section.get("name")):  # a user's own class may have such an option
            continue
        if section.pop(path[-1], default) != default:
            changed.append(path)
    return changed


def _removed(path: KeyPath) -> str:
    return f'The key "{dotted(path)}" was removed; {_REMOVED[path][1]}.'


def _faults(error: ValidationError, data: Any, refusal: Refusal | None) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each fault: unknown names first, then violations of the schema."""
    refused = {} if refusal is None else {path: refusal(path, name) for path, name in names_in(data)}
    unknown = {path: sentence for path, sentence in refused.items() if sentence is not None}
    yield from (((*path, "name"), sentence) for path, sentence in unknown.items())
    for fault in answers.schema_faults(error, Config, meant=_meant):
        if not (fault.rule == answers.MISSING and fault.path[:-1] in unknown):
            yield fault.path, str(fault)


def _override(data: Any, places: dict[KeyPath, str], override: str, following: str) -> Any:
    """Return the data with one value replaced; record the override as the position of the value.

    Args:
        following: next word of the command line, for the message about an override without a value.
    """
    label = f'override "{override}"'
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        is_pair = tuple(parts) in known_paths() and following and "=" not in following
        example = f"{override}={following}" if is_pair else "optimizer.lr=0.2"
        raise ConfigError(f"{label}: An override must have the form key=value without spaces, such as {example}.")
    removed = next((path for path in _REMOVED if path == tuple(parts[: len(path)]) and path != tuple(parts)), None)
    if removed is not None:
        raise ConfigError(f"{label}: {_removed(removed)}")
    try:
        value, _ = read_yaml(text, label)
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"{label}:1:", f"{label}:", 1)) from None
    return _replaced(data, (), parts, value, places, label)


def _replaced(data: Any, path: KeyPath, parts: Sequence[str], value: Any, places: dict[KeyPath, str], label: str) -> Any:
    """Return `data`, the value at `path`, with `value` set at the keys `parts` below it."""
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
    """Return the mapping in which a key is set: an absent section is empty, and a shorthand is expanded."""
    section = section_at(path)
    if isinstance(data, dict):
        return data
    if data is None and section is not None:
        return {}
    if data == AUTO and section is not None and issubclass(section, OpenSection):  # the override replaces the automatic choice
        return {}
    if isinstance(data, str) and section is not None and issubclass(section, Named):
        return {"name": data}
    if isinstance(data, str) and section is NonFiniteConfig:
        return {"action": data}
    if data == SYNTHETIC and section is DataConfig:
        return DataConfig.of_synthetic()
    if data is None and path and (near := _meant(path)) is not None and near != path:
        raise ConfigError(f'{label}: Unknown key "{dotted(path)}"; the nearest known key is "{dotted(near)}".')
    if data is None:
        whole = dotted(path)
        raise ConfigError(f'{label}: Cannot set item "{key}" of {whole}, which is not set; set {whole} as a whole.')
    whole = dotted(path)
    hint = f"; set {whole} itself" if whole else ""
    raise ConfigError(f'{label}: {whole or "The configuration"} is a single value and has no "{key}"{hint}.')


_WIDEST = 1_000_000  # wide enough for any value in one line


def flow(value: Any) -> str:
    """Return a value of a program as YAML in one line. Paths become strings, and NumPy's numbers become Python's.

    Raises:
        ConfigError: a value cannot be written as YAML.
    """
    try:
        text: str = yaml.safe_dump(_plain(value), default_flow_style=True, sort_keys=False, width=_WIDEST)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"A configuration has numbers, strings, lists and mappings, but a value is {error.args[-1]!r}."
        ) from error
    return text.removesuffix("\n...\n").strip()


def _plain(value: Any) -> Any:
    """Return dicts, lists, strings of paths and Python's numbers for mappings, sequences, paths and scalars of NumPy."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value
