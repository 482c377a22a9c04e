"""Memory of nodes against plans, which are real, and nodes, which are made up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.doctor.check import OwnPlace
from hpctrain.doctor.findings import Severity
from hpctrain.doctor.subjects import memory
from hpctrain.doctor.subjects.memory import MemoryFacts
from hpctrain.launch.launcher import Launcher
from tests.support.doctored import configuration, view

GB = 10**9
CONFIG = configuration("batch=64", "micro_batches=2")


@given(st.integers(1, 8), st.integers(1, 400), st.integers(1, 40), st.integers(0, 40), st.integers(1, 64))
def test_what_mends_it_fits(ranks: int, node_gb: int, pass_gb: int, held_gb: int, samples: int) -> None:
    """The second node has the least room, or both have enough; CONFIG has two micro-batches."""
    facts = [MemoryFacts(10**15, pass_gb * GB, held_gb * GB, samples), *[None] * (ranks - 1), MemoryFacts(node_gb * GB)]
    [found] = memory.judge(view(ranks, ranks, config=CONFIG), [*facts, *[None] * (ranks - 1)])
    need = ranks * (pass_gb + held_gb)
    assert found.key == ("too-little-memory" if need > node_gb else "tight-memory" if need > 0.85 * node_gb else "")
    assert (found.severity is Severity.FAULT) == (need > node_gb)
    assert f"need{'s' if ranks == 1 else ''} {need:.1f} GB" in found.sentence
    if match := re.search(r"micro_batches=(\d+)", found.mend):
        assert int(match[1]) <= samples
        assert ranks * (pass_gb * 2 / int(match[1]) + held_gb) <= 0.85 * node_gb * 1.000001
    elif match := re.search(r"at most (\d+)", found.mend):
        assert int(match[1]) * (pass_gb + held_gb) <= 0.85 * node_gb
    elif found.key:
        assert pass_gb + held_gb > 0.85 * node_gb


def test_a_rank_needs_less_for_a_pass_where_more_share_the_batch() -> None:
    one, held, _ = memory.planned_bytes(configuration("batch=64"), 1)
    four, held_by_four, samples = memory.planned_bytes(configuration("batch=64"), 4)
    assert 3 < one / four < 5
    assert held == held_by_four > 0
    assert samples == 16
    micro, *_ = memory.planned_bytes(configuration("batch=64", "micro_batches=4"), 1)
    assert 3 < one / micro < 5


def test_ranks_that_split_layers_hold_less() -> None:
    _, held, _ = memory.planned_bytes(configuration("batch=64"), 2)
    _, split, _ = memory.planned_bytes(configuration("batch=64", "grid.rows=2", "plan.default=model"), 2)
    assert split < held


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [(["grid=auto"], "the plan is auto"), (["backend=cuda"], "backend cuda"), (["batch=1", "grid.cols=1"], "")],
)
def test_where_there_is_no_plan_nothing_is_said(overrides: list[str], reason: str) -> None:
    facts = memory.gather(OwnPlace(Launcher("none"), configuration(*overrides), Path("runs")))
    assert facts is not None
    assert reason in facts.reason
    assert bool(facts.reason) == bool(reason)
    assert memory.judge(view(1), [facts])[0].key == ""
    assert memory.gather(OwnPlace(Launcher("x", 2, 1, 2, 1), None, Path("runs"))) is None
    leader = memory.gather(OwnPlace(Launcher("x", 2, 1, 1, 0), None, Path("runs")))
    assert leader is not None
    assert leader.node_bytes > 0
