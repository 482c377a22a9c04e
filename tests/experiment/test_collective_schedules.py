"""The schedules of another run: used where they fit, and refused in a sentence where they do not."""

import re
from pathlib import Path

import numpy as np
import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategy import Strategy
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.experiment.collective_schedules import fitting, of_run
from hpctrain.nn.parameter import GroupLayout, ParameterSpec
from hpctrain.optim.base import NormsNeeded
from hpctrain.storage.run_directory import RunDirectory
from tests.support.averaging import planned


def _strategy(kind: type[Strategy], size: int = 5, norms_needed: NormsNeeded = NormsNeeded.NONE, **options: object) -> Strategy:
    layout = GroupLayout({"a.weight": ParameterSpec((size, 3), lambda random, shape: np.zeros(shape))}, "float32")
    return planned(kind, layout, norms_needed=norms_needed, **options)


def _schedule(strategy: Strategy) -> CollectiveSchedule:
    schedule = strategy.plan(None)
    assert schedule is not None
    return schedule


STORED = {"all": _schedule(_strategy(Sharded))}


def test_a_schedule_that_fits_is_used() -> None:
    again = _strategy(Sharded)
    assert again.accepts(STORED["all"])
    assert fitting("runs/a", "all", STORED, again) == STORED["all"]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (_strategy(Bucketed), "was made for 'sharded"),
        (_strategy(Sharded, sizes="measured"), "sizes measured"),
        (_strategy(Sharded, size=6), "the same averager, options and model"),
        (_strategy(Sharded, norms_needed=NormsNeeded.GLOBAL), "an optimizer that needs no norms"),
        (_strategy(Blocking), "The averager has no schedule"),
    ],
    ids=["averager", "option", "model", "optimizer", "none"],
)
def test_what_does_not_fit_is_refused(strategy: Strategy, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        fitting("runs/a", "all", STORED, strategy)
    assert str(caught.value).endswith("leave --schedule-from out.")


def test_other_ranks_and_other_groups_are_refused() -> None:
    on_three = CollectiveSchedule(STORED["all"].request, 3, STORED["all"].slices, STORED["all"].operations)
    with pytest.raises(ConfigError, match="one of 3 ranks, but here are 1"):
        fitting("runs/a", "all", {"all": on_three}, _strategy(Sharded))
    with pytest.raises(ConfigError, match="has schedules of all, but this run needs one of model-row1"):
        fitting("runs/a", "model-row1", STORED, _strategy(Sharded))


def test_schedules_of_a_run_directory(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "tiny", config="", versions={}, git={})
    with pytest.raises(CheckpointError, match="holds no schedule"):
        of_run(str(run.path))
    run.write_schedule("all", STORED["all"].to_json())
    run.write_schedule("model-row1", STORED["all"].to_json())
    assert of_run(str(run.path)) == {"all": STORED["all"], "model-row1": STORED["all"]}
    with pytest.raises(CheckpointError, match="no run directory"):
        of_run(str(tmp_path / "nothing"))
