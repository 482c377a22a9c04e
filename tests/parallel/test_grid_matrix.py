"""Whole networks on grids of virtual ranks equal one rank: a sample of `make grid-matrix`, with every averaging strategy."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.backend.operators import KernelSet
from hpctrain.optim.optimizers import Lars, Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.averaging import STRATEGIES
from tests.support.grid_matrix import GRIDS, NETS, PLANS, TOLERANCE, alone, cell, float32_cell, on_virtual_ranks, plan_of
from tests.support.poison import overwritten_share, poisoned
from tests.support.sampling import amount
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


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("net", "grid", "kind"), SAMPLE, ids=str)
def test_five_steps_of_a_whole_network(net: str, grid: tuple[int, int], kind: str) -> None:
    plan = plan_of(NETS[net], kind, *grid)
    assert plan is not None
    assert cell(net, plan).largest <= TOLERANCE


CELLS = [(net, grid, kind) for net in NETS for grid in GRIDS for kind in PLANS if plan_of(NETS[net], kind, *grid) is not None]


@pytest.mark.thorough
@pytest.mark.parametrize(("net", "grid", "kind"), CELLS, ids=str)
def test_every_cell_of_the_matrix(net: str, grid: tuple[int, int], kind: str) -> None:
    plan = plan_of(NETS[net], kind, *grid)
    assert plan is not None
    assert cell(net, plan).largest <= TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize(("net", "grid", "kind"), CELLS, ids=str)
def test_every_cell_in_float32(net: str, grid: tuple[int, int], kind: str) -> None:
    plan = plan_of(NETS[net], kind, *grid)
    assert plan is not None
    found = float32_cell(net, plan)
    assert all(each.near for each in found.values()), found


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("grid", "kind"), [((3, 1), "domain"), ((2, 2), "model"), ((4, 1), "tiles")], ids=str)
def test_float32_is_as_near_to_float64_as_one_rank(grid: tuple[int, int], kind: str) -> None:
    """On oneDNN. In the deeper network a kink that float32 flips decides the parameters after five steps, on one rank too, so
    there only the first gradients are compared."""
    for name, fields in (("vgg16", ("gradients", "parameters")), ("resnet20", ("gradients",))):
        plan = plan_of(NETS[name], kind, *grid)
        assert plan is not None
        found = float32_cell(name, plan)
        for field in fields:
            assert found[field].near, (name, field, found[field])


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("rows", "cols", "use"), [*product((2, 3), (2,), ("domain", "model")), (2, 2, "batch")])
def test_batch_norm_that_is_not_synchronised_is_that_of_ranks_with_the_same_samples(rows: int, cols: int, use: str) -> None:
    """A split group, or under `batch` a rank, has the samples of one rank where nothing is split: the same statistics."""

    def results(rows: int, cols: int, use: str) -> list[Result]:
        model, plan = partial(nets.residual, synchronised=False), ParallelPlan(rows, cols, Parallelism(use))
        task = Task(model, NumpyKernelSet(), partial(Sgd, momentum=0.9), samples=12, batch=12, steps=4, plan=plan)
        return on_virtual_ranks(task)

    (expected, *_) = results(1, rows * cols if use == "batch" else cols, "batch")
    for result in results(rows, cols, use):
        assert distance(result.parameters, expected.parameters) < 1e-10
        assert distance(result.statistics, expected.statistics) < 1e-10


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("kernels", [NumpyKernelSet, OnednnKernelSet])
@pytest.mark.parametrize(
    ("net", "grid", "kind"),
    [
        ("vgg16", (3, 1), "domain"),
        ("vgg16", (2, 2), "domain"),
        ("vgg16_bn", (2, 1), "mixed"),
        ("resnet18", (2, 1), "domain"),
        ("resnet18", (4, 1), "tiles"),
        ("resnet20", (3, 1), "mixed"),
        ("resnet50", (2, 1), "model"),
    ],
    ids=str,
)
def test_memory_that_is_not_in_use_is_not_read(net: str, grid: tuple[int, int], kind: str, kernels: type[KernelSet]) -> None:
    if kernels is OnednnKernelSet and available() is not None:
        pytest.skip(str(available()))
    plan: ParallelPlan | None = plan_of(NETS[net], kind, *grid)
    assert plan is not None
    task = replace(NETS[net].task(plan, kernels(), "float32"), steps=2)
    expected = on_virtual_ranks(task)
    with poisoned() as poisoners:
        found = on_virtual_ranks(task)
    assert overwritten_share(poisoners) > 1
    for ours, theirs in zip(found, expected, strict=True):
        for name, values in theirs.parameters.items():
            np.testing.assert_array_equal(ours.parameters[name], values, err_msg=name)


#: of each strategy on each grid
SEEDS = amount(1, 5)
SPLIT_GRIDS = [(2, 2), (3, 2)]
_D, _M, _B = Parallelism.DOMAIN, Parallelism.MODEL, Parallelism.BATCH

SPLIT_NETS = {
    "plain": (partial(nets.plain, dropout=0.3), {"conv2": _M, "relu2": _M, "fc1": _M, "relu3": _B, "fc2": _M}),
    "residual": (nets.residual, {"layer2.*": _M, "fc": _M}),
}


def _task(net: str) -> Task:
    """9 x 7 images; five samples a step, then four: on six ranks some have none."""
    optimizer = partial(Sgd, momentum=0.9, nesterov=True, weight_decay=1e-2)
    return Task(SPLIT_NETS[net][0], NumpyKernelSet(), optimizer, samples=9, batch=5, steps=4)


@lru_cache
def _expected(net: str) -> Result:
    return alone(_task(net))


def _assert_equal(strategy: str, task: Task, expected: Result, seed: int | None) -> None:
    """The results of a strategy on the ranks of the task's plan are those of one rank."""
    kind, options = (Blocking, {}) if strategy == "blocking" else STRATEGIES[strategy]

    def program(comm: ThreadCommunicator) -> Result:
        return train(task, comm, virtual_engine(comm), kind, **options)

    for result in run_virtual(task.plan.rows * task.plan.cols, program, seed=seed, deadline_seconds=120):
        assert distance(result.parameters, expected.parameters) < 1e-10, (task.plan, seed)
        assert distance(result.statistics, expected.statistics) < 1e-10, (task.plan, seed)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("grid", SPLIT_GRIDS, ids=str)
