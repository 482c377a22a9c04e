"""The benchmark of compressed messages: everything is measured in every round, and ratios are of pairs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compress import BASE, arrays, main, measure, of_casts, of_one_array, table


def test_all_that_is_measured_can_be_run_on_every_kind_of_array() -> None:
    for values in arrays(500, "float32").values():
        assert values.shape == (500,)
        for work in (of_one_array(values, (0.01, 0.5)), of_casts(values)):
            assert next(iter(work)) == BASE
            for run in work.values():
                run()


def test_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    seconds = measure({"one": lambda: calls.append("one"), "two": lambda: calls.append("two")}, 3)
    assert calls == ["one", "two"] * 4
    assert {name: len(values) for name, values in seconds.items()} == {"one": 3, "two": 3}


def test_ratios_are_of_pairs() -> None:
    text = table("title", {BASE: [0.001, 0.002], "other": [0.002, 0.004]})
    assert f"| {BASE} | 1.500 [1.000, 2.000] |  |" in text
    assert "| other | 3.000 [2.000, 4.000] | 2.000 [2.000, 2.000] |" in text


def test_a_run_writes_all_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["--elements", "2000", "--rounds", "2", "--dtype", "float64", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert np.shape(result["seconds"]["all zero"][BASE]) == (2,)
    assert "2,000 float64 in 16 bits:" in capsys.readouterr().out
