"""Times for a choice at the start: measured by all ranks together, kept by the first, and not measured twice."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.experiment.start_times import measured_times
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner.operator_times import OperatorTimes, cache_file
from hpctrain.planner.search_space import SearchSpace
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual
from tests.support import nets, planned
from tests.support.training import Task

JOB = planned.job_of(Task(nets.narrow, NumpyKernelSet(), Sgd))


def _times(comm: ThreadCommunicator, budget_seconds: float, space: SearchSpace) -> OperatorTimes:
    return measured_times(comm, JOB, space, threads=1, memory_bytes=1 << 30, budget_seconds=budget_seconds, deadline_seconds=60.0)


def test_what_was_measured_once_is_known_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    space = SearchSpace(fixed_grid=(1, 2), fixed_micro_batches=1)
    assert {len(times) for times in run_virtual(2, partial(_times, budget_seconds=0.0, space=space))} == {0}
    first = run_virtual(2, partial(_times, budget_seconds=60.0, space=space))
    assert cache_file().is_relative_to(tmp_path)
    assert cache_file().exists()
    assert len(first[0]) == len(first[1]) > 5
    again = run_virtual(2, partial(_times, budget_seconds=0.0, space=space))
    assert {len(times) for times in again} == {len(first[0])}


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    space = SearchSpace(fixed_grid=(1, 1), fixed_plan=ParallelPlan(), fixed_micro_batches=1)
    (times,) = run_virtual(1, partial(_times, budget_seconds=60.0, space=space))
    assert len(times) > 5
