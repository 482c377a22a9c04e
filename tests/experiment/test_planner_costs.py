"""Costs of a job: of its dtype, on the machine as it is or computing faster."""

from pathlib import Path

import pytest

from hpctrain.config.load import load
from hpctrain.experiment.dry_run import prepare
from hpctrain.experiment.planner_costs import costs
from tests.planner.test_rate_costs import MACHINE

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_job_has_the_costs_of_its_dtype_and_of_the_ranks_compute(dtype: str) -> None:
    config, _ = load(QUICKSTART, (f"dtype={dtype}", "backend=numpy"))
    task = prepare(config, 2, (28, 28, 1), 10)
    item_bytes = {"float32": 4, "float64": 8}[dtype]
    usual = costs(MACHINE, task)
    assert usual.update_seconds(1 << 20) == pytest.approx(6 * item_bytes * (1 << 20) / 5e9)
    assert costs(MACHINE, task, compute=2.0).update_seconds(1 << 20) == pytest.approx(usual.update_seconds(1 << 20) / 2)
