"""Jobs and candidates of configurations."""

from pathlib import Path

import pytest

from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategy import PlannedGroup
from hpctrain.config.load import load
from hpctrain.errors import ConfigError
from hpctrain.experiment.dry_run import prepare
from hpctrain.experiment.planned_job import candidate, job
from hpctrain.nn.parameter import GroupLayout

CONFIG = Path(__file__).parents[2] / "configs" / "cifar10-resnet20.yaml"


@pytest.mark.parametrize(("optimizer", "norms_needed"), [("{name: sgd, lr: 0.1}", "none"), ("{name: lars, lr: 0.1}", "layer")])
def test_a_job_is_what_the_configuration_trains(optimizer: str, norms_needed: str) -> None:
    overrides = ["batch=12", "backend=numpy", f"optimizer={optimizer}", "averager={name: priority, window: 3}", "micro_batches=2"]
    config, _ = load(CONFIG, overrides)
    task = prepare(config, 2, (32, 32, 3), 10)
    training, chosen = job(task), candidate(task)
    assert (training.model, training.batch, training.dtype, training.image_shape) == ("resnet20", 12, "float32", (32, 32, 3))
    assert training.norms_needed == norms_needed
    assert training.kernels is task.kernels
    assert (chosen.plan, chosen.averager, dict(chosen.options), chosen.micro_batches) == (task.plan, "priority", {"window": 3}, 2)
    group = PlannedGroup(GroupLayout(training.specs, "float32"), 2)
    assert isinstance(training.strategy(chosen.averager, chosen.options, group), Priority)
    with pytest.raises(ConfigError, match="averager"):
        training.strategy("nobody", {}, group)
