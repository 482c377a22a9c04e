"""Patterns give each layer its use, and are no more than there are layers."""

import random

import pytest

from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.planner.plan_patterns import patterns
from hpctrain.planner.segments import segments
from tests.support.planner_jobs import job_of

B, M, D = Parallelism


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", ["alexnet", "resnet20"])
def test_patterns_give_every_layer_its_use(model: str, seed: int) -> None:
    graph = job_of(model, (96, 96, 3), 1, {"width": 0.1}).graph_of(1)
    draw = random.Random(seed)
    uses = {}
    for piece in segments(graph):
        use = draw.choice(list(Parallelism))
        uses.update({node.name: use for node in piece.nodes(graph)})
    default, rules = patterns(uses)
    plan = ParallelPlan(2, 1, default, rules)
    plan.check(list(uses))
    assert {name: plan.use_of(name) for name in uses} == uses
    assert len(rules) < len(uses)


def test_patterns_are_few() -> None:
    names = [f"features.{k}" for k in range(9)]
    assert patterns(dict.fromkeys(names, D)) == (D, {})
    classifier = [f"classifier.{k}" for k in range(3)]
    default, rules = patterns({**dict.fromkeys(names, D), "flatten": B, **dict.fromkeys(classifier, M)})
    assert (default, rules) == (D, {"flatten": B, "classifier.*": M})


def test_a_layer_with_layers_below_it_has_a_rule_of_its_own() -> None:
    uses = {"block": M, "block.a": B, "block.b": B, "other": B}
    default, rules = patterns(uses)
    plan = ParallelPlan(2, 1, default, rules)
    assert {name: plan.use_of(name) for name in uses} == uses
