"""Sentences about what a candidate loses by."""

from dataclasses import replace

import pytest

from hpctrain.planner.prediction import Prediction, SimulatedStep
from hpctrain.planner.search_reasons import gibibytes, reason, seconds
from hpctrain.trace.time_table import Row, TimeTable
from tests.support.planner_jobs import machine_of

MACHINE = machine_of(memory_bytes=8 << 30)


def prediction(*rows: Row, memory_bytes: int = 1 << 30, left_over: float = 0.0) -> Prediction:
    total = Row("total", "total", exposed_seconds=sum(row.exposed_seconds for row in rows))
    step = sum(row.compute_seconds + row.exposed_seconds for row in rows) + left_over
    return Prediction(SimulatedStep(step, TimeTable(rows, total, left_over, step, step, 1, 0.0), {}), memory_bytes, 0, 0.0)


FC = Row("fc6", "layer", compute_seconds=0.2, exposed_seconds=0.01)
CONV = Row("conv1", "layer", compute_seconds=0.3)
BEST = prediction(CONV, FC)


@pytest.mark.parametrize(
    ("worse", "sentence"),
    [
        (prediction(CONV, replace(FC, exposed_seconds=0.031)), "21 ms longer: 21 ms more exposed, most of it in fc6"),
        (prediction(replace(CONV, compute_seconds=0.9), FC), "0.6 s longer: 0.6 s more computed, most of it in conv1"),
        (prediction(CONV, FC, left_over=0.2), "0.2 s longer: 0.2 s more computed, most of it in the rest of the step"),
        (prediction(CONV, FC, Row("sums", "communication", exposed_seconds=0.5)), "0.5 s more exposed, most of it in sums"),
        (prediction(CONV, replace(FC, exposed_seconds=0.0101)), "takes as long, as far as predictions tell"),
        (prediction(CONV, replace(FC, compute_seconds=0.19)), "10 ms shorter, which is less than predictions of split layers"),
        (prediction(CONV, FC, memory_bytes=9 << 30), "does not fit: 9 GiB of 8 GiB"),
    ],
    ids=["exposed", "computed", "left over", "communication", "equal", "shorter", "memory"],
)
def test_the_reason_is_the_largest_part_of_what_is_longer(worse: Prediction, sentence: str) -> None:
    assert sentence in reason(BEST, worse, MACHINE)


def test_numbers_have_three_digits_and_a_unit() -> None:
    assert [seconds(value) for value in (1.2345, 0.12345, 0.0012345)] == ["1.23 s", "0.123 s", "1.23 ms"]
    assert gibibytes(9.1 * (1 << 30)) == "9.1 GiB"
