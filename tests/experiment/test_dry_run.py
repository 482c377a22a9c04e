"""Schedules planned without ranks are those that ranks agree on."""

from functools import partial
from pathlib import Path

import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.comm.grid import ProcessGrid
from hpctrain.comm.link import LinkModel
from hpctrain.config.load import load
from hpctrain.experiment.averager import make_strategy
from hpctrain.experiment.dry_run import averaging_bytes, group_schedules, prepare
from hpctrain.experiment.planned_run import PlannedRun
from hpctrain.models import catalogue
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.rank_graph import make_network
from hpctrain.train.replica import Replica
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine

CONFIG = Path(__file__).parents[2] / "configs" / "imagenet-vgg16.yaml"
SMALL = ("model={name: vgg11, width: 0.05}", "batch=14", "plan.features.*=domain", "plan.classifier.*=model", "backend=numpy")
# Sizes of slices follow from the measured link unless they are given.
STRATEGIES = (
    "averager={name: sharded, bucket_bytes: 4096}",
    "averager={name: sharded, bucket_bytes: 4096, fc_exchange: never, window: 2}",
    "averager={name: bucketed, bucket_bytes: 4096}",
    "averager={name: priority, slice_parameters: 2000, window: 3}",
    "averager=overlap",
)


def task_of(*overrides: str, ranks: int) -> PlannedRun:
    config, _ = load(CONFIG, [*SMALL, *overrides])
    return prepare(config, ranks, (35, 35, 3), 10)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("rows", "ranks", "per_node"), [(1, 3, None), (2, 4, None), (3, 6, None), (1, 4, 2), (2, 8, 4), (2, 8, 5)]
)
def test_planned_schedules_are_those_of_the_ranks(
    strategy: str, rows: int, ranks: int, per_node: int | None, optimizer: str
) -> None:
    task = task_of(strategy, f"optimizer={{name: {optimizer}, lr: 0.1}}", f"grid.rows={rows}", ranks=ranks)
    found = run_virtual(ranks, lambda comm: agreed(task, comm), ranks_per_node=per_node)
    planned = group_schedules(task, LinkModel(1e-5, 1e-9), per_node)
    for row, schedules in found:
        assert {each.group: (each.schedule, each.order) for each in planned if row in each.split_ranks} == schedules


@pytest.mark.parametrize("rows", [1, 2])
def test_frozen_layers_are_in_no_schedule(rows: int) -> None:
    frozen = "init.freeze=['features.*', classifier.0]"
    task = task_of(STRATEGIES[2], f"grid.rows={rows}", frozen, ranks=4)
    planned = group_schedules(task, LinkModel(1e-5, 1e-9))
    names = {name for each in planned if each.schedule for piece in each.schedule.slices for name in piece.parameters}
    assert names == {f"classifier.{place}.{role}" for place in (3, 6) for role in ("weight", "bias")}
    for row, schedules in run_virtual(4, lambda comm: agreed(task, comm)):
        assert {each.group: (each.schedule, each.order) for each in planned if row in each.split_ranks} == schedules


Agreed = dict[str, tuple[CollectiveSchedule | None, tuple[int, ...] | None]]


def agreed(task: PlannedRun, comm: ThreadCommunicator) -> tuple[int, Agreed]:
    """This rank's row, and by group the schedule that its averager has agreed on, and the order of ranks in it."""
    config, plan, progress = task.config, task.plan, virtual_engine(comm)
    groups = GridGroups(ProcessGrid(comm, plan.rows, plan.cols))
    model = catalogue.build(config.model.name, {"classes": 10, **config.model.options})
    kernels, dtype = task.kernels, config.dtype
    network = make_network(
        model, task.image_shape, kernels, groups=groups, progress=progress, plan=plan, dtype=dtype, frozen=config.init.freeze
    )
    replica = Replica(
        network,
        groups=groups,
        progress=progress,
        strategy=partial(make_strategy, config.averager.name, config.averager.options),
        optimizer=partial(OPTIMIZERS.create, config.optimizer.name, config.optimizer.options),
        nominal_batch=config.batch,
    )
    replica.agree()
    levels = {name: strategy.levels for name, strategy in replica.strategies.items()}
    orders = {name: None if found is None else found.order for name, found in levels.items()}
    return groups.split_rank, {name: (averager.schedule, orders[name]) for name, averager in replica.averagers.items()}


def test_bytes_of_all_ranks_are_those_of_an_allreduce_where_nothing_is_split() -> None:
    task = task_of("averager=blocking", "plan.features.*=batch", "plan.classifier.*=batch", ranks=5)
    (group,) = group_schedules(task, LinkModel(0.0, 0.0))
    assert sum(averaging_bytes(task, [group])) == 4 * 2 * (5 - 1) * group.elements
