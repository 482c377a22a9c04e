"""A candidate's keys: overrides, a written file and a configuration in memory come to the same, which is the candidate."""

import shlex
from pathlib import Path

import pytest

from hpctrain.config.load import load, parse
from hpctrain.config.schema import Config
from hpctrain.experiment.candidate_keys import command_line, overrides, with_candidate, written
from hpctrain.experiment.grid import parallel_plan
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner.job import Candidate

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


def test_a_shell_takes_the_command_line() -> None:
    words = overrides(CANDIDATES[1])
    command = shlex.split(command_line("a file.yaml", words, 4))
    assert command == ["mpiexec", "-n", "4", "python", "-m", "mpi4py", "-m", "hpctrain", "train", "a file.yaml", *words]
    assert all("\n" not in word for word in words)
