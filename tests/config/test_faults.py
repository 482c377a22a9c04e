"""From pydantic's errors to sentences."""

import pytest

from hpctrain.config.faults import known_paths, section_at, show
from hpctrain.config.schema import AugmentConfig, Config, DataConfig, OptimizerConfig


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
