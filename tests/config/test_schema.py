"""The schema: frozen, every field described, numbers and booleans kept apart, options as immutable plain data."""

import math

import pytest
from pydantic import BaseModel, ValidationError

from hpctrain.config.faults import known_paths, section_at
from hpctrain.config.schema import Config, PlanConfig
from hpctrain.config.section import Named

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


def test_every_field_has_a_description():
    for path in known_paths():
        section = section_at(path[:-1])
        assert section.model_fields[path[-1]].description, path


def test_a_configuration_cannot_be_changed():
    config = Config.model_validate(changed("optimizer.momentum", 0.9))
    for section, key in [(config, "batch"), (config.data, "train"), (config.optimizer, "lr"), (config.optimizer, "momentum")]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, getattr(section, key))


def test_options_are_a_fresh_mapping():
    config = Config.model_validate(changed("optimizer.momentum", 0.9))
    config.optimizer.options.clear()
    assert config.optimizer.options == {"momentum": 0.9}


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


def number_paths():
    for path in known_paths():
        section = section_at(path[:-1])
        annotation = str(section.model_fields[path[-1]].annotation)
        if ("int" in annotation or "float" in annotation) and "Literal" not in annotation and "augment" not in path:
            yield ".".join(path)


def test_there_are_number_fields():
    assert {"batch", "optimizer.lr", "schedule.warmup_epochs", "grid.cols", "deadline_seconds"} <= set(number_paths())


@pytest.mark.parametrize("path", [*number_paths(), "threads", "data.threads"])
@pytest.mark.parametrize("value", [True, False, math.nan, math.inf, "many", [1], -1])
def test_numbers_refuse_what_is_no_number_of_theirs(path, value):
    with pytest.raises(ValidationError):
        Config.model_validate(changed(path, value))


@pytest.mark.parametrize(
    ("path", "lowest"),
    [
        *[("seed", 0), ("batch", 1), ("micro_batches", 1), ("epochs", 0), ("grid.rows", 1), ("grid.cols", 1), ("threads", 1)],
        *[
            ("data.prefetch", 0),
            ("data.threads", 1),
            ("checkpoint.every_steps", 0),
            ("checkpoint.keep", 1),
            ("evaluate.batch", 1),
        ],
    ],
)
def test_bounds_are_where_they_are_said_to_be(path, lowest):
    Config.model_validate(changed(path, lowest))
    with pytest.raises(ValidationError):
        Config.model_validate(changed(path, lowest - 1))


@pytest.mark.parametrize(
    ("path", "legal", "refused"),
    [("seed", 2**63 - 1, 2**63), ("batch_norm.momentum", 1, 1.001), ("loss.label_smoothing", 0.999, 1)],
)
def test_upper_bounds(path, legal, refused):
    Config.model_validate(changed(path, legal))
    with pytest.raises(ValidationError):
        Config.model_validate(changed(path, refused))


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
    assert (error["loc"], error["ctx"]["option"]) == (("model",), "odd")


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


@pytest.mark.parametrize("tiles", [2, [2], [1, 2, 3], [0, 2], [True, 2], [1.5, 2]])
def test_tiles_are_two_positive_numbers(tiles):
    with pytest.raises(ValidationError):
        Config.model_validate(changed("grid.tiles", tiles))


def test_an_action_alone_is_shorthand():
    plain = {"model": "small", "data": {"train": "a.h5"}, "batch": 1, "epochs": 1, "optimizer": {"name": "sgd", "lr": 1}}
    for value in ("skip", {"action": "skip"}, {"action": "skip", "most": 10}):
        section = Config.model_validate({**plain, "schedule": "constant", "on_nonfinite": value}).on_nonfinite
        assert (section.action, section.most) == ("skip", 10)
    assert Config.model_validate({**plain, "schedule": "constant"}).on_nonfinite.action == "stop"
