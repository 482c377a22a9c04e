"""Predictions put the pieces together: time, memory, bytes; more of what costs takes longer."""

from pathlib import Path

import pytest

from hpctrain.config.load import load
from hpctrain.experiment.dry_run import prepare
from hpctrain.experiment.planned_job import candidate, job
from hpctrain.planner.machine import Machine
from hpctrain.planner.predict import predict
from hpctrain.planner.prediction import Prediction
from hpctrain.planner.rate_costs import RateCosts
from hpctrain.planner.step_bytes import exchanged_bytes
from hpctrain.planner.step_program import step_program
from hpctrain.planner.tasks import Compute
from tests.support.planned import machine

CONFIG = Path(__file__).parents[2] / "configs" / "cifar10-resnet20.yaml"


def prediction(nodes: Machine, *overrides: str, ranks: int = 4) -> Prediction:
    config, _ = load(CONFIG, ["batch=16", "backend=numpy", *overrides])
    task = prepare(config, ranks, (32, 32, 3), 10)
    return predict(job(task), candidate(task), nodes, RateCosts(nodes))


@pytest.mark.parametrize("averager", ["sharded", "bucketed", "blocking", "priority", "overlap"])
@pytest.mark.parametrize(
    "grid", [("grid.rows=1",), ("grid.rows=2", "plan.default=domain"), ("grid.rows=4", "plan.default=model")]
)
def test_a_step_takes_at_least_its_compute(averager: str, grid: tuple[str, ...]) -> None:
    nodes = machine(2)
    overrides = (*grid, f"averager={averager}")
    predicted = prediction(nodes, *overrides)
    config, _ = load(CONFIG, ["batch=16", "backend=numpy", *overrides])
    task = prepare(config, 4, (32, 32, 3), 10)
    program = step_program(job(task), candidate(task), nodes, RateCosts(nodes))
    compute = max(sum(one.seconds for one in ranks.tasks if isinstance(one, Compute)) for ranks in program.classes)
    assert predicted.step.seconds >= compute * (1 - 1e-9)
    assert predicted.memory_bytes == max(ranks.memory_bytes for ranks in program.classes) > 0
    assert predicted.exchanged_bytes == exchanged_bytes(program) > 0
    assert predicted.measured_share == 0.0


def test_slower_links_and_slower_ranks_take_longer() -> None:
    fast, slow = machine(1), machine(1).scaled(bandwidth=0.01)
    assert prediction(fast).step.seconds < prediction(slow).step.seconds
    assert prediction(fast).step.seconds < prediction(machine(1).scaled(compute=0.5)).step.seconds


def test_a_rank_alone_exchanges_nothing_and_waits_for_nobody() -> None:
    alone = prediction(machine(1), ranks=1)
    assert alone.exchanged_bytes == 0
    assert alone.step.exposed_seconds == pytest.approx(0.0, abs=1e-6)
