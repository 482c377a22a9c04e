"""Plans: which use a layer has, and what is refused."""

from typing import Any

import pytest

from hpctrain.errors import ConfigError
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan


def test_the_last_matching_pattern_decides() -> None:
    plan = ParallelPlan(
        2, 3, Parallelism.BATCH, {"features.*": Parallelism.DOMAIN, "features.2*": Parallelism.MODEL, "*.fc": Parallelism.MODEL}
    )
    uses = {name: plan.use_of(name).value for name in ("features.0", "features.28", "classifier.0", "head.deep.fc")}
    assert uses == {"features.0": "domain", "features.28": "model", "classifier.0": "batch", "head.deep.fc": "model"}


def test_a_pattern_without_a_layer_is_refused_with_the_nearest() -> None:
    plan = ParallelPlan(2, 1, use={"feature.*": Parallelism.DOMAIN})
    with pytest.raises(ConfigError, match=r"'feature\.\*'; the nearest is .features\.0."):
        plan.check(["classifier", "features.0"])
    ParallelPlan(2, 1, use={"features.?": Parallelism.DOMAIN}).check(["classifier", "features.0"])


def test_tiles_must_multiply_to_the_split_group() -> None:
    with pytest.raises(ConfigError, match=r"2 x 2 make 4 parts, grid.rows is 6; the nearest legal tiles are 6 x 1"):
        ParallelPlan(6, 1, tiles=(2, 2))
    assert ParallelPlan(6, 1, tiles=(2, 3)).image_tiles == (2, 3)
    assert ParallelPlan(6, 1).image_tiles == (6, 1)


def test_uses_may_be_given_as_plain_strings() -> None:
    plan = ParallelPlan(2, 1, "model", {"c": "domain"})  # type: ignore[arg-type, dict-item]
    assert plan == ParallelPlan(2, 1, Parallelism.MODEL, {"c": Parallelism.DOMAIN})
    assert plan.default is Parallelism.MODEL
    assert plan.use_of("c") is Parallelism.DOMAIN


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"use": {"c": "domian"}}, r"'domian'; the nearest is .domain. \(of .batch., .model., .domain.\)\."),
        ({"default": None}, "cannot be None; there are .batch., .model., .domain."),
        ({"rows": 0}, r"A grid with grid.rows = 0 is not possible; the smallest is 1\."),
        ({"cols": -1}, "A grid with grid.cols = -1"),
        ({"rows": True}, "A grid with grid.rows = True"),
        ({"cols": 2.0}, r"A grid with grid.cols = 2\.0"),
        ({"overlapped": "conv1"}, "must be a set of layer names"),
    ],
)
def test_what_is_no_plan_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ParallelPlan(**given)
