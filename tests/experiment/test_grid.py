"""The grid that a configuration describes, before there are data or ranks."""

from pathlib import Path

import pytest

from hpctrain.config.load import load
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.experiment import grid
from hpctrain.parallel.parallel_plan import Parallelism

CONFIG = Path(__file__).parents[2] / "configs" / "imagenet-vgg16.yaml"
DOMAIN = ("model={name: vgg11, width: 0.05}", "plan.default=domain", "grid.rows=2")


def config_of(*overrides: str) -> Config:
    return load(CONFIG, overrides)[0]


@pytest.mark.parametrize(
    ("overrides", "ranks", "expected"),
    [((), 6, 6), (("grid.rows=2",), 6, 3), (("grid.rows=4",), 3, 1), (("grid.rows=2", "grid.cols=5"), 6, 5)],
)
def test_the_size_of_a_data_group(overrides: tuple[str, ...], ranks: int, expected: int) -> None:
    assert grid.columns(config_of(*overrides), ranks) == expected


def test_the_plan_has_the_uses_and_the_layers_that_patterns_name() -> None:
    config = config_of(*DOMAIN, "plan.classifier.*=model", "grid.overlap=[features.0, 'features.3']")
    plan = grid.parallel_plan(config, 3)
    assert (plan.rows, plan.cols, plan.default) == (2, 3, Parallelism.DOMAIN)
    assert plan.use_of("classifier.0") is Parallelism.MODEL
    assert plan.overlapped == {"features.0", "features.3"}
    assert plan.overlapped <= set(grid.layer_names(config))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (DOMAIN, "2 x 3: domain"),
        ((*DOMAIN, "plan.classifier.*=model"), "2 x 3: domain, classifier.* model"),
        ((*DOMAIN, "grid.tiles=[1, 2]"), "2 x 3: domain, images in 1 x 2 tiles"),
        ((*DOMAIN, "grid.rows=1"), "1 x 3"),
    ],
)
def test_a_plan_in_a_few_words(overrides: tuple[str, ...], expected: str) -> None:
    assert grid.describe(grid.parallel_plan(config_of(*overrides), 3)) == expected


def test_every_layer_that_is_named_is_in_parts_or_has_a_reason() -> None:
    config = config_of(*DOMAIN, "grid.overlap=['features.*']")
    graph = grid.model_graph(config)
    assert graph is not None
    plan = grid.parallel_plan(config, 1)
    outcome = grid.overlap(graph, plan)
    named = [node.name for node in graph.nodes if node.name in plan.overlapped]
    assert sorted((*outcome.in_parts, *outcome.undivided)) == sorted(named)
    assert outcome.undivided["features.0"].reason == "reads its halo from the data file"
    assert "features.3" in outcome.in_parts
    assert list(grid.overlap_faults(config, graph, plan)) == []  # the pattern serves some layer


def test_a_pattern_that_serves_no_layer_is_refused_with_the_reason_that_tells_most() -> None:
    config = config_of(*DOMAIN, "grid.overlap=['classifier.*', 'features.0', 'features.3']")
    graph = grid.model_graph(config)
    assert graph is not None
    plan = grid.parallel_plan(config, 1)
    assert [number for number, _, _ in grid.overlap_faults(config, graph, plan)] == [0, 1]
    with pytest.raises(
        ConfigError, match=r"(?s)'classifier\.\*'.*\n.*'features\.0'.*features\.0 reads its halo from the data file"
    ):
        grid.check_overlap(config, graph, plan)


@pytest.mark.parametrize(("batch", "rows", "cols", "legal"), [(3, 1, 3, True), (2, 1, 3, False), (1, 2, 3, True)])
def test_every_rank_has_a_sample_to_work_on(batch: int, rows: int, cols: int, legal: bool) -> None:
    """Ranks of a split group work on each other's samples."""
    if legal:
        grid.check_batch(batch, rows, cols)
    else:
        with pytest.raises(ConfigError, match=rf"batch is {batch}.*the smallest batch is {cols}\."):
            grid.check_batch(batch, rows, cols)
