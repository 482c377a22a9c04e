"""`grid: auto`, `plan: auto`, `averager: auto` as users run them: started, resumed, refused, and held to account."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli.arguments import with_auto
from hpctrain.planner.costs import machine_file
from hpctrain_testing.run import Outcome
from tests.support import planned
from tests.support.here import run_here
from tests.support.tiny_runs import (
    Start,
    assert_same,
    hpctrain,
    newest_checkpoint,
    newest_run,
    prepare,
    sentence,
    tiny,
    whole_lines,
)

CONFIG = tiny(
    "data: {train: FOLDER/train.h5}, batch: 8, epochs: 3, batch_norm: {statistics: synchronised}, "
    "grid: auto, plan: auto, averager: auto, machine: FOLDER/machine.yaml"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration, a machine and 64 small images: 8 steps per epoch."""
    machine_file.write(tmp_path / "machine.yaml", planned.machine())
    return prepare(tmp_path, CONFIG, train=64, test=0)


def _train(ranks: int, folder: Path, *more: str, code: int = 0, start: Start = run_here) -> Outcome:
    return hpctrain(ranks, folder, "train", *more, code=code, start=start, env={"XDG_CACHE_HOME": str(folder / "cache")})


def _choice(folder: Path) -> dict[str, Any]:
    choice: dict[str, Any] = json.loads(newest_run(folder).choice_path.read_text())
    return choice


@pytest.mark.slow
def test_a_run_chooses_says_so_keeps_it_and_is_held_to_account(job: Start, folder: Path) -> None:
    outcome = _train(2, folder, start=job)
    (line,) = [line for line in whole_lines(outcome.stdout).splitlines() if line.startswith("grid, plan, averager auto: ")]
    choice = _choice(folder)
    assert "\n2 ranks, launcher" in outcome.stdout  # without the plan, which the line of the choice has
    assert f"predicted {choice['prediction']['seconds']:.3g} s per step" in line
    assert choice["ranks"] == 2
    config = newest_run(folder).config()
    others = ("progress", "backend", "threads", "layout", "memory", "fill", "local_limit", "transport")  # without a prediction
    assert not [line for line in config.splitlines() if line.endswith(": auto") and line.split(":")[0].strip() not in others]
    assert newest_checkpoint(folder).meta["choice"] == choice
    (record,) = [line for line in newest_run(folder).metrics() if line["kind"] == "steps"]
    assert record["predicted_step_seconds"] == choice["prediction"]["seconds"]
    assert record["machine"] == planned.machine().name
    assert "; predicted " in whole_lines(outcome.stdout).partition("step time ")[2]
    # On as many ranks the choice stays, whatever the machine is now.
    (folder / "machine.yaml").write_text("nodes: -1")
    again = _train(2, folder, "--resume", "auto", "epochs=4")
    assert "; kept from " in whole_lines(again.stdout)
    assert _choice(folder) == choice
    assert " -> " not in again.stdout.replace("epochs: 3 -> 4", "")


@pytest.mark.slow
def test_a_resumed_run_is_the_same_to_the_bit_and_other_ranks_choose_again(folder: Path) -> None:
    _train(2, folder, "--steps", "3")
    chosen = [f"{section}={value}" for section, value in _choice(folder)["sections"].items()]
    _train(2, folder, "output=whole", *chosen, "--steps", "6")  # a search of its own could choose another plan
    refused = _train(2, folder, "--resume", "auto", "model.hidden=8", code=2)
    assert "no longer matches the model" in sentence(refused)
    _train(2, folder, "--steps", "3", "--resume", "auto")
    assert_same(newest_checkpoint(folder), newest_checkpoint(folder, "whole"))
    outcome = _train(3, folder, "--steps", "2", "--resume", "auto", "machine=null")
    assert "3 ranks instead of 2: choosing grid and plan and averager again\n" in outcome.stdout
    assert (_choice(folder)["ranks"], newest_run(folder).machine_path.exists()) == (3, True)
    hpctrain(1, folder, "eval", "data.test=train.h5")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["machine=nowhere.yaml", "data.train=nowhere.h5"], ["There is no data file nowhere.h5"]),  # before the search
        (["machine=nowhere.yaml"], ["There is no machine file 'nowhere.yaml'"]),
        (["averager.window=3"], ["averager is auto, which also chooses the options"]),
        (["batch=2", "grid={rows: 1}"], ["batch is 2, but 3 ranks"]),
        (["machine=poor.yaml"], ["does not fit in memory on 3 ranks", "the plan with the least memory needs"]),
    ],
)
def test_what_cannot_be_chosen_is_said_in_one_sentence(folder: Path, change: list[str], words: list[str]) -> None:
    machine_file.write(folder / "poor.yaml", planned.machine(memory_bytes=1000))
    said = sentence(_train(3, folder, *change, code=2))
    assert all(word in said for word in words), said


def test_plans_are_shown_for_what_a_run_would_choose(folder: Path) -> None:
    assert with_auto(("averager.name=priority", "plan.fc=model"), auto=True)[2:] == ("grid=auto",)
    assert json.loads(hpctrain(0, folder, "plan show", "--auto", "--ranks", "2", "--json").stdout)
    for more, words in (([], "give --ranks"), (["--ranks", "2", "machine=null"], "give --machine")):
        assert words in hpctrain(0, folder, "plan show", *more, code=2).stderr
