"""The benchmark of checkpoints: what follows from the times of a run."""

from __future__ import annotations

import pytest

from benchmarks import checkpoint

TIMES = {"begins": [0, 9, 12, 13, 14, 15, 25, 26], "saves": [4.0, 8.0, 99.0], "step_of_save": [5, 6, 8]}


def test_first_steps_and_the_last_save_do_not_count() -> None:
    found = checkpoint.facts(TIMES)
    assert found["median_step"] == 1
    assert found["longest_step"] == 10
    assert found["mean_step"] == pytest.approx(13 / 4)
    assert found["longest_save"] == 8
    assert checkpoint.facts({**TIMES, "saves": [99.0]})["longest_save"] == 0


def test_the_report_has_a_line_for_each_mode() -> None:
    lines = checkpoint.markdown({"job": "a job", "times": dict.fromkeys(checkpoint.MODES, TIMES)}).splitlines()
    assert lines[0] == "a job"
    assert [line.split(" ")[1] for line in lines[-3:]] == ["none", "synchronous", "asynchronous"]
    assert "| asynchronous | 1.000 | 3.250 | 10.000 | 8.000 |" in lines