@pytest.mark.parametrize("strategy", ["blocking", *STRATEGIES])
def test_every_strategy_with_model_and_domain(strategy: str, grid: tuple[int, int]) -> None:
    rows, cols = grid
    for seed in range(SEEDS):
        net = tuple(SPLIT_NETS)[seed % 2] if SEEDS > 1 else ("plain" if rows == 2 else "residual")
        task = replace(_task(net), plan=ParallelPlan(rows, cols, _D, SPLIT_NETS[net][1]))
        _assert_equal(strategy, task, _expected(net), 1000 * rows + seed)


OPTIMIZERS = {
    "lars, clipping": partial(Lars, momentum=0.9, weight_decay=1e-2, trust_coefficient=0.1, clip_norm=0.5),
    "clipping": partial(Sgd, momentum=0.9, nesterov=True, clip_norm=0.3),
}


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["blocking", *STRATEGIES])
def test_a_rank_without_a_part_of_a_split_layer_holds_up_no_other(strategy: str) -> None:
    """Fewer features than rows: the first layer is empty on a rank, or all are; it still counts in norms and messages."""
    for classes, optimizer in zip((2, 5), OPTIMIZERS.values(), strict=True):
        model = partial(nets.narrow, classes)
        task = Task(model, NumpyKernelSet(), optimizer, classes=classes, samples=9, batch=5, steps=3)
        expected = alone(task)
        for rows, cols, seed in ((3, 1, None), (3, 2, 1)):
            _assert_equal(strategy, replace(task, plan=ParallelPlan(rows, cols, _M)), expected, seed)
