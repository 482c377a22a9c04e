"""Measuring the operators of a job: only on the machine that is meant, and by as many processes as a node has ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.config.load import load
from hpctrain.errors import ConfigError
from hpctrain.experiment import planner_costs
from hpctrain.experiment.planner_measurement import measure
from hpctrain.experiment.planner_search import SearchTask, job_of
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner.job import Candidate
from hpctrain.planner.operator_times import OperatorTimes, cache_file
from hpctrain.planner.program_timing import processor_model
from tests.planner.test_computation_costs import MACHINE

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def task(source: str) -> SearchTask:
    config, _ = load(QUICKSTART, ("backend=numpy", "model.width=0.25", "batch=4"))
    machine = replace(MACHINE, sources={"rates.memory.bytes_per_second": source})
    return SearchTask(config, 2, machine, image=(28, 28, 1), classes=10)


def test_another_machine_cannot_be_measured_here() -> None:
    with pytest.raises(ConfigError, match="but machine test was not measured on it"):
        measure(task("measured on another processor"), [Candidate(ParallelPlan(1, 2))], 1.0)


@pytest.mark.job
@pytest.mark.slow
def test_both_ranks_of_a_node_measure_and_one_keeps_the_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = task(f"measured on {processor_model()}")
    candidates = [Candidate(ParallelPlan(1, 2)), Candidate(ParallelPlan(2, 1, "domain"))]
    coverage = measure(here, candidates, 30.0)
    assert coverage.programs >= 2
    assert coverage.left == 0
    times = OperatorTimes(planner_costs.setting(here.machine, job_of(here)), cache_file())
    assert times.setting.concurrency == 2
    assert len(times) > 10
    again = measure(here, candidates, 30.0)
    assert again.programs == 0  # all is known
