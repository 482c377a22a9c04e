"""Plain values: numbers that YAML takes for strings, and strings that stay such."""

import re
from operator import attrgetter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.dump import dump
from hpctrain.config.faults import known_paths, section_at
from hpctrain.config.load import parse
from hpctrain.config.section import plain
from hpctrain.config.source import dotted
from hpctrain.errors import ConfigError
from tests.config.test_duration import _REST


@pytest.mark.parametrize("text", ["e3", "1e", "1e-3 ", "1e-3s", "0x1e3", "resnet1e3", "1", "1.5", ""])
def test_other_strings_stay_strings(text):
    assert plain(text) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_float_written_with_an_exponent_is_read(value):
    assert plain(f"{value:.17e}") == value


# Versions of YAML, Python and people read these differently, or as no number at all.
NO_NUMBERS = [
    "010",
    "-08",
    "00",
    "00.5",
    "0x10",
    "0o17",
    "0b11",
    "1_000",
    "1_0.5",
    "1:30",
    "yes",
    "off",
    ".nan",
    ".inf",
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


@pytest.mark.parametrize("key", fields((int, float)))
def test_a_key_of_numbers_takes_what_is_read_in_one_way_only(key):
    for text in NO_NUMBERS:
        for written in (text, f"'{text}'"):
            with pytest.raises(ConfigError, match=f"{re.escape(key)} is "):
                parse(_REST, overrides=[f"{key}={written}"])


@pytest.mark.parametrize("text", [*NO_NUMBERS[:12], "no", "1e3"])
def test_a_text_stays_as_it_is_written(text):
    assert parse(_REST, overrides=[f"name={text}"])[0].name == text


def test_the_sentence_has_the_number_that_was_meant():
    with pytest.raises(
        ConfigError, match=r"seed is .*010.*without leading zeros or underscores; the nearest legal value is 10\.$"
    ):
        parse(_REST, overrides=["seed=010"])
    with pytest.raises(ConfigError, match=r"seed is .*loses digits"):
        parse(_REST, overrides=["seed=9007199254740993.0"])


@pytest.mark.parametrize("text", ["1e3", "1000", "1000.0", "'1000'", "+1000"])
def test_the_ways_to_write_a_number(text):
    assert parse(_REST, overrides=[f"batch={text}"])[0].batch == 1000


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
        with pytest.raises(ConfigError, match=rf"{re.escape(key)} is .*, but the variable NOWHERE in it is not set here"):
            parse(_REST, overrides=[f"{key}={text}"])
    with pytest.raises(ConfigError, match="but there is no user nobody-of-that-name here"):
        parse(_REST, overrides=[f"{key}=~nobody-of-that-name/x"])


def test_no_path_of_the_schema_is_left_out():
    """The keys whose descriptions begin like those of paths are exactly the keys that these tests take for paths."""
    described = {dotted(path): section_at(path[:-1]).model_fields[path[-1]].description for path in known_paths()}
    named = {key for key, text in described.items() if text.startswith(("Path of", "Directory", "File of", "Machine file"))}
    assert named == {*PATHS, *NODE_PATHS}
