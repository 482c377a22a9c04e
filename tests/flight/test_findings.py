"""The words of findings: places, ranks, silences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.flight.findings import latest_seconds, named, place, posted_at, silence, silent_seconds
from tests.support.flight_records import SECOND, operation, record


@pytest.mark.parametrize(
    ("phase", "step", "text"), [("", 0, "its start"), ("evaluation", 0, "evaluation"), ("x", 3, "x, step 3")]
)
def test_a_place(phase: str, step: int, text: str) -> None:
    assert place(record(0, phase=phase, step=step)) == text


def test_ranks_and_lines() -> None:
    assert (named([4]), named([5, 0, 1])) == ("rank 4", "ranks 0-1, 5")
    assert posted_at(operation(1, "x")) == ""
    assert posted_at(operation(1, "x", line="a.py:7")) == " (a.py:7)"


@pytest.mark.parametrize(
    ("deadline", "seconds", "silent"),
    [(0, 3, 0), (0, 4, 4), (300, 3, 0), (300, 4, 4), (3, 1, 0), (3, 2, 2)],
    ids=["no deadline", "no deadline, longer", "long", "long, longer", "short", "short, longer"],
)
def test_a_silence_is_long_beside_the_deadline(deadline: int, seconds: int, silent: int) -> None:
    ended = record(0, seen_ns=(100 - seconds) * SECOND, deadline_ns=deadline * SECOND)
    latest = latest_seconds([ended, record(1)])
    assert silent_seconds(ended, latest) == pytest.approx(silent)
    assert silent_seconds(record(1), latest) == 0


def test_clocks_of_nodes_differ() -> None:
    """That of rank 1 is an hour ahead."""
    ahead = record(1, seen_ns=3700 * SECOND, wall_offset_ns=3600 * SECOND)
    assert latest_seconds([record(0), ahead]) == pytest.approx(100)
    assert silence(replace(ahead, step=0), 7.4).startswith("Rank 1 was silent for 7 s at the end, last in a training step: ended")
