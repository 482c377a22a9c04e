"""Dumping: what is written loads to the same configuration, and the JSON schema agrees with the checks."""

import json
import string

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.config.dump import dump, json_schema
from hpctrain.config.faults import known_paths
from hpctrain.config.load import parse
from hpctrain.config.schema import Config

FINITE = st.floats(allow_nan=False, allow_infinity=False)
# Others are refused: they may move a cursor, or end a line of a script.
CHARACTERS = st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp"))
KEYS = st.text(CHARACTERS, min_size=1, max_size=6).filter(lambda key: key not in {"name", "lr", "warmup_epochs"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(CHARACTERS, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
OPTIONS = st.dictionaries(KEYS, VALUES, max_size=3)
TEXTS = st.text(CHARACTERS, min_size=1, max_size=8)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
COUNTS = st.integers(1, 10**6)
PAIRS = st.tuples(COUNTS, COUNTS).map(list)


def named(**fields):
    return st.builds(lambda options, known: options | known, OPTIONS, st.fixed_dictionaries({"name": TEXTS}, optional=fields))


AUGMENT = st.lists(named(), max_size=3)
CONFIGS = st.fixed_dictionaries(
    {
        "model": named() | TEXTS,
        "data": st.fixed_dictionaries(
            {"train": TEXTS},
            optional={
                "test": st.none() | TEXTS,
                "augment": AUGMENT,
                "evaluate_augment": AUGMENT,
                "normalise": st.booleans(),
                "prefetch": st.integers(0, 9),
                "threads": st.just("auto") | COUNTS,
            },
        ),
        "batch": COUNTS,
        "epochs": st.integers(0, 999),
        "optimizer": st.builds(lambda section, lr: section | {"lr": lr}, named(), POSITIVE),
        "schedule": named(warmup_epochs=st.floats(0, 1e3)),
    },
    optional={
        "name": st.text(string.ascii_letters + "-_0123456789é~ ", min_size=1, max_size=9),
        "seed": st.integers(0, 2**63 - 1),
        "dtype": st.sampled_from(["float32", "float64"]),
        "threads": st.just("auto") | COUNTS,
        "grid": st.fixed_dictionaries({}, optional={"rows": COUNTS, "cols": st.none() | COUNTS, "tiles": st.none() | PAIRS}),
        "plan": st.dictionaries(st.sampled_from(["default", "*", "a.*", "1"]), st.sampled_from(["batch", "model", "domain"])),
        "averager": named(),
        "deadline_seconds": st.floats(min_value=0, exclude_min=True, max_value=1e9),
        "batch_norm": st.fixed_dictionaries({}, optional={"epsilon": POSITIVE}),
        "output": TEXTS,
    },
).map(Config.model_validate)


@settings(deadline=None, max_examples=40)
@given(CONFIGS)
def test_round_trip(config):
    text = dump(config)
    again, source = parse(text)
    assert again == config
    assert dump(again) == text
    # Nothing is left to a default that may change later.
    for path in known_paths():
        assert path in source.places, path


@settings(deadline=None, max_examples=40)
@given(CONFIGS)
def test_a_dump_is_plain_yaml(config):
    data = yaml.safe_load(dump(config))
    assert Config.model_validate(data) == config


@pytest.mark.parametrize("text", ["é", " a ", "a: b", "~", "1e3", "0x1", "2026-01-31", "<<", "="])
def test_awkward_strings_survive(text):
    config = parse("batch: 1\nepochs: 1\ndata: {train: x}\nmodel: small\nschedule: constant\noptimizer: {name: sgd, lr: 1}")[0]
    odd = config.model_copy(update={"output": text, "model": {"name": text, text: [text]}})
    odd = Config.model_validate(odd.model_dump(warnings=False))
    assert parse(dump(odd))[0] == odd


def test_the_schema_describes_every_key_and_is_json():
    schema = json.loads(json.dumps(json_schema()))
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert list(schema["properties"]) == list(Config.model_fields)
    assert set(schema["required"]) == {"model", "data", "batch", "epochs", "optimizer", "schedule"}
    assert schema["additionalProperties"] is False
    assert all("description" in entry or "$ref" in entry for entry in schema["properties"].values())
    assert all("description" in entry for entry in schema["$defs"].values() if "anyOf" not in entry)


@pytest.mark.parametrize("section", ["ModelConfig", "ScheduleConfig", "AveragerConfig", "AugmentConfig"])
def test_the_schema_allows_a_name_alone(section):
    short, whole = json_schema()["$defs"][section]["anyOf"]
    assert short["type"] == "string"
    assert whole["additionalProperties"] is True
    assert "name" in whole["properties"]
