"""The text of a time table: all columns, no time lost, as wide as the terminal."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.trace.time_table import Late, Row, TimeTable, merge
from hpctrain.trace.time_table_text import is_sum, lines
from tests.support.traced_steps import MS, recorded_table

WINDOW = (np.array([0]), np.array([1000 * MS]))


def test_the_text_has_all_columns_and_says_what_is_left_over() -> None:
    merged = merge([recorded_table(), recorded_table()], {"conv": Late(1, 0.75, 2e-3), "fc": Late(0, 1.0, 1e-6)})
    said = lines(merged, clock_error_seconds=5e-6, ranks=2)
    head = next(line for line in said if line.startswith("layer"))
    assert head.split() == ["layer", "share", "compute", "comm.", "hidden", "exposed", "late", "rank"]
    conv = next(line for line in said if line.startswith("conv"))
    assert conv.split()[1:] == ["45.0%", "3.000", "4.500", "3.000", "1.500", "1", "by", "2.000", "(75%)"]
    fc = next(line for line in said if line.startswith("fc"))
    assert "by" not in fc  # less than the clocks' error
    assert any(line.startswith("left over") and "0.500" in line for line in said)
    total = next(line for line in said if line.startswith("total"))
    assert total.split()[1] == "100.0%"
    numbers = [float(word) for word in total.split()[2:]]
    assert numbers[0] + numbers[3] == pytest.approx(10.0)
    assert "5.0% of it left over" in " ".join(said)


@pytest.mark.parametrize("width", [80, 100])
def test_on_a_terminal_long_names_fold_and_no_column_is_lost(width: int) -> None:
    bucket = "reduce-scatter of stage1.conv.weight .. stage2.bn.bias"
    late = Late(1023, 0.88, 34.692e-3)
    figures = {"compute_seconds": 1.234567, "communication_seconds": 2.345678, "hidden_seconds": 1.0, "exposed_seconds": 1.345678}
    rows = (Row("stage1.conv", "layer", compute_seconds=0.002), Row(bucket, "communication", late=late, **figures))
    table = TimeTable(rows, Row("total", "total", **figures), 0.0, 2.58, 2.58, 5, 70.0)
    said = lines(table, 0.0, 1024, width)
    assert max(map(len, said)) <= width
    begin = next(k for k, line in enumerate(said) if line.startswith("reduce"))
    numbers = said[begin][said[begin].index("100.0%") :]
    assert numbers.split() == ["100.0%", "1234.6", "2345.7", "1000.0", "1345.7", "1023", "by", "34.692", "(88%)"]
    end = next(k for k, line in enumerate(said) if line.startswith("stage1.conv"))
    name = [said[begin][: said[begin].index("100.0%")], *said[begin + 1 : end]]
    assert "".join("".join(name).split()) == "".join(bucket.split())
    assert said[1].endswith("late rank")


def _deep(count: int, *, late: Late | None = None) -> TimeTable:
    """As many layers, each a little heavier than the one before."""
    rows = tuple(Row(f"stage1.block{k}.convolution{k}", "layer", compute_seconds=1e-3 * (k + 1), late=late) for k in range(count))
    whole = sum(row.compute_seconds for row in rows)
    return TimeTable(rows, Row("total", "total", compute_seconds=whole), 0.0, whole, whole, 2, 100.0)


@pytest.mark.parametrize("late", [None, Late(1023, 0.88, 34.692e-3)])
@pytest.mark.parametrize("count", [3, 30, 36, 200])
def test_a_screen_has_the_heaviest_rows_first_and_all_of_the_time(count: int, late: Late | None) -> None:
    table = _deep(count, late=late)
    said = lines(table, 0.0, 1)
    assert len(said) <= 37
    assert max(map(len, said)) <= 80
    end = next(k for k, line in enumerate(said) if line.startswith("total"))
    cells = [line.split() for line in said[2 : end + 1] if "%" in line]
    *shown, _left_over, total = cells
    if any(map(is_sum, said)):
        rest = shown.pop()
        assert rest[:3] == ["and", f"{count - len(shown)}", "more"]
        assert count > len(shown) > 0
    shares = [float(line[1].rstrip("%")) for line in shown]
    assert shares == sorted(shares, reverse=True)
    assert is_sum("and 3 more  1.0%")
    times = [float(next(word for word in line if "." in word and word[0].isdigit() and "%" not in word)) for line in cells[:-2]]
    assert sum(times) == pytest.approx(table.step_seconds * 1e3, rel=1e-3)
    assert float(total[2]) == pytest.approx(table.step_seconds * 1e3, rel=1e-3)


def test_all_rows_are_shown_where_they_are_wanted() -> None:
    said = lines(_deep(200), 0.0, 1, most=None)
    assert sum(line.startswith("stage1.block") for line in said) == 200
    assert not any(map(is_sum, said))
