"""The text of a time table: all columns, no time lost, as wide as the terminal."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.trace.time_table import Late, Row, TimeTable, merge
from hpctrain.trace.time_table_text import lines
from tests.support.traced_steps import MS, recorded_table

WINDOW = (np.array([0]), np.array([1000 * MS]))


def test_the_text_has_all_columns_and_says_what_is_left_over() -> None:
    merged = merge([recorded_table(), recorded_table()], {"conv": Late(1, 0.75, 2e-3), "fc": Late(0, 1.0, 1e-6)})
    said = lines(merged, clock_error_seconds=5e-6, ranks=2)
    head = next(line for line in said if line.startswith("layer"))
    assert head.split() == ["layer", "compute", "communication", "hidden", "exposed", "late"]
    conv = next(line for line in said if line.startswith("conv"))
    assert conv.split()[1:] == ["3.000", "4.500", "3.000", "1.500", "rank", "1", "by", "2.000", "(75%)"]
    fc = next(line for line in said if line.startswith("fc"))
    assert "rank" not in fc  # less than the clocks' error
    assert any(line.startswith("left over") and "0.500" in line for line in said)
    total = next(line for line in said if line.startswith("total"))
    numbers = [float(word) for word in total.split()[1:]]
    assert numbers[0] + numbers[3] == pytest.approx(10.0)
    assert "5.0% of it left over" in said[-1]


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
    numbers = said[begin][said[begin].index("1234.567") :]
    assert numbers.split() == ["1234.567", "2345.678", "1000.000", "1345.678", "rank", "1023", "by", "34.692", "(88%)"]
    end = next(k for k, line in enumerate(said) if line.startswith("left over"))
    name = [said[begin][: said[begin].index("1234.567")], *said[begin + 1 : end]]
    assert "".join("".join(name).split()) == "".join(bucket.split())
    assert said[1].split()[-1] == "late"


def test_many_rows_become_few_without_losing_time() -> None:
    rows = tuple(Row(f"layer{k}", "layer", compute_seconds=1e-3 * (k + 1)) for k in range(100))
    total = Row("total", "total", compute_seconds=sum(row.compute_seconds for row in rows))
    table = TimeTable(rows, total, 0.0, total.compute_seconds, total.compute_seconds, 2, 100.0)
    said = lines(table, 0.0, 1)
    assert len(said) < 50
    shown = [line.split() for line in said if line.startswith("layer") and line.split()[0] != "layer"]
    rest = next(line.split() for line in said if "more rows" in line)
    assert sum(float(line[1]) for line in shown) + float(rest[-1]) == pytest.approx(total.compute_seconds * 1e3)
