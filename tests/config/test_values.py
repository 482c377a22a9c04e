"""Values of keys: numbers, texts and paths, sizes and times, and sections that a word stands for."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from hpctrain.config.load import dump, known_paths, parse, section_at
from hpctrain.config.schema import DEFAULT_SHARDS, CacheConfig, DataConfig, ExactConfig, SyntheticConfig
from hpctrain.config.values import parse_duration, parse_size, plain
from hpctrain.core.errors import ConfigError
from hpctrain.core.yaml_source import dotted

_REST = "{model: small, data: {train: train.h5}, batch: 4, epochs: 1, optimizer: {name: sgd, lr: 0.1}, schedule: constant}"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("3h50m", 13_800), ("3h 50min", 13_800), ("50m", 3_000), ("1.5h", 5_400), ("2d", 172_800), ("90s", 90), ("90", 90)],
        *[("2.5", 2.5), ("00:50:00", 3_000), ("03:50:00", 13_800), ("50:00", 3_000), ("1-02:00:00", 93_600), ("1-12", 129_600)],
        *[("1-12:30", 131_400), ("90:00", 5_400)],
    ],
)
def test_a_text_is_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("3h50m", 13_800.0), ("3:50:00", 13_800.0), ("00:50:00", 3_000.0), ("90", 90.0), ("slurm", "slurm"), ("null", None)],
)
def test_a_configuration_takes_all_of_them(written: str, seconds: float | str | None) -> None:
    """YAML reads 3:50:00 as a number of seconds by itself, and 00:50:00 as a text."""
    assert parse(_REST, overrides=[f"max_time={written}"])[0].max_time == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *[("64GB", 64 * 10**9), ("64 g", 64 * 10**9), ("16 GiB", 16 << 30), ("1.5kB", 1500), ("3MiB", 3 << 20)],
        *[("2TB", 2 * 10**12), ("512", 512), ("512 B", 512), (".5K", 500)],
    ],
)
def test_a_text_is_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1XB", "1 GBit", "1e400", "010", "0x10", "1_000", "064GB"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


def cache(text: str) -> CacheConfig:
    return parse(_REST.replace("train.h5}", f"train.h5, cache: {text}}}"))[0].data.cache


@pytest.mark.parametrize(
    ("text", "memory"),
    [("true", "auto"), ("false", 0), ("{}", "auto"), ("{memory: 0}", 0), ("{memory: 3GB}", 3 * 10**9), ("{memory: 1e3}", 1000)],
)
def test_a_cache_is_a_switch_or_a_section(text: str, memory: object) -> None:
    assert cache(text).memory == memory


@pytest.mark.parametrize("text", ["e3", "1e", "1e-3 ", "1e-3s", "0x1e3", "resnet1e3", "1", "1.5", ""])
def test_other_strings_stay_strings(text):
    assert plain(text) == text


# Versions of YAML, Python and people read these differently, or as no number at all.
NO_NUMBERS = [
    *("010", "-08", "00", "00.5", "0x10", "0o17", "0b11", "1_000", "1_0.5", "1:30", "yes", "off", ".nan", ".inf"),
    "2026-01-31",
]


def fields(kinds: tuple[type, ...]) -> list[str]:
    """Return the keys of the schema whose values have these types only, or None."""
    found = []
    for path in known_paths():
        field = section_at(path[:-1]).model_fields[path[-1]]
        types = {*get_args(field.annotation)} - {type(None)} or {field.annotation}
        if types <= {*kinds}:
            found.append(dotted(path))
    return found


@pytest.mark.parametrize("key", [*fields((int, float)), "threads", "data.threads"])
def test_a_key_of_numbers_takes_what_is_read_in_one_way_only(key):
    for text in (*NO_NUMBERS, "true", "many", "[1]", "-1"):
        for written in (text, f"'{text}'"):
            with pytest.raises(ConfigError, match=f"{re.escape(key)} is "):
                parse(_REST, overrides=[f"{key}={written}"])


@pytest.mark.parametrize("text", [*NO_NUMBERS[:12], "no", "1e3"])
def test_a_text_stays_as_it_is_written(text):
    assert parse(_REST, overrides=[f"name={text}"])[0].name == text


@pytest.mark.parametrize(("word", "shards"), [("yes", 8), ("on", 8), ("true", 8), ("no", None), ("off", None), ("false", None)])
def test_a_switch_takes_the_words_of_yaml_1_1(word, shards):
    config = parse(_REST, overrides=[f"exact={word}", f"trace={word}", f"data.cache={word}"])[0]
    assert (config.exact.shards, config.trace, config.data.cache.memory) == (shards, shards is not None, "auto" if shards else 0)


PATHS = ("data.train", "data.test", "init.weights", "machine", "output")
NODE_PATHS = ("data.cache.local", "flight")  # whose variables each node fills in by itself


@pytest.mark.parametrize("key", PATHS)
def test_a_path_of_the_schema_has_its_variables_filled_in(key, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("MINE", "/scratch/me")
    monkeypatch.delenv("NOWHERE", raising=False)
    for text, path in {"~/x": "/home/me/x", "$MINE/x": "/scratch/me/x", "a/${MINE}": "a//scratch/me", "./~/$": "./~/$"}.items():
        config = parse(_REST, overrides=[f"{key}={text}"])[0]
        assert attrgetter(key)(config) == path
        assert parse(dump(config))[0] == config  # a run keeps what was filled in
    for text in ("$NOWHERE/x", "${NOWHERE}", "a/$NOWHERE"):
        with pytest.raises(ConfigError, match=rf"{re.escape(key)} is .*, but the variable NOWHERE is not set here"):
            parse(_REST, overrides=[f"{key}={text}"])
    monkeypatch.setenv("NOWHERE", "")
    with pytest.raises(ConfigError, match="but the variable NOWHERE is empty here"):
        parse(_REST, overrides=[f"{key}=$NOWHERE/x"])
    with pytest.raises(ConfigError, match="but there is no user missing-user here"):
        parse(_REST, overrides=[f"{key}=~missing-user/x"])


def test_no_path_of_the_schema_is_left_out():
    """The keys whose descriptions begin like those of paths are exactly the keys that these tests take for paths."""
    described = {dotted(path): section_at(path[:-1]).model_fields[path[-1]].description for path in known_paths()}
    named = {key for key, text in described.items() if text.startswith(("Path of", "Directory", "File of", "Machine model"))}
    assert named == {*PATHS, *NODE_PATHS}


def test_the_word_synthetic_stands_for_made_up_images_of_both_splits():
    data = DataConfig.model_validate("synthetic")
    assert (data.train, data.test) == ("synthetic", "synthetic")
    assert data == DataConfig.model_validate({"train": "synthetic", "test": "synthetic", "synthetic": {}})
    for wrong in ("train.h5", "auto"):
        with pytest.raises(ValidationError):
            DataConfig.model_validate(wrong)


@pytest.mark.parametrize("key", SyntheticConfig.model_fields)
def test_there_is_at_least_one_of_everything_and_not_too_many(key):
    assert getattr(SyntheticConfig.model_validate({key: 1}), key) == 1
    for wrong in (0, 10**9, True, 1.5):
        with pytest.raises(ValidationError):
            SyntheticConfig.model_validate({key: wrong})


@pytest.mark.parametrize(
    ("value", "shards"),
    [({}, None), (False, None), (True, DEFAULT_SHARDS), ({"shards": 12}, 12), ({"shards": None}, None), ({"shards": 1}, 1)],
)
def test_exact_is_a_switch_or_a_mapping(value: Any, shards: int | None) -> None:
    assert ExactConfig.model_validate(value).shards == shards


@pytest.mark.parametrize("value", [{"shards": 0}, {"shards": True}, {"shards": 1.5}, {"shard": 8}, "sometimes", 8])
def test_what_is_neither_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError):
        ExactConfig.model_validate(value)


@pytest.mark.parametrize(
    ("written", "value"),
    [("0.1", 0.1), ("1e-1", 0.1), ("500", 500), ("5e2", 500), ("val.h5", "val.h5"), ("synthetic", "synthetic"), ("null", None)],
)
def test_validation_is_a_fraction_a_number_or_a_path(written: str, value: Any) -> None:
    """A number is not taken for a path, and a count does not become a fraction."""
    data = parse(_REST, overrides=[f"data.validation={written}"])[0].data
    assert (data.validation, type(data.validation)) == (value, type(value))
    assert data.evaluated == (None if value is None else "validation")
    assert ("validation" in data.files) == isinstance(value, str)
