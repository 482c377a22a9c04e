"""Bytes of a step are those that a plan's report and the averagers' schedules have. Counted ones: test_rank_tasks.py."""

from pathlib import Path

import pytest

from hpctrain.comm.link import LinkModel
from hpctrain.config.load import load
from hpctrain.experiment.dry_run import averaging_bytes, description, group_schedules, prepare
from hpctrain.experiment.planned_job import candidate, job
from hpctrain.experiment.planned_run import PlannedRun
from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.step_bytes import exchanged_bytes, split_bytes
from hpctrain.planner.step_program import step_program
from tests.support.planned import machine

CONFIGS = Path(__file__).parents[2] / "configs"
GRIDS = [
    ("grid.rows=1", 5, 2),
    ("grid.rows=2", 4, 2),
    ("grid.rows=2", 6, 4),
    ("grid.rows=4", 8, 2),
]
PLANS = ["plan.default=batch", "plan.default=model", "plan.default=domain", "plan={default: domain, '*fc*': model}"]
AVERAGERS = [
    *("averager=sharded", "averager=bucketed", "averager=blocking", "averager=priority", "averager=overlap"),
    "averager={name: sharded, wire: float16, wire_parameters: bfloat16}",
    "averager={name: bucketed, wire: bfloat16}",
    "averager={name: blocking, wire: float16}",
    "averager={name: sparse, density: 0.05, compress: always}",
]


def task_of(model: str, ranks: int, *overrides: str) -> PlannedRun:
    config, _ = load(CONFIGS / "cifar10-resnet20.yaml", [f"model={model}", "batch=21", "backend=numpy", *overrides])
    return prepare(config, ranks, (32, 32, 3), 10)


def assert_equal_bytes(task: PlannedRun, per_node: int) -> None:
    report, nodes = description(task), machine(per_node)
    program = step_program(job(task), candidate(task), nodes, RateCosts(nodes))
    forward, backward = (
        direction(report.item_bytes) for direction in (report.traffic.bytes_forward, report.traffic.bytes_backward)
    )
    assert split_bytes(program) == sum(forward) + sum(backward)
    averaged = averaging_bytes(task, group_schedules(task, LinkModel(1e-5, 1e-9), per_node))
    assert exchanged_bytes(program) == sum(forward) + sum(backward) + sum(averaged)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("grid", "ranks", "per_node"), GRIDS)
@pytest.mark.parametrize("model", ["resnet20", "{name: vgg11, width: 0.05}"])
def test_bytes_are_those_that_plan_show_tells(model: str, grid: str, ranks: int, per_node: int, plan: str) -> None:
    if "fc" in plan and "vgg" in model:
        plan = plan.replace("*fc*", "classifier.*")
    assert_equal_bytes(task_of(model, ranks, grid, plan), per_node)


@pytest.mark.parametrize("averager", AVERAGERS)
def test_bytes_of_averagers_are_those_that_plan_show_tells(averager: str) -> None:
    assert_equal_bytes(task_of("{name: vgg11, width: 0.05}", 4, "grid.rows=2", "plan.default=model", averager), 2)
