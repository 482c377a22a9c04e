"""Names and their options: described, filled in, and the same in lists and schema as what is constructed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from hpctrain.config.dump import dump
from hpctrain.config.load import load, parse
from hpctrain.experiment.check import check_names
from hpctrain.experiment.options import FOLLOWING, KINDS, SECTIONS, Choice, choice, choices, filled, names
from hpctrain.experiment.options_schema import json_schema
from hpctrain.models import catalogue
from hpctrain.optim.optimizers import OPTIMIZERS

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
ALL = [pytest.param(kind, one, id=f"{kind}-{one.name}") for kind in KINDS for one in choices(kind)]


@pytest.mark.parametrize(("kind", "one"), ALL)
def test_every_name_and_option_has_a_sentence(kind: str, one: Choice) -> None:
    """An option without one: write a line `name: Sentence.` of its own under "Args" of the constructor's docstring."""
    assert one.sentence.endswith((".", ")")), one.sentence
    for option in one.options:
        assert option.meaning.endswith("."), f"{one.name}.{option.name}: {option.meaning!r}"
        assert option.meaning[0].isupper(), option.meaning
        assert option.schema, option.name
    assert not {option.name for option in one.options} & ({"group", "comm", "progress", "base_lr"} | set(one.fixed))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_filled_configuration_is_the_same_run(path: Path) -> None:
    config, source = load(path)
    check_names(config, source)
    full = filled(config)
    again, source = parse(dump(full))
    check_names(again, source)
    assert again == full == filled(full)
    models = [json.dumps(catalogue.check(each.model.name, each.model.options)) for each in (config, full)]
    assert models[0] == models[1]
    optimizers = [vars(OPTIMIZERS.create(each.optimizer.name, each.optimizer.options)) for each in (config, full)]
    assert optimizers[0].keys() == optimizers[1].keys()
    for section, kind in SECTIONS.items():
        given, complete = getattr(config, section), getattr(full, section)
        assert complete.options == {**complete.options, **given.options}
        wanted = {option.name for option in choice(kind, given.name).options}
        assert wanted <= set(complete.options)
    assert not set(FOLLOWING) & set(full.model.options) - set(config.model.options)
    without = {"model", "optimizer", "schedule", "averager", "data"}
    assert full.model_dump(exclude=without) == config.model_dump(exclude=without)


@pytest.mark.parametrize(
    ("section", "name"), [(section, name) for section, kind in SECTIONS.items() for name in names(kind) if kind != "models"]
)
def test_every_name_with_all_its_defaults_is_legal(section: str, name: str) -> None:
    needed = {"optimizer": ", lr: 0.1", "schedule": ", milestones_epochs: [1]" if name == "step" else ""}
    config, source = load(CONFIGS[0], [f"{section}={{name: {name}{needed.get(section, '')}}}"])
    check_names(config, source)
    full = filled(config)
    check_names(full, source)
    assert getattr(full, section).name == name


def test_what_is_given_wins_over_defaults() -> None:
    overrides = ["optimizer={name: lars, lr: 1, momentum: 0.5}", "data.augment=[{name: pad_crop, padding: 1}]"]
    full = filled(load(CONFIGS[0], overrides)[0])
    assert (full.optimizer.options["momentum"], full.optimizer.options["trust_coefficient"]) == (0.5, 0.001)
    assert full.data.augment[0].options == {"padding": 1}


SCHEMA = json_schema()["$defs"]
_SECTIONS = [(f"{section.capitalize()}Config", kind) for section, kind in SECTIONS.items()]


def _alternatives(section: str) -> list[dict]:
    """The mappings with hpctrain's own names; those of the user's code come last."""
    *alternatives, _, _ = SCHEMA[section]["anyOf"][1:]
    return alternatives


@pytest.mark.slow
@pytest.mark.parametrize(("section", "kind"), [*_SECTIONS, ("AugmentConfig", "augmentations"), ("ReporterConfig", "reporters")])
def test_the_schema_knows_every_name_once(section: str, kind: str) -> None:
    known = [name for alternative in _alternatives(section) for name in alternative["properties"]["name"]["enum"]]
    expected = [*names(kind), *(["auto"] if kind == "averagers" else [])]  # which is none, and leaves it to the run
    assert sorted(known) == sorted(expected)
    assert SCHEMA[section]["anyOf"][0]["enum"] == expected


def test_the_schema_lets_sections_be_left_to_the_run() -> None:
    schema = SCHEMA
    assert [schema[section]["anyOf"][0]["const"] for section in ("GridConfig", "PlanConfig")] == ["auto", "auto"]
    assert set(schema["GridConfig"]["anyOf"][1]["properties"]) == {"rows", "cols", "tiles", "overlap"}
    assert "default" in schema["PlanConfig"]["anyOf"][1]["properties"]


def test_an_open_averager_is_filled_with_nothing() -> None:
    config, source = load(CONFIGS[0], ["averager=auto", "grid=auto", "plan=auto"])
    check_names(config, source)
    assert filled(config).automatic == ("grid", "plan", "averager")
    assert filled(config).averager.options == {}
    assert parse(dump(filled(config)))[0] == filled(config)


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_schema_has_the_options_of_the_shipped_configurations(path: Path) -> None:
    written = yaml.safe_load(path.read_text())
    for section in SECTIONS:
        value = written.get(section)
        if isinstance(value, dict):
            fits = [a for a in _alternatives(f"{section.capitalize()}Config") if value["name"] in a["properties"]["name"]["enum"]]
            assert len(fits) == 1
            assert set(value) <= set(fits[0]["properties"])
            assert set(fits[0]["required"]) <= set(value)
            assert all("description" in entry for entry in fits[0]["properties"].values())


@pytest.mark.parametrize("section", [section for section, _ in _SECTIONS])
def test_the_schema_lets_code_of_the_users_have_any_options(section: str) -> None:
    alone, whole = SCHEMA[section]["anyOf"][-2:]
    for reference in ("my_code:Own", "code/my_code.py:Own"):
        assert re.fullmatch(alone["pattern"], reference)
    assert not any(re.fullmatch(alone["pattern"], name) for name in ("sgd", ":x", "a:", "a:b.c"))
    assert whole["properties"]["name"] == alone
    assert whole["additionalProperties"] is True
