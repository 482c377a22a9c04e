"""A search at the start of a job: by rank 0 alone, its outcome and its errors on every rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.base import Communicator
from hpctrain.errors import ConfigError
from hpctrain.experiment import start_search
from hpctrain.experiment.start_search import BestCandidate, StartedJob, best, find
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner import machine_file
from hpctrain.planner.job import Candidate
from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.search_space import SearchSpace
from hpctrain.virtual.run import run_virtual
from tests.support import nets, planned
from tests.support.training import Task

JOB = planned.job_of(Task(nets.narrow, NumpyKernelSet(), Sgd))


def _outcome(candidates: list[Candidate]) -> SimpleNamespace:
    step = SimpleNamespace(seconds=0.25, exposed_seconds=0.125)
    prediction = SimpleNamespace(step=step, measured_share=0.0)
    return SimpleNamespace(choices=[SimpleNamespace(candidate=candidate, prediction=prediction) for candidate in candidates])


def test_rank_0_searches_and_all_get_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def search(job: Any, machine: Any, costs: Any, ranks: int, space: Any, **_: Any) -> SimpleNamespace:
        calls.append(ranks)
        return _outcome([Candidate(ParallelPlan(1, ranks), "bucketed", {"window": 2}), Candidate(ParallelPlan(1, ranks))])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(start_search, "_TIMING_SECONDS", 0.0)
    monkeypatch.setattr(start_search, "search", search)
    machine_file.write(tmp_path / "m.yaml", planned.machine())

    def program(comm: Communicator) -> BestCandidate:
        return find(StartedJob(comm, 1, 60.0), JOB, SearchSpace(fixed_micro_batches=1), str(tmp_path / "m.yaml"))

    outcomes = run_virtual(3, program)
    assert calls == [3]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0].candidate.options == {"window": 2}
    assert outcomes[0].next_best == "1 x 3, averager sharded: 0.25 s"
    assert outcomes[0].prediction.machine == planned.machine().name
    assert outcomes[0].machine is None  # it has a file of its own


def test_work_of_rank_0_that_fails_fails_everywhere() -> None:
    def fail() -> None:
        raise ConfigError("There is nothing to choose from.")

    def program(comm: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            StartedJob(comm, 1, 60.0).on_root(fail)
        return str(caught.value)

    assert all("nothing to choose from" in sentence for sentence in run_virtual(2, program))
    assert run_virtual(2, lambda comm: StartedJob(comm, 1, 60.0).on_root(lambda: comm.rank + 7)) == [7, 7]


def test_the_best_of_a_real_search_runs_on_as_many_ranks() -> None:
    machine = planned.machine()
    outcome = best(JOB, machine, RateCosts(machine), 2, SearchSpace(fixed_micro_batches=1, simulated=3))
    assert outcome.candidate.ranks == 2
    assert outcome.prediction.seconds > outcome.prediction.exposed_seconds >= 0
    assert outcome.next_best
