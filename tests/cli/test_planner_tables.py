"""Tables of predictions: numbers with as many digits as they are worth, sentences where they are due, 80 columns."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from hpctrain.cli.planner_tables import (
    machine_lines,
    measured_line,
    megabytes,
    milliseconds,
    print_whole,
    scaling_table,
    size_lines,
)
from hpctrain.experiment.simulated_scaling import SimulatedPoint
from tests.planner.test_computation_costs import MACHINE
from tests.support import predictions


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0"), (1.234e-5, "0.0123"), (0.012345, "12.35"), (0.1234, "123.4"), (123.4, "123,400")]
)
def test_times_have_about_four_digits(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


def test_sizes_have_about_three_digits() -> None:
    assert [megabytes(value) for value in (0, 41_234, 1.23e6, 12.34e6, 1.2345e9)] == ["0.00", "0.04", "1.23", "12.3", "1,234"]


def test_the_largest_figures_fit_80_columns() -> None:
    points = [
        SimulatedPoint("sharded", 2**k, 256 * 2**k, (1, 2**k), predictions.prediction(99.0, 98.0, memory_bytes=10**12))
        for k in (0, 13, 19)
    ]
    out = io.StringIO()
    Console(file=out, width=80).print(scaling_table(points))
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= 80
    assert "…" not in out.getvalue()
    assert lines[2].split() == ["8,192", "99,000", "98,000", "100.0%", "21,183", "1,000,000"]


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_no_number_is_cut_on_a_narrow_terminal(columns: int) -> None:
    points = [SimulatedPoint("sharded", 8192, 8192, (1, 8192), predictions.prediction(99.0, 98.0, memory_bytes=10**12))]
    out = io.StringIO()
    print_whole(Console(file=out, width=columns), scaling_table(points))
    assert out.getvalue().splitlines()[1].split() == ["8,192", "99,000", "98,000", "100.0%", "82.7", "1,000,000"]


def test_a_machine_says_how_much_of_it_was_measured() -> None:
    assert list(machine_lines(MACHINE, {"bandwidth": 1.0})) == ["Machine test (not measured): no description."]
    numbers = {"nodes": "measured 2026-01-31", "memory_bytes": "a data sheet"}
    described = replace(MACHINE, sources=numbers, description="Two cores")
    assert list(machine_lines(described, {"bandwidth": 2.0, "compute": 1.0})) == [
        "Machine test (1 of 2 numbers measured): Two cores.",
        "What if: bandwidth x 2.",
    ]
    guessed = replace(MACHINE, sources={"nodes": "not measured; a guess"})
    assert next(machine_lines(guessed, {})) == "Machine test (not measured): no description."


def test_how_much_was_measured_is_said() -> None:
    assert measured_line(1.0).startswith("All of the compute")
    assert measured_line(0.0).startswith("None of the compute")
    assert measured_line(0.834).startswith("83% of the compute")


def test_what_does_not_fit_the_machine_is_said() -> None:
    assert list(size_lines(MACHINE, 2, 10**9)) == []
    assert list(size_lines(MACHINE, 5, 2 * 10**9)) == [
        "Machine test has 1 x 2 ranks; 5 would take 3 nodes: this supposes more of the same.",
        "A rank needs up to 2,000 MB, but has 1,074 MB: the largest of these jobs does not fit.",
    ]
