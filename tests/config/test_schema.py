"""The schema: frozen, every field described, options as plain data, faults as sentences; what is dumped loads to the same."""

import json
import math
import string

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from hpctrain.config.load import dump, keys_schema, known_paths, parse, section_at
from hpctrain.config.schema import Config, PlanConfig
from hpctrain.config.values import Named
from hpctrain.core.answers import show
from hpctrain.core.errors import ConfigError
from tests.support.sampling import amount

SMALL = {
    "model": "small",
    "data": {"train": "train.h5"},
    "batch": 8,
    "epochs": 1,
    "optimizer": {"name": "sgd", "lr": 0.1},
    "schedule": "constant",
}


def changed(path, value):
    """SMALL with one value set at a dotted path."""
    data = {key: dict(item) if isinstance(item, dict) else item for key, item in SMALL.items()}
    *outer, last = path.split(".")
    inner = data
    for key in outer:
        if isinstance(inner.get(key), str):  # the shorthand of a named section
            inner[key] = {"name": inner[key]}
        inner = inner.setdefault(key, {})
    inner[last] = value
    return data


def test_a_configuration_cannot_be_changed():
    config = Config.model_validate(changed("optimizer.momentum", 0.9))
    for section, key in [(config, "batch"), (config.data, "train"), (config.optimizer, "lr"), (config.optimizer, "momentum")]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, getattr(section, key))


@pytest.mark.parametrize("path", ["model", "optimizer", "schedule", "averager"])
def test_named_sections_keep_further_keys_as_options(path):
    config = Config.model_validate(changed(path, {"name": "x", "lr": 1, "options": 3, "copy": [1, [2]]}))
    options = getattr(config, path).options
    assert options.pop("lr", None) == (None if path == "optimizer" else 1)
    assert options == {"options": 3, "copy": (1, (2,))}


def test_a_name_alone_is_shorthand():
    long = Config.model_validate({**SMALL, "model": {"name": "small"}, "schedule": {"name": "constant"}})
    short = Config.model_validate({**SMALL, "data": {"train": "train.h5", "augment": []}})
    assert short == long
    steps = Config.model_validate(changed("data.augment", ["flip", {"name": "pad_crop", "padding": 4}])).data.augment
    assert [(step.name, step.options) for step in steps] == [("flip", {}), ("pad_crop", {"padding": 4})]


@pytest.mark.parametrize(
    ("path", "lowest"),
    [
        *[("seed", 0), ("batch", 1), ("micro_batches", 1), ("epochs", 0), ("grid.rows", 1), ("grid.cols", 1), ("threads", 1)],
        *[("data.prefetch", 0), ("data.threads", 1), ("checkpoint.every_steps", 0), ("checkpoint.keep", 1)],
        ("evaluate.batch", 1),
    ],
)
def test_bounds_are_where_they_are_said_to_be(path, lowest):
    Config.model_validate(changed(path, lowest))
    with pytest.raises(ValidationError):
        Config.model_validate(changed(path, lowest - 1))


@pytest.mark.parametrize("path", ["optimizer.lr", "deadline_seconds", "batch_norm.epsilon", "metrics.interval_seconds"])
def test_positive_numbers_exclude_zero(path):
    Config.model_validate(changed(path, 1e-30))
    with pytest.raises(ValidationError):
        Config.model_validate(changed(path, 0))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp", "a\0b", 7])
def test_a_run_name_is_one_path_component(name):
    with pytest.raises(ValidationError):
        Config.model_validate({**SMALL, "name": name})


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1e3", "+1.5e4", "-.5e1", "2.e+2"])
def test_exponents_that_yaml_takes_for_strings_are_numbers(text):
    config = Config.model_validate(
        {**SMALL, "optimizer": {"name": "sgd", "lr": text.lstrip("-"), "momentum": text, "betas": [text, {"deep": text}]}}
    )
    number = float(text)
    assert config.optimizer.lr == abs(number)
    assert config.optimizer.options == {"momentum": number, "betas": (number, {"deep": number})}


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": [{2: 3}]}, math.nan, [math.inf], "1e999", b"x"])
def test_options_are_plain_and_finite(value):
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(changed("model", {"name": "small", "odd": value}))
    (error,) = caught.value.errors()
    assert (error["loc"], error["ctx"]["key"]) == (("model",), "odd")


def test_sections_refuse_unknown_keys_and_named_ones_do_not():
    for path in [(), *known_paths()]:
        section = section_at(path)
        if section is not None:
            assert issubclass(section, BaseModel)
            assert section.model_config["extra"] == ("allow" if issubclass(section, Named | PlanConfig) else "forbid"), path


def test_patterns_of_a_plan_keep_their_order():
    plan = {"b.*": "domain", "default": "model", "a.*": "batch"}
    config = Config.model_validate(changed("plan", plan))
    assert config.plan.default == "model"
    assert list(config.plan.patterns.items()) == [("b.*", "domain"), ("a.*", "batch")]


