"""Jobs and candidates of configurations."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategy import PlannedGroup
from hpctrain.config.load import load
from hpctrain.errors import ConfigError
from hpctrain.experiment.dry_run import prepare
from hpctrain.experiment.planned_job import candidate, job
from hpctrain.nn.parameter import GroupLayout
from hpctrain.planner.group_schedules import group_strategies

CONFIG = Path(__file__).parents[2] / "configs" / "cifar10-resnet20.yaml"


@pytest.mark.parametrize(("optimizer", "norms_needed"), [("{name: sgd, lr: 0.1}", "none"), ("{name: lars, lr: 0.1}", "layer")])
def test_a_job_is_what_the_configuration_trains(optimizer: str, norms_needed: str) -> None:
    overrides = ["batch=12", "backend=numpy", f"optimizer={optimizer}", "averager={name: priority, window: 3}", "micro_batches=2"]
    config, _ = load(CONFIG, overrides)
    task = prepare(config, 2, (32, 32, 3), 10)
    training, chosen = job(task), candidate(task)
    assert (training.model, training.batch, training.dtype, training.image_shape) == ("resnet20", 12, "float32", (32, 32, 3))
    assert (training.norms_needed, training.momentum) == (norms_needed, 0.9)
    assert training.kernels is task.kernels
    assert (chosen.plan, chosen.averager, dict(chosen.options), chosen.micro_batches) == (task.plan, "priority", {"window": 3}, 2)
    group = PlannedGroup(GroupLayout(training.specs, "float32"), 2)
    assert isinstance(training.strategy(chosen.averager, chosen.options, group), Priority)
    with pytest.raises(ConfigError, match="averager"):
        training.strategy("nobody", {}, group)


def test_a_plan_refuses_the_averager_that_a_run_refuses() -> None:
    """Where it depends on the optimiser, too."""
    overrides = ["batch=12", "backend=numpy", "averager={name: sparse, momentum_correction: 0.9, two_level: false}"]
    config, _ = load(CONFIG, [*overrides, "optimizer={name: sgd, lr: 0.1, momentum: 0.0}"])
    task = prepare(config, 2, (32, 32, 3), 10)
    assert group_strategies(job(task), candidate(task))
    of_both = replace(job(task), momentum=0.9)
    with pytest.raises(ConfigError, match=r"momentum_correction is 0.9, but the optimizer has a momentum of 0.9"):
        group_strategies(of_both, candidate(task))


@pytest.mark.parametrize(
    ("overrides", "arrays"),
    [
        (("optimizer.momentum=0.0",), 0),
        ((), 1),
        (("optimizer={name: adamw, lr: 0.1}",), 2),
        (("optimizer={name: adamw, lr: 0.1}", "ema.decay=0.9"), 3),
    ],
)
def test_a_job_knows_the_state_of_its_optimiser_and_of_its_average(overrides: tuple[str, ...], arrays: int) -> None:
    config, _ = load(CONFIG, ["batch=12", "backend=numpy", *overrides])
    assert job(prepare(config, 2, (32, 32, 3), 10)).state_arrays == arrays
