"""Whole networks on grids of virtual ranks equal one rank: a fixed sample of `make grid-matrix`, and what it leaves out."""

from dataclasses import replace
from functools import partial

import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import grid_float32, nets
from tests.support.grid_matrix import (
    GRIDS,
    NETS,
    PLANS,
    TOLERANCE,
    alone,
    cell,
    compare,
    on_virtual_ranks,
    plan_of,
)
from tests.support.training import Result, Task, distance, train

SAMPLE = [
    ("vgg16", (3, 1), "domain"),
    ("vgg16", (2, 4), "mixed"),
    ("vgg16_bn", (2, 1), "mixed"),
    ("resnet18", (2, 2), "tiles"),
    ("resnet18", (3, 1), "model"),
    ("resnet20", (8, 1), "mixed"),
    ("resnet20", (3, 2), "batch"),
    ("resnet50", (2, 1), "domain"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("net", "grid", "kind"), SAMPLE, ids=str)
def test_five_steps_of_a_whole_network(net: str, grid: tuple[int, int], kind: str) -> None:
    plan = plan_of(NETS[net], kind, *grid)
    assert plan is not None
    assert cell(net, plan).largest <= TOLERANCE


def test_the_matrix_has_every_grid_net_and_plan() -> None:
    plans = {(net, grid): [plan_of(NETS[net], kind, *grid) for kind in PLANS] for net in NETS for grid in GRIDS}
    assert len(plans) == len(NETS) * len(GRIDS) == 45
    for (_, (rows, cols)), found in plans.items():
        made = [plan for plan in found if plan is not None]
        assert len(made) == (1 if rows == 1 else len(PLANS))
        assert all((plan.rows, plan.cols) == (rows, cols) for plan in made)


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "kind"), [((3, 1), "domain"), ((2, 2), "model"), ((4, 1), "tiles")], ids=str)
def test_float32_is_as_near_to_float64_as_one_rank(grid: tuple[int, int], kind: str) -> None:
    """On oneDNN. In the deeper network a kink that float32 flips decides the parameters after five steps, on one rank too, so
    there only the first gradients are compared."""
    for name, fields in (("vgg16", ("gradients", "parameters")), ("resnet20", ("gradients",))):
        plan = plan_of(NETS[name], kind, *grid)
        assert plan is not None
        found = grid_float32.cell(name, plan)
        for field in fields:
            assert found[field].near, (name, field, found[field])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "micro_batches", "grid"), [("domain", 3, (2, 2)), ("model", 2, (3, 1)), ("mixed", 3, (2, 2))], ids=str
)
def test_micro_batches(kind: str, micro_batches: int, grid: tuple[int, int]) -> None:
    """Without batch norm they add up to the same gradients; micro-batches of some ranks have no samples."""
    net = NETS["vgg16"]
    task = replace(net.task(), steps=3)
    expected = alone(task)
    split = replace(task, micro_batches=micro_batches, plan=plan_of(net, kind, *grid))
    for result in on_virtual_ranks(split):
        assert compare(result, expected).largest <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batch", "domain", "model", "mixed"])
def test_a_batch_smaller_than_the_ranks(kind: str) -> None:
    """Two samples a step on six ranks, then one."""
    net = NETS["vgg16"]
    task = replace(net.task(), samples=3, batch=2, steps=4)
    expected = alone(task)
    for result in on_virtual_ranks(replace(task, plan=plan_of(net, kind, 3, 2))):
        assert compare(result, expected).largest <= TOLERANCE


def _residual(rows: int, cols: int, use: str, *, synchronised: bool) -> Task:
    model = partial(nets.residual, synchronised=synchronised)
    plan = ParallelPlan(rows, cols, Parallelism(use))
    return Task(model, NumpyKernelSet(), partial(Sgd, momentum=0.9), samples=12, batch=12, steps=4, plan=plan)


@pytest.mark.slow
@pytest.mark.parametrize("use", ["domain", "model"])
@pytest.mark.parametrize("rows", [2, 3])
def test_batch_norm_that_is_not_synchronised_is_that_of_the_split_group(rows: int, use: str) -> None:
    """The ranks of a split group hold the samples that one rank holds where nothing is split: the same statistics, and result."""
    (expected, *_) = run_virtual(2, lambda comm: _train(_residual(1, 2, "batch", synchronised=False), comm))
    for result in run_virtual(2 * rows, lambda comm: _train(_residual(rows, 2, use, synchronised=False), comm)):
        assert distance(result.parameters, expected.parameters) < 1e-10
        assert distance(result.statistics, expected.statistics) < 1e-10


def test_batch_norm_that_is_not_synchronised_is_that_of_the_rank_under_batch() -> None:
    (expected, *_) = run_virtual(4, lambda comm: _train(_residual(1, 4, "batch", synchronised=False), comm))
    for result in run_virtual(4, lambda comm: _train(_residual(2, 2, "batch", synchronised=False), comm)):
        assert distance(result.parameters, expected.parameters) < 1e-10
        assert distance(result.statistics, expected.statistics) < 1e-10


def _train(task: Task, comm: ThreadCommunicator) -> Result:
    return train(task, comm, virtual_engine(comm), Blocking)
