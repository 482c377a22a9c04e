"""The benchmark of thousands of steps: what counts as growth, and a job that has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import flat

_LOOK = {"resident_bytes": 9, "own_bytes": 5_000_000, "descriptors": 20, "threads": 4, "outstanding": 3}


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"own_bytes": 5_900_000}, True),
        ({"own_bytes": 6_100_000}, False),
        ({"descriptors": 21}, False),
        ({"threads": 5}, False),
        ({"outstanding": 9}, True),
        ({"descriptors": 19, "own_bytes": 4_000_000}, True),
    ],
)
def test_growth_is_the_most_since_the_first_look(changes: dict[str, int], right: bool) -> None:
    looks = {"0": {**_LOOK, "descriptors": 1}, "500": _LOOK, "750": {**_LOOK, **changes}, "1000": _LOOK}
    assert flat.is_flat(flat.growth(looks)) is right


def test_operations_that_never_end_are_in_every_look() -> None:
    looks = {str(step): {**_LOOK, "outstanding": 3 + step // 400} for step in (500, 750, 1000)}
    looks["500"] = {**_LOOK, "outstanding": 0}
    assert flat.growth(looks)["outstanding"] == 4
    assert not flat.is_flat(flat.growth(looks))


def test_the_report_has_the_first_look_and_the_last() -> None:
    text = flat.markdown({"ranks": {"1": {"500": _LOOK, "750": _LOOK, "1000": {**_LOOK, "descriptors": 77}}}})
    assert text.splitlines()[2:] == ["| 1 | 500 | 5.00 | 20 | 4 | 3 |", "| 1 | 1000 | 5.00 | 77 | 4 | 3 |"]


@pytest.mark.job
@pytest.mark.slow
def test_a_short_run_is_looked_at_on_every_rank(tmp_path: Path) -> None:
    looks = flat.measure(tmp_path, 60)
    assert json.dumps(looks)
    for of_rank in looks.values():
        assert list(of_rank) == ["0", "59"]
        assert flat.growth(of_rank, 0)["descriptors"] < 20
        assert of_rank["59"]["threads"] >= 2
