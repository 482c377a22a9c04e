"""A run's choice: kept and read back as it is, put into a configuration, and refused where the model is another one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.config.load import load
from hpctrain.config.schema import Config
from hpctrain.errors import CheckpointError
from hpctrain.experiment.automatic_choice import AutomaticChoice, PredictedStep, machine_digest, model_digest
from hpctrain.experiment.dry_run import PlannedRun, prepare
from hpctrain.planner.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate

CONFIG = Path(__file__).parents[2] / "configs" / "imagenet-vgg16.yaml"
OPEN = ("model={name: vgg11, width: 0.05}", "batch=14", "backend=numpy", "grid=auto", "plan=auto", "averager=auto")
SECTIONS = {
    "grid": {"rows": 2, "cols": 2, "tiles": None, "overlap": ["features.0"]},
    "plan": {"default": "batch", "features.*": "domain", "classifier.*": "model"},
    "averager": {"name": "sharded", "fc_exchange": "never"},
}
LINK = Link((LinkSegment(0, 1e-6, 1e-9),))
RATE = OperatorRate(1e10, 1e10, 1e-6)
MACHINE = Machine("two nodes", 2, 2, 1.0, 1 << 30, LINK, LINK, 2, dict.fromkeys(OperatorClass, RATE))


def _config(*overrides: str) -> Config:
    return load(CONFIG, [*OPEN, *overrides])[0]


def _task(*overrides: str) -> PlannedRun:
    config = load(CONFIG, [*OPEN[:3], *overrides])[0]
    return prepare(config, 1, (35, 35, 3), 10)


def _choice(task: PlannedRun, **changes: object) -> AutomaticChoice:
    prediction = PredictedStep(0.4523, 0.0412, 0.9, MACHINE.name, machine_digest(MACHINE))
    return replace(AutomaticChoice(SECTIONS, 4, model_digest(task), prediction, "1 x 4, averager bucketed: 0.47 s"), **changes)


def test_a_choice_is_read_back_as_it_was_kept() -> None:
    choice = _choice(_task())
    read = AutomaticChoice.from_meta(json.loads(json.dumps(choice.to_meta(), sort_keys=True)), "here")
    assert read == choice
    for one in (choice, read):
        assert list(one.sections) == ["grid", "plan", "averager"]
        assert list(one.sections["plan"]) == ["default", "features.*", "classifier.*"]  # the last that matches counts


@pytest.mark.parametrize("meta", [None, 5, {}, {"sections": {}}, {"prediction": {}}, {"prediction": 3, "ranks": 2}])
def test_what_is_no_choice_is_refused_in_one_sentence(meta: object) -> None:
    with pytest.raises(CheckpointError, match=r"^The automatic choice in runs/x cannot be read .*; name grid, plan and averager"):
        AutomaticChoice.from_meta(meta, "runs/x")


def test_what_is_open_gets_the_chosen_values_and_nothing_else_changes() -> None:
    config = _config()
    applied = _choice(_task()).applied(config)
    assert applied.automatic == ()
    assert (applied.grid.rows, applied.grid.cols, applied.grid.overlap) == (2, 2, ("features.0",))
    assert applied.plan.patterns == {"features.*": "domain", "classifier.*": "model"}
    assert (applied.averager.name, applied.averager.options) == ("sharded", {"fc_exchange": "never"})
    others = set(Config.model_fields) - set(SECTIONS)
    assert applied.model_dump(include=others) == config.model_dump(include=others)


def test_a_section_that_was_named_stays() -> None:
    config = _config("averager={name: bucketed, window: 3}")
    applied = _choice(_task(), sections={key: SECTIONS[key] for key in ("grid", "plan")}).applied(config)
    assert (applied.averager.name, applied.averager.options) == ("bucketed", {"window": 3})


def test_one_line_tells_the_choice_the_prediction_and_what_came_second() -> None:
    choice = _choice(_task())
    assert choice.line(choice.applied(_config())) == (
        "grid, plan, averager auto: 2 x 2: batch, features.* domain, classifier.* model, "
        "averager sharded (fc_exchange never), "
        "predicted 0.452 s a step (next best 1 x 4, averager bucketed: 0.47 s)"
    )


def test_a_choice_for_this_model_fits_and_one_for_another_is_refused() -> None:
    task = _task()
    _choice(task).check_fits(replace(task, config=_config()), "runs/x")
    for other, words in (
        (_task("model={name: vgg11, width: 0.1}"), "other layers or parameters than then"),
        (_task("model=resnet20"), "No layer matches the plan's pattern 'features.*'"),
    ):
        with pytest.raises(CheckpointError) as caught:
            _choice(task).check_fits(replace(other, config=_config(f"model={other.config.model.name}")), "runs/x")
        (sentence,) = str(caught.value).splitlines()
        assert sentence.startswith("The automatic choice in runs/x no longer matches the model")
        assert words in sentence
        assert sentence.endswith("or start a new training without --resume.")


def test_digests_tell_machines_and_models_apart() -> None:
    assert machine_digest(MACHINE) == machine_digest(replace(MACHINE))
    assert machine_digest(MACHINE) != machine_digest(MACHINE.scaled(latency=2.0))
    assert model_digest(_task()) == model_digest(_task("batch=28"))
    assert model_digest(_task()) != model_digest(_task("model={name: vgg11, width: 0.1}"))
