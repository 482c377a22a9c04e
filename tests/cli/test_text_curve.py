"""Curves of braille dots: in their place, in their size, whatever the points."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli.text_curve import text_curve

_POINTS = st.lists(st.tuples(st.integers(0, 10**6), st.floats(-1e30, 1e30) | st.just(math.nan)), max_size=40)


@given(dots=_POINTS, marks=_POINTS, width=st.integers(20, 90), height=st.integers(2, 8), plain=st.booleans())
def test_any_points_fit(dots, marks, width: int, height: int, plain: bool) -> None:
    lines = text_curve(dots, marks, width, height, lambda value: f"{value:.4g}", plain=plain)
    assert len(lines) == height
    assert {len(line) for line in lines} == {width}
    signs = set("".join(line[-(width - 12) :] for line in lines))
    assert not plain or all(ord(sign) < 128 for sign in signs)
    shown = [y for _, y in (*dots, *marks) if math.isfinite(y)]
    if shown:
        assert lines[0].split()[0] == f"{max(shown):.4g}"
        assert lines[-1].split()[0] == f"{min(shown):.4g}"


@pytest.mark.parametrize("plain", [False, True])
def test_a_falling_line_falls_from_corner_to_corner(plain: bool) -> None:
    lines = text_curve([(0, 1.0), (10, 0.0)], [], 24, 4, str, plain=plain)
    columns = [[k for k, sign in enumerate(line[4:]) if sign != " "] for line in lines]
    assert columns[0][0] == 0
    assert columns[-1][-1] == 19
    assert [k for line in columns for k in line] == list(range(20))


def test_marks_stand_over_dots() -> None:
    lines = text_curve([(0, 1.0), (10, 1.0)], [(5, 0.0), (10, 1.0)], 14, 3, str)
    assert lines[0].endswith("o")
    assert lines[-1].index("o") in (8, 9)
