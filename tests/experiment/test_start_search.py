"""A search at the start of a job: by rank 0 alone, its outcome and its errors on every rank."""

from __future__ import annotations

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.base import Communicator
from hpctrain.errors import ConfigError
from hpctrain.experiment.start_search import StartedJob, best
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.search_space import SearchSpace
from hpctrain.virtual.run import run_virtual
from tests.support import nets, planned
from tests.support.training import Task

JOB = planned.job_of(Task(nets.narrow, NumpyKernelSet(), Sgd))


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
