"""Figures of a turn, from its trace, and their table."""

from __future__ import annotations

import pytest

from benchmarks.posting import markdown, parse
from benchmarks.posting_ranks import delays_of, facts_of
from hpctrain.trace.tracer import Category
from tests.support.traced_steps import Script


def _turn(delay: float) -> Script:
    script = Script()
    for at in (0, 10):
        script(Category.FORWARD, "conv", at, at + 6)
        script(Category.FORWARD, "fc", at + 6, at + 8)
        script(Category.COMMUNICATION, "conv.weight", at + 3 + delay, at + 9, 2 * at, "row")
        script(Category.COMMUNICATION, "fc.weight", at + 8, at + 9, 2 * at + 1, "row")
        if delay:
            script(Category.DELAY, "conv.weight", at + 3, at + 3 + delay, 2 * at, "row")
        script(Category.MESSAGES, "posting and progress", at + 8, at + 8.5)
        script(Category.WAIT, "fc.weight", at + 8.5, at + 9, 2 * at + 1, "row")
        script(Category.STEP, "step", at, at + 10, at)
    return script


def test_every_operation_counts_in_the_delays() -> None:
    assert sorted(delays_of(_turn(3).events())) == pytest.approx([0, 0, 3e-3, 3e-3])
    assert delays_of(_turn(0).events()) == [0.0] * 4


def test_figures_are_of_a_step() -> None:
    facts = facts_of(_turn(3).events(), 2)
    assert facts["step_seconds"] == pytest.approx(10e-3)
    assert facts["exposed_seconds"] == pytest.approx(0.5e-3)
    assert facts["messages_seconds"] == pytest.approx(0.5e-3)
    assert facts["delay_seconds"] == pytest.approx(3e-3)
    assert (facts["operations"], facts["delay_of_operation_seconds"]) == (2, pytest.approx(1.5e-3))
    assert facts["operator_seconds"] == pytest.approx((36 + 4) / 8 * 1e-3)


def test_the_table_compares_steps_with_those_of_mode_test() -> None:
    turns = {
        mode: [facts_of(_turn(delay).events(), 2) | {"cpu_seconds": 0.008}] * 3 for mode, delay in (("test", 3), ("posting", 0))
    }
    shape = {"family": "vgg", "depth": 16, "width": 0.375, "pixels": 64, "batch": 32}
    lines = markdown({"rounds": turns, "shape": shape, "averager": "sharded", "ranks": 2, "link": "1gbit"}).splitlines()
    assert lines[-2].startswith("| test | 10.0 | 1.00")
    assert "| 0.5 | 0.5 | 0.0 | 8.0 | 3.0 | 2 | 1.50 | 5.00 |" in lines[-2]
    assert "| 8.0 | 0.0 | 2 | 0.00 |" in lines[-1]


def test_mode_test_is_always_measured() -> None:
    assert parse(["vgg16", "--modes", "posting"]).modes == ["test", "posting"]