@pytest.mark.parametrize("plan", [{"default": "rows"}, {"a": "Domain"}, {"a": None}, {"a": {"b": "model"}}, ["model"], "model"])
def test_a_plan_knows_three_uses(plan):
    with pytest.raises(ValidationError):
        Config.model_validate(changed("plan", plan))


def test_sections_can_be_left_to_the_start_of_a_run():
    config = Config.model_validate({**SMALL, "grid": "auto", "plan": "auto", "averager": "auto"})
    assert config.automatic == ("grid", "plan", "averager")
    assert (config.grid.rows, config.plan.patterns) == (1, {})
    assert Config.model_validate(SMALL).automatic == ()
    assert Config.model_validate({**SMALL, "plan": "auto"}).automatic == ("plan",)


def test_what_is_left_open_is_no_default():
    for section in ("grid", "plan", "averager"):
        config = Config.model_validate({**SMALL, section: "auto"})
        assert config != Config.model_validate(SMALL)
        assert Config.model_validate(config.model_dump(mode="json")) == config
        assert config.model_copy(update={"batch": 9}).automatic == (section,)
        assert (
            Config.model_validate(
                {**config.model_dump(mode="json"), section: {"name": "blocking"} if section == "averager" else {}}
            ).automatic
            == ()
        )


def test_known_paths_cover_the_schema_once():
    paths = list(known_paths())
    assert len(paths) == len(set(paths))
    assert {("batch",), ("optimizer", "lr"), ("data", "evaluate_augment"), ("metrics", "interval_seconds")} <= set(paths)
    assert {path[0] for path in paths} == set(Config.model_fields)


def test_long_values_and_values_that_are_no_yaml_are_shown_too():
    assert len(show("x" * 999)) == 60
    assert show(object).startswith("<class 'object'")


VALUES = (
    "null", "true", "abc", "''", "1.5", "-1", "0", "99999999999999999999999", "1e400", ".nan", ".inf",
    "[]", "[1]", "[1, 2, 3]", "[a, b]", "[0, 1]", "[1.5, 2]", "[[1], 2]", "[null]",
    "{}", "{a: 1}", "'1'", "'1e5'", "x/y", "{name: 3}", "{name: ''}", "!!binary aGk=",
)  # fmt: skip
NO_WORDS_OF_OURS = ("Input", "valid ", "Tuple", "validation error", "parse", "required", "unable", "Value error", "dictionary")


@pytest.mark.slow
def test_every_wrong_value_of_every_key_is_reported_in_our_words() -> None:
    keys = [".".join(map(str, path)) for path in known_paths()]
    refused = set()
    for key in [*keys, "plan.features.*", "optimizer.momentum", "model.width"]:
        for value in VALUES:
            try:
                parse(json.dumps(SMALL), "base.yaml", [f"{key}={value}"])
            except ConfigError as error:
                lines = str(error).split("\n")
                assert all(line.startswith('override "') and line.endswith(".") for line in lines), lines
                assert not any(word in line.split('": ', 1)[1] for line in lines for word in NO_WORDS_OF_OURS), lines
                refused.add(key)
    assert len(refused) == len(keys) + 3


FINITE = st.floats(allow_nan=False, allow_infinity=False)
# Others are refused: they may move a cursor, or end a line of a script.
CHARACTERS = st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp"))
KEYS = st.text(CHARACTERS, min_size=1, max_size=6).filter(lambda key: key not in {"name", "lr", "warmup_epochs"})
PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(CHARACTERS, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
OPTIONS = st.dictionaries(KEYS, PLAIN_VALUES, max_size=3)
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


@settings(deadline=None, max_examples=amount(10, 60))
@given(CONFIGS)
def test_round_trip(config):
    text = dump(config)
    again, source = parse(text)
    assert again == Config.model_validate(yaml.safe_load(text)) == config
    assert dump(again) == text
    # Nothing is left to a default that may change later.
    for path in known_paths():
        assert path in source.places, path


def test_the_schema_describes_every_key_and_is_json():
    schema = json.loads(json.dumps(keys_schema()))
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert list(schema["properties"]) == list(Config.model_fields)
    assert set(schema["required"]) == {"model", "data", "batch", "epochs", "optimizer", "schedule"}
    assert schema["additionalProperties"] is False
    assert all("description" in entry or "$ref" in entry for entry in schema["properties"].values())
    assert all("description" in entry for entry in schema["$defs"].values() if "anyOf" not in entry)


@pytest.mark.parametrize("section", ["ModelConfig", "ScheduleConfig", "AveragerConfig", "AugmentConfig"])
def test_the_schema_allows_a_name_alone(section):
    short, whole = keys_schema()["$defs"][section]["anyOf"]
    assert short["type"] == "string"
    assert whole["additionalProperties"] is True
    assert "name" in whole["properties"]
