"""Time tables: every instant of a step has one place; and their text, as wide as the terminal."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hpctrain.trace import time_table
from hpctrain.trace.time_table import Late, Postings, Row, RowNames, TimeTable, latest, merge, tabulate
from hpctrain.trace.time_table_text import _folded, is_sum, lines
from hpctrain.trace.tracer import Category
from tests.support.recorded import MS, Script, record_step, recorded_table


def _ms(table: TimeTable) -> dict[str, Row]:
    return {row.name: row for row in table.rows}


def _spent(table: TimeTable) -> float:
    times = sum(row.compute_seconds + row.messages_seconds + row.exposed_seconds for row in table.rows)
    assert times == pytest.approx(table.total.compute_seconds + table.total.messages_seconds + table.total.exposed_seconds)
    return times + table.left_over_seconds


def test_compute_messages_exposed_and_left_over_add_up_to_the_step() -> None:
    table = recorded_table()
    spent = _spent(table)
    assert table.step_seconds == pytest.approx(0.010)
    assert spent == pytest.approx(table.step_seconds)
    assert table.steps == 3  # the first is not counted
    assert table.left_over_seconds == pytest.approx(0.0005)


def test_each_row_has_what_was_measured() -> None:
    rows = _ms(recorded_table())
    conv, fc = rows["conv"], rows["fc"]
    assert (conv.forward_seconds, conv.parameters_seconds, conv.input_seconds) == pytest.approx((2e-3, 1e-3, 0.0))
    assert (fc.forward_seconds, fc.parameters_seconds, fc.input_seconds) == pytest.approx((1e-3, 1e-3, 0.5e-3))
    assert conv.compute_seconds == pytest.approx(3e-3)
    assert conv.exposed_seconds == pytest.approx(1.5e-3)  # the wait of 2 less the update inside
    assert conv.communication_seconds == pytest.approx(4.5e-3, rel=1e-6)  # 3.5 in this step and 1 in the one before
    assert conv.hidden_seconds == pytest.approx(3.0e-3)
    assert (fc.exposed_seconds, fc.hidden_seconds) == pytest.approx((0.0, 1e-3))
    assert rows[time_table.UPDATE_ROW].compute_seconds == pytest.approx(0.5e-3)
    assert (rows["hooks"].compute_seconds, rows["hooks"].messages_seconds) == (0.0, pytest.approx(1e-3))
    assert rows["hooks"].kind == "communication"
    assert rows["data loading"].compute_seconds == pytest.approx(1e-3)
    assert conv.operations == pytest.approx(1.0)


def test_communication_that_two_operations_share_counts_once_in_the_total() -> None:
    script = Script()
    for at in (0, 10):
        script(Category.COMMUNICATION, "bucket 1", at + 1, at + 6, 2 * at, "column")
        script(Category.COMMUNICATION, "bucket 2", at + 4, at + 8, 2 * at + 1, "column")
        script(Category.WAIT, "bucket 1", at + 5, at + 6, 2 * at, "column")
        script(Category.STEP, "step", at, at + 10)
    table = tabulate(script.events())
    assert table is not None
    assert table.total.communication_seconds == pytest.approx(7e-3)
    assert table.total.hidden_seconds == pytest.approx(6e-3)
    assert table.total.exposed_seconds == pytest.approx(1e-3)
    rows = _ms(table)
    assert rows["bucket 2"].hidden_seconds == pytest.approx(3e-3)  # the program waited for the other one
    assert rows["bucket 2"].exposed_seconds == 0.0


def test_what_messages_take_inside_an_operator_is_none_of_its_compute_and_an_update_in_it_is_an_update() -> None:
    script = Script()
    for at in (0, 20):
        script(Category.FORWARD, "conv", at, at + 6)
        script(Category.MESSAGES, "posting and progress", at + 1, at + 4)  # a layer that exchanges activations posts
        script(Category.UPDATE, "conv.weight", at + 2, at + 3)
        script(Category.AVERAGING, "posting and progress", at + 6, at + 9)
        script(Category.MESSAGES, "posting and progress", at + 7, at + 8)
        script(Category.STEP, "step", at, at + 10)
    table = tabulate(script.events())
    assert table is not None
    rows = _ms(table)
    assert rows["conv"].forward_seconds == pytest.approx(3e-3)
    assert rows[time_table.UPDATE_ROW].compute_seconds == pytest.approx(1e-3)
    assert rows["posting and progress"].messages_seconds == pytest.approx(5e-3)
    assert table.total.messages_seconds == pytest.approx(5e-3)
    assert _spent(table) == pytest.approx(table.step_seconds) == pytest.approx(10e-3)


def test_delays_of_postings_are_summed_by_row_and_take_nothing_from_the_step() -> None:
    script = Script()
    for at in (0, 20):
        script(Category.FORWARD, "conv", at, at + 9)
        script(Category.DELAY, "slice 1 of conv.weight", at + 1, at + 3, 2 * at, "column")
        script(Category.DELAY, "slice 2 of conv.weight", at + 2, at + 3, 2 * at + 1, "column")
        script(Category.STEP, "step", at, at + 10)
    table = tabulate(script.events())
    assert table is not None
    assert _ms(table)["conv"].delay_seconds == table.total.delay_seconds == pytest.approx(3e-3)
    assert _spent(table) == pytest.approx(10e-3)
    assert table.total.communication_seconds == 0.0


def test_what_happens_between_steps_is_not_counted() -> None:
    script = Script()
    for at in (0, 100, 200):
        record_step(at, script)
        script(Category.FORWARD, "conv", at + 20, at + 90)  # an evaluation
        script(Category.WAIT, "evaluation sums", at + 91, at + 95)
        script(Category.COMMUNICATION, "fc.bias", at + 15, at + 80, 50 + at, "column")
    table = tabulate(script.events())
    assert table is not None
    assert table.step_seconds == pytest.approx(10e-3)
    rows = _ms(table)
    assert rows["conv"].forward_seconds == pytest.approx(2e-3)
    assert rows["fc"].communication_seconds == pytest.approx(1e-3)
    assert "evaluation sums" not in rows


def test_a_single_step_is_counted_and_no_step_has_no_table() -> None:
    script = Script()
    script(Category.FORWARD, "conv", 0, 1)
    assert tabulate(script.events()) is None
    table = recorded_table(1)
    assert table.steps == 1
    assert table.step_seconds == pytest.approx(0.010)


@pytest.mark.parametrize(
    ("what", "row"),
    [
        ("features.0.weight", "features.0"),
        ("features.0", "features.0"),
        ("slice 3 of features.0.weight [0:50000]", "features.0"),
        ("bucket 2 (features.0.bias, features.0.weight)", "features.0"),
        ("bucket 3 (features.0.weight, fc.bias)", "bucket 3 (features.0.weight, fc.bias)"),
        ("all gradients", "all gradients"),
        ("features.10.weight", "features.10.weight"),
        ("fc.weight: inputs", "fc"),
    ],
)
def test_the_row_of_an_operation(what: str, row: str) -> None:
    assert RowNames(["features.0", "fc"]).of(what) == row


def _posting(rank: int, starts: dict[int, float], group: int = 0, what: str = "fc.weight") -> Postings:
    script = Script()
    for number, start in starts.items():
        script(Category.COMMUNICATION, what, start, start + 5, number, "column")
    return Postings(rank, script.events(), {"column": group})


WINDOW = (np.array([0]), np.array([1000 * MS]))


def test_who_posted_last_was_late() -> None:
    postings = [_posting(0, {1: 10, 2: 20, 3: 30}), _posting(1, {1: 12, 2: 19, 3: 34}), _posting(2, {1: 11, 2: 21, 3: 31})]
    late = latest(postings, RowNames(["fc"]), WINDOW)
    assert late.keys() == {"fc"}
    assert late["fc"].rank == 1
    assert late["fc"].share == pytest.approx(2 / 3)
    assert late["fc"].after_first_seconds == pytest.approx(3e-3)  # by 2 and by 4


def test_queues_of_different_groups_are_different_collectives() -> None:
    postings = [_posting(0, {1: 10}, group=0), _posting(1, {1: 90}, group=1), _posting(2, {1: 13}, group=0)]
    late = latest(postings, RowNames(["fc"]), WINDOW)
    assert late["fc"] == Late(2, 1.0, pytest.approx(3e-3))


def test_an_operation_of_one_rank_alone_and_one_outside_the_window_say_nothing() -> None:
    assert latest([_posting(0, {1: 10}), _posting(1, {2: 15})], RowNames([]), WINDOW) == {}
    assert latest([_posting(0, {1: 2000}), _posting(1, {1: 2015})], RowNames([]), WINDOW) == {}


def test_the_mean_over_ranks_keeps_the_sum() -> None:
    table = recorded_table()
    script = Script()
    for at in (0, 20):
        script(Category.FORWARD, "conv", at, at + 12)
        script(Category.STEP, "step", at, at + 20)
    other = tabulate(script.events())
    assert other is not None
    merged = merge([table, other], {"conv": Late(1, 0.5, 2e-3)})
    assert merged.step_seconds == pytest.approx(15e-3)
    spent = _spent(merged)
    assert spent == pytest.approx(merged.step_seconds)
    assert _ms(merged)["conv"].forward_seconds == pytest.approx(7e-3)
    assert _ms(merged)["conv"].late == Late(1, 0.5, 2e-3)
    assert _ms(merged)["fc"].forward_seconds == pytest.approx(0.5e-3)


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
    assert re.findall("[^. ]+", " ".join(name)) == re.findall("[^. ]+", bucket)  # no line ends inside of a word
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


def test_folded_lines_do_not_break_within_numbers() -> None:
    """Would find a line that ends with the "12." of 12.34 ms, because names of layers are broken after dots."""
    text = "compute 12.34 ms, exposed 5.678 ms in stage1.0.conv1.weight"
    for width in range(16, len(text)):
        assert {"12.34", "5.678"} <= set(re.findall(r"[\d.]+", "\n".join(_folded(text, width))))
