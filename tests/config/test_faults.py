"""From pydantic's errors to sentences."""

import pytest

from hpctrain.config.data_section import AugmentConfig, DataConfig
from hpctrain.config.faults import known_paths, section_at, show
from hpctrain.config.load import parse
from hpctrain.config.schema import Config, OptimizerConfig
from hpctrain.errors import ConfigError


@pytest.mark.parametrize(
    ("path", "section"),
    [
        ((), Config),
        (("data",), DataConfig),
        (("optimizer",), OptimizerConfig),
        (("data", "augment", 3), AugmentConfig),
        (("data", "augment"), None),
        (("data", "augment", "x"), None),
        (("data", 0), None),
        (("batch",), None),
        (("batch", "x"), None),
        (("nowhere",), None),
    ],
)
def test_the_section_at_a_path(path, section):
    assert section_at(path) is section


def test_known_paths_cover_the_schema_once():
    paths = list(known_paths())
    assert len(paths) == len(set(paths))
    assert {("batch",), ("optimizer", "lr"), ("data", "evaluate_augment"), ("metrics", "interval_seconds")} <= set(paths)
    assert {path[0] for path in paths} == set(Config.model_fields)


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), ("a", "a"), ("3", "'3'"), (None, "null"), (True, "true"), ([1, {"a": 2}], "[1, {a: 2}]"), (1e-5, "1.0e-05")],
)
def test_values_are_shown_as_yaml(value, text):
    assert show(value) == text


def test_long_values_and_values_that_are_no_yaml_are_shown_too():
    assert len(show("x" * 999)) == 60
    assert show(object).startswith("<class 'object'")


VALUES = (
    "null", "true", "abc", "''", "1.5", "-1", "0", "99999999999999999999999", "1e400", ".nan", ".inf",
    "[]", "[1]", "[1, 2, 3]", "[a, b]", "[0, 1]", "[1.5, 2]", "[[1], 2]", "[null]",
    "{}", "{a: 1}", "'1'", "'1e5'", "x/y", "{name: 3}", "{name: ''}", "!!binary aGk=",
)  # fmt: skip
NO_WORDS_OF_OURS = ("Input", "valid ", "Tuple", "validation", "parse", "required", "unable", "Value error", "dictionary")


@pytest.mark.slow
def test_every_wrong_value_of_every_key_is_told_in_our_words() -> None:
    keys = [".".join(map(str, path)) for path in known_paths()]
    told = set()
    for key in [*keys, "plan.features.*", "optimizer.momentum", "model.width"]:
        for value in VALUES:
            try:
                parse(BASE, "base.yaml", [f"{key}={value}"])
            except ConfigError as error:
                lines = str(error).split("\n")
                assert all(line.startswith('override "') and line.endswith(".") for line in lines), lines
                assert not any(word in line.split('": ', 1)[1] for line in lines for word in NO_WORDS_OF_OURS), lines
                told.add(key)
    assert len(told) == len(keys) + 3


BASE = """
model: small
data: {train: train.h5}
batch: 8
epochs: 1
optimizer: {name: sgd, lr: 0.1}
schedule: constant
"""


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("grid.tiles=[1, 2, 3]", "grid.tiles is [1, 2, 3], but must be a list of 2 items, not 3."),
        ("grid.tiles=[1]", "grid.tiles is [1], but must be a list of 2 items."),
        ("grid.tiles=4", "grid.tiles is 4, but must be a list."),
        ("grid.tiles=[0, 1]", "grid.tiles.0 is 0, but must be at least 1; the nearest legal value is 1."),
        ("trace=perhaps", "trace is perhaps, but must be true or false."),
        ("name=null", "name is null, but must be a string."),
        ("name=''", "name is '', but must have at least 1 character."),
        ("batch=2.5", "batch is 2.5, but must be an integer."),
        ("optimizer.lr=fast", "optimizer.lr is fast, but must be a number."),
        ("optimizer.lr=.inf", "optimizer.lr is .inf, but must be a finite number."),
        ("batch_norm.momentum=2", "batch_norm.momentum is 2, but must be at most 1; the nearest legal value is 1.0."),
        ("backend=null", "backend is null, but must be 'auto', 'numpy', 'onednn' or 'cuda'."),
        (
            "grid.rows=99999999999999",
            "grid.rows is 99999999999999, but must be at most 1000000; the nearest legal value is 1000000.",
        ),
        ("grid.cols=2000000", "grid.cols is 2000000, but must be at most 1000000; the nearest legal value is 1000000."),
        (
            "deadline_seconds=1e300",
            "deadline_seconds is 1e300, but must be at most 1e+09; the nearest legal value is 1000000000.0.",
        ),
        ("loss.name=focal", 'Unknown key "loss.name"; known keys are label_smoothing.'),
        ("grid.batch=3", 'Unknown key "grid.batch"; the nearest known key is "batch".'),
        ("backend=onedn", "backend is onedn, but must be 'auto', 'numpy', 'onednn' or 'cuda'; the nearest is 'onednn'."),
    ],
)
def test_rules_are_told_in_full(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(BASE, "base.yaml", [override])
    assert str(error.value) == f'override "{override}": {sentence}'
