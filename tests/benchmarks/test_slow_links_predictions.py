"""Predictions of the benchmark of slow links: machines that cases stand on, and steps that they give."""

from __future__ import annotations

import pytest

from benchmarks.slow_links_cases import ALONE, Case, named
from benchmarks.slow_links_predictions import alone_seconds, machine_of, predicted, rule_crossover


def test_hosts_share_the_cores_of_one_machine() -> None:
    four, two = (named([name])[0] for name in ("slow-resnet18-4x1-100mbit", "priority-resnet18-2x1-1gbit"))
    assert (machine_of(four).nodes, machine_of(four).cores_per_rank) == (4, 0.5)
    assert (machine_of(two).nodes, machine_of(two).cores_per_rank) == (2, 1.0)


def test_a_link_that_was_not_calibrated_is_a_slower_one() -> None:
    at = {rate: machine_of(Case("slow", "vgg16", 4, 1, rate, {})) for rate in ("100mbit", "500mbit")}
    slow, known = (machine.between.segments[-1].beta_seconds_per_byte for machine in at.values())
    assert slow == pytest.approx(5 * known)
    assert at["100mbit"].within == at["500mbit"].within


@pytest.mark.parametrize(("name", "most"), [("slow-vgg16-4x1-100mbit", 1 / 4), ("slow-resnet18-2x2-500mbit", 1 / 2)])
def test_by_the_rule_sparse_ceases_to_pay_a_little_below_one_over_the_nodes(name: str, most: float) -> None:
    """Without latency and work it would be at 2 b_v / (m (b_v + b_i))."""
    assert 0.85 * most < rule_crossover(named([name])[0]) < most


def test_steps_are_longer_where_messages_are_waited_for_and_a_refusal_is_told() -> None:
    case = Case("slow", "resnet18", 4, 1, "200mbit", {ALONE: None, "blocking": {"name": "blocking"}, "new": {"name": "new"}})
    result = predicted(case)
    assert result.step_seconds[ALONE] == pytest.approx(2 * alone_seconds("resnet18"), rel=0.05)  # half of a core
    assert result.step_seconds["blocking"] > 2 * result.step_seconds[ALONE]
    # 2 (P - 1) / P of all gradients from each rank: the bytes of an allreduce.
    assert result.exchanged_bytes["blocking"] == pytest.approx(2 * 3 * 4 * 11_689_512, rel=1e-6)
    assert "new" in result.refused
