"""A search's result in words and as data."""

from __future__ import annotations

import json

import pytest

from hpctrain.cli.search_tables import as_dict, print_search, words
from hpctrain.experiment.planner_search import PlannedSearch, job_of
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner.job import Candidate
from hpctrain.planner.search import SearchChoice, SearchResult
from tests.experiment.test_plans import planner_search_task as task
from tests.support import predictions


def outcome(*overrides: str) -> PlannedSearch:
    """Two choices with long plans, for a machine that is too small for them."""
    uses = {f"stage{number}.*": "domain" for number in range(1, 9)}
    candidates = (
        Candidate(ParallelPlan(2, 2, "batch", uses), "sharded", {"fc_exchange": "never"}),
        Candidate(ParallelPlan(1, 4)),
    )
    choices = [
        SearchChoice(candidate, predictions.prediction(12.5 + number, 0.25, memory_bytes=2 * 10**12), why, True)
        for number, (candidate, why) in enumerate(
            zip(candidates, ("", "1 s longer: 1 s more exposed, most of it in fc"), strict=True)
        )
    ]
    asked = task(*overrides)
    return PlannedSearch(asked, job_of(asked), SearchResult(tuple(choices), 7))


@pytest.mark.parametrize(
    ("candidate", "text"),
    [
        (Candidate(ParallelPlan(1, 4, "model", {"fc": "domain"}), "blocking"), "batch; averager blocking"),
        (
            Candidate(ParallelPlan(4, 1, "domain", {"fc": "model"}, (2, 2)), options={"window": None, "two_level": False}),
            "domain, fc model, images in 2 x 2 tiles; averager sharded with window None, two_level False",
        ),
        (
            Candidate(ParallelPlan(2, 2, "batch", {**{f"f.{n}": "model" for n in range(4)}, "g": "domain"})),
            "batch, f.0 .. f.3 model (4 patterns), g domain; averager sharded",
        ),
    ],
)
def test_a_candidate_in_words(candidate: Candidate, text: str) -> None:
    assert words(candidate) == text


def test_all_lines_fit_but_the_command(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.cli.planner_tables._COLUMNS", 80)
    command = "mpiexec " + "x" * 200
    print_search(outcome(), 5, command)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"  {command}"
    assert max(map(len, lines[:-1])) <= 80
    assert lines[0].startswith("Simulated: small on 4 ranks")
    assert any(line.startswith("   Against 1: 1 s longer") for line in lines)
    assert not any(line.startswith("Batch norm") for line in lines)  # its statistics are synchronised
    assert any("A rank needs up to 2,000,000 MB" in line for line in lines)


def test_the_data_are_plain_and_as_many_as_asked_for() -> None:
    content = json.loads(json.dumps(as_dict(outcome(), 1, "train")))
    (choice,) = content["choices"]
    assert content["simulated"] is True
    assert (content["command"], content["estimated"], content["ranks"]) == ("train", 7, 4)
    assert (choice["grid"], choice["step_seconds"], choice["loses"]) == ([2, 2], 12.5, None)
    assert choice["keys"]["averager"] == {"name": "sharded", "fc_exchange": "never"}


def test_local_batch_norm_is_told_its_samples(capsys: pytest.CaptureFixture) -> None:
    print_search(outcome("batch_norm.statistics=local", "batch=50"), 5, "train")
    assert "Batch norm takes its statistics over 25 samples with choice 1." in capsys.readouterr().out.splitlines()
