"""Mirrors of what travels, from schedules; those of whole runs are compared in tests/cli/test_train_cuda.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.link import LinkModel
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner.group_schedules import GroupSchedule, group_schedules
from hpctrain.planner.mirror_bytes import mirror_bytes
from tests.support import nets
from tests.support.planned import candidate_of, job_of
from tests.support.training import Task


def _group(ranks: int, strategy: str, options: dict[str, Any]) -> GroupSchedule:
    task = Task(nets.plain, NumpyKernelSet(), Sgd, batch=11, plan=ParallelPlan(1, ranks))
    (group,) = group_schedules(job_of(task), candidate_of(task, strategy, options), LinkModel(1e-5, 1e-9), None)
    return group


@pytest.mark.parametrize("strategy", ["blocking", "bucketed", "overlap"])
def test_sums_in_place_have_a_mirror_of_all_gradients(strategy: str) -> None:
    group = _group(3, strategy, {})
    assert mirror_bytes(group, 8) == (8 * group.elements,) * 3


@pytest.mark.parametrize("strategy", ["sharded", "priority"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_owners_have_those_of_their_parts_too(strategy: str, ranks: int) -> None:
    group = _group(ranks, strategy, {"fc_exchange": "never"})
    found = mirror_bytes(group, 4)
    assert found is not None
    assert sum(found) == 4 * (2 * ranks + 1) * group.elements  # all ranks together own everything once
    assert found[0] >= found[-1] >= 8 * group.elements


def test_one_rank_sends_nothing() -> None:
    assert mirror_bytes(_group(1, "sharded", {}), 4) == (0,)


def test_exchanged_inputs_and_errors_are_not_told() -> None:
    group = _group(2, "sharded", {"fc_exchange": "always"})
    assert group.schedule is not None
    assert any(piece.sufficient_factors for piece in group.schedule.slices)
    assert mirror_bytes(group, 4) is None
    pieces = tuple(replace(piece, sufficient_factors=False) for piece in group.schedule.slices)
    assert mirror_bytes(replace(group, schedule=replace(group.schedule, slices=pieces)), 4) is not None
