"""The report on slow links: gains of pairs, densities at which averagers are equal, and tables."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.slow_links_cases import ALONE, TOP_ONE_PERCENT
from benchmarks.slow_links_report import CaseFigures, crossing, markdown


def _turns(*seconds: float) -> list[dict[str, float]]:
    return [{"step_seconds": one, "cpu_seconds": one / 2, "link_bytes": 2e6, "payload_bytes": 1e6} for one in seconds]


def _run(case: str, steps: dict[str, tuple[float, ...]]) -> dict[str, Any]:
    facts = {"ranks": 4, "link_bytes_per_second": 25e6, "parameters": 10}
    rounds = {name: _turns(*seconds) for name, seconds in steps.items()}
    return {"case": case, "rounds": rounds, "facts": facts, "machine": {"date": "then"}, "refused": {"new": "There is no new."}}


_STEPS: dict[str, tuple[float, ...]] = {
    ALONE: (1.0, 1.0, 1.0, 1.0),
    "blocking": (9.0, 9.0),
    "sharded": (6.0, 6.0, 5.0, 5.0),
    "sharded, bfloat16": (4.0, 4.0, 2.5, 2.5),
    TOP_ONE_PERCENT: (3.0, 3.0, 2.5, 2.5),
    "sparse 0.1": (4.0, 4.0),
    "sparse 0.3": (8.0, 8.0),
}
_CASE = "slow-vgg16-4x1-200mbit"


def test_ratios_are_of_turns_of_the_same_round() -> None:
    figures = CaseFigures(_run(_CASE, _STEPS))
    assert figures.best_dense == "sharded"
    gain = figures.gain(TOP_ONE_PERCENT, "sharded")
    assert gain is not None
    assert (gain.median, gain.low, gain.high) == (2.0, 2.0, 2.0)
    early = figures.gain(TOP_ONE_PERCENT, "blocking")
    assert early is not None
    assert early.median == 3.0  # of the rounds that both were in
    assert figures.gain("priority", "blocking") is None


def test_sparse_and_dense_are_equal_between_the_densities_around_it() -> None:
    largest, at = CaseFigures(_run(_CASE, _STEPS)).crossover("sharded")
    assert largest == 0.3
    assert at is not None
    assert at.median == pytest.approx(0.2)  # halfway from 4 s to 8 s
    faster = {name: seconds for name, seconds in _STEPS.items() if name != "sparse 0.3"}
    assert CaseFigures(_run(_CASE, faster)).crossover("sharded") == (0.1, None)


@pytest.mark.parametrize(("dense_seconds", "density"), [(1.0, None), (2.5, 0.25), (4.0, 0.7), (6.0, None)])
def test_the_crossing_is_where_a_straight_line_meets_the_dense_step(dense_seconds: float, density: float | None) -> None:
    at = crossing([0.1, 0.4, 0.7], [2.0, 3.0, 4.0], dense_seconds)
    assert at == (None if density is None else pytest.approx(density))


def test_tables_have_the_bars_and_what_was_predicted() -> None:
    priority = _run("priority-vgg16-2x1-1gbit", {"blocking": (2.0,), "sharded": (1.5,), "priority": (1.2,)})
    predicted = {_CASE: {"sharded": 4.5, TOP_ONE_PERCENT: 3.0, "sparse 0.1": 6.0}}
    text = markdown({_CASE: _run(_CASE, _STEPS), "priority-vgg16-2x1-1gbit": priority}, predicted, {_CASE: 0.21})
    assert (
        f"| {_CASE} | sharded | 2.000 [2.000, 2.000] | 1.50 | 0.200 [0.200, 0.200] | 0.055 | 0.200 [0.200, 0.200] | 0.210 |"
        in text
    )
    assert f"| {_CASE} | sharded, bfloat16 | 1.750 [1.500, 2.000] | 2.00 | 2.00 |" in text
    assert "| priority-vgg16-2x1-1gbit | priority | 1.250 [1.250, 1.250] | 1.667 [1.667, 1.667] |" in text
    assert "Left out: new (There is no new.)" in text
    assert "200 Mb/s measured" in text


def test_nothing_measured_is_no_text() -> None:
    assert markdown({}, {}, {}) == ""
