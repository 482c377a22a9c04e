"""A candidate's keys: overrides, a written file and a configuration in memory come to the same, which is the candidate."""

import shlex
from pathlib import Path

import pytest

from hpctrain.config.load import load, parse
from hpctrain.config.schema import Config
from hpctrain.experiment import planned_job
from hpctrain.experiment.candidate_keys import command_line, overrides, with_candidate, written
from hpctrain.experiment.dry_run import prepare
from hpctrain.experiment.grid import parallel_plan
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner.job import Candidate
from hpctrain.planner.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate
from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.search import search
from hpctrain.planner.search_space import SearchSpace

LINK = Link((LinkSegment(0, 1e-5, 1e-8),))
SLOW = Machine("slow", 4, 1, 1.0, 1 << 34, LINK, LINK, 1, dict.fromkeys(OperatorClass, OperatorRate(1e10, 1e10, 1e-6)))
CONFIGS = Path(__file__).parents[2] / "configs"
CANDIDATES = [
    Candidate(ParallelPlan(1, 4)),
    Candidate(ParallelPlan(2, 2, "domain", {"classifier.*": "model"}), "bucketed", {"bucket_bytes": 1 << 20}, 2),
    Candidate(ParallelPlan(4, 1, "domain", tiles=(2, 2), overlapped=frozenset({"stage2.conv"})), "sharded", {"window": None}),
    Candidate(ParallelPlan(2, 1, "batch", {"stage*": "domain", "stage2.conv": "batch"}), options={"fc_exchange": "never"}),
]


@pytest.mark.parametrize("number", range(len(CANDIDATES)))
@pytest.mark.parametrize("name", ["quickstart", "quickstart-grid"])
def test_every_way_leads_to_the_candidate(name: str, number: int, tmp_path: Path) -> None:
    candidate, path = CANDIDATES[number], CONFIGS / f"{name}.yaml"
    before, _ = load(path)
    config = with_candidate(before, candidate)
    assert load(path, overrides(candidate))[0] == config
    assert parse(written(before, candidate, ("Chosen.", "In two lines.")))[0] == config
    plan = parallel_plan(config, config.grid.cols or 0)
    assert Candidate(plan, config.averager.name, config.averager.options, config.micro_batches) == candidate
    untouched = set(Config.model_fields) - {"grid", "plan", "averager", "micro_batches"}
    assert all(getattr(config, key) == getattr(before, key) for key in untouched)


def test_what_a_search_chooses_is_what_a_run_with_its_keys_does() -> None:
    path = CONFIGS / "quickstart.yaml"
    changes = ("model={name: small, batch_norm: false, hidden: 512}", "batch=4", "backend=numpy")
    planned = planned_job.job(prepare(load(path, changes)[0], 2))
    result = search(planned, SLOW, RateCosts(SLOW), 2, SearchSpace(simulated=3))
    assert {choice.candidate.plan.rows for choice in result.choices} > {1}
    for choice in result.choices:
        config, _ = load(path, [*changes, *overrides(choice.candidate)])
        assert planned_job.candidate(prepare(config, 2)) == choice.candidate


def test_a_shell_takes_the_command_line() -> None:
    words = overrides(CANDIDATES[1])
    command = shlex.split(command_line("a file.yaml", words, 4))
    assert command == ["mpiexec", "-n", "4", "python", "-m", "mpi4py", "-m", "hpctrain", "train", "a file.yaml", *words]
    assert all("\n" not in word for word in words)
