"""Times of a step: what an unknown step is taken for, how they travel, and the upper median over ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.averaging.compute_times import Times, upper_medians

TIMES = Times({"b": 4.0, "a": 6.0, "c": 6.5}, {"b": 4.5, "a": 8.0, "c": 8.0}, {"a": 0.0, "b": 2.0}, 8.0)


def test_unknown_times_follow_backward() -> None:
    times = Times.unknown(("a", "b", "c"))
    assert sorted(times.ready, key=times.ready.__getitem__) == ["c", "b", "a"]
    assert min(times.free.values()) > max(times.ready.values())


def test_an_array_brings_back_what_is_known() -> None:
    names = ("a", "b", "c")
    assert Times.from_array(names, TIMES.to_array(names)) == TIMES


def test_all_is_late_by_the_longest_gap() -> None:
    assert TIMES.longest_gap() == 2.0
    assert TIMES.late() == Times({"b": 6.0, "a": 8.0, "c": 8.5}, {"b": 6.5, "a": 10.0, "c": 10.0}, TIMES.needed, 8.0)


def test_the_program_looks_where_work_for_a_parameter_ends() -> None:
    assert TIMES.looks() == [4.0, 4.5, 6.0, 6.5, 8.0, 10.0]


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [([1.0], 1.0), ([1.0, 3.0], 3.0), ([1.0, 90.0, 2.0], 2.0), ([np.nan, 5.0, 4.0], 5.0)],
)
def test_the_later_one_of_two_ranks_and_the_usual_one_of_many(by_rank: list[float], expected: float) -> None:
    np.testing.assert_array_equal(upper_medians(np.array(by_rank)[:, np.newaxis]), [expected])
