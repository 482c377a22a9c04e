"""Whole networks on every grid of the ranks equal one rank: forward, first gradients, five steps; over MPI."""

from dataclasses import replace

import numpy as np
import pytest

from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from tests.support.grid_matrix import NETS, TOLERANCE, alone, compare, on_ranks, plan_of, relative_distances
from tests.support.training import Result, Task

RANKS = [2, 3, 4]
#: so that the whole takes seconds: a deep plain network with dropout, and a residual one, on small images
PIXELS = {"vgg16": 33, "resnet20": 17}
PLANS = {"vgg16": ("batch", "tiles", "mixed"), "resnet20": ("domain", "model", "mixed")}


def _task(name: str) -> Task:
    return replace(NETS[name].task(), image_shape=(PIXELS[name], PIXELS[name] - 1, 3), steps=5)


def _expected(task: Task, world: Communicator) -> Result:
    """One rank's result, computed once."""
    found: Result = world.broadcast_object(alone(task) if world.rank == 0 else None)
    return found


@pytest.mark.parametrize("net", PIXELS)
@pytest.mark.parallel(RANKS)
def test_every_plan_on_every_grid_equals_one_rank(world: Communicator, progress: ProgressEngine, net: str) -> None:
    task = _task(net)
    expected = _expected(task, world)
    for rows in (n for n in range(2, world.size + 1) if world.size % n == 0):
        for kind in PLANS[net]:
            plan = plan_of(NETS[net], kind, rows, world.size // rows)
            found = compare(on_ranks(replace(task, plan=plan), world, progress), expected)
            assert found.largest <= TOLERANCE, (rows, kind, found)


@pytest.mark.parallel(RANKS)
def test_halos_under_the_interior(world: Communicator, progress: ProgressEngine) -> None:
    task = _task("vgg16")
    plan = plan_of(NETS["vgg16"], "domain", world.size, 1)
    assert plan is not None
    early = replace(plan, overlapped=frozenset(f"features.{number}" for number in range(31)))
    found = compare(on_ranks(replace(task, plan=early), world, progress), _expected(task, world))
    assert found.largest <= TOLERANCE


@pytest.mark.parallel(RANKS)
def test_float32_is_as_near_to_float64_as_one_rank(world: Communicator, progress: ProgressEngine) -> None:
    net = NETS["vgg16"]
    task = _task("vgg16")
    exact = _expected(task, world)
    narrow = replace(task, kernels=OnednnKernelSet(), dtype="float32")
    one = _expected(narrow, world)
    for kind in ("domain", "model", "mixed"):
        many = on_ranks(replace(narrow, plan=plan_of(net, kind, world.size, 1)), world, progress)
        for field in ("gradients", "parameters"):
            assert _median(many, exact, field) <= 2 * _median(one, exact, field) + 1e-6, (kind, field)


def _median(found: Result, exact: Result, field: str) -> float:
    return float(np.median(relative_distances(getattr(found, field), getattr(exact, field))))
