"""Planned runs say everything that plans follow from."""

from pathlib import Path

from hpctrain.config.load import load
from hpctrain.experiment.dry_run import prepare

CONFIG = Path(__file__).parents[2] / "configs" / "cifar10-resnet20.yaml"


def test_a_planned_run_is_its_configuration_on_a_grid() -> None:
    config, _ = load(CONFIG, ["batch=10", "backend=numpy"])
    task = prepare(config, 4, (32, 32, 3), 10)
    assert task.config is config
    assert (task.plan.rows, task.plan.cols, task.counts) == (1, 4, (3, 3, 2, 2))
    assert task.graph_of(3).tensors[0].shape == (3, 32, 32, 3)
    assert task.specs.keys() == {name for node in task.graph_of(1).nodes for name in node.parameters.values()}
