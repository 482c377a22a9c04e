"""The benchmark of slow links, without its jobs: what it would run, and how long that takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.slow_links import expected_seconds, lines_of_cases, main, parse, read
from benchmarks.slow_links_cases import CASES, named


def test_the_list_says_what_each_case_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--list", "--out", str(tmp_path / "none.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CASES) + 1
    assert lines[0].startswith(CASES[0].name)
    assert lines[-1].startswith(f"{len(CASES)} cases, about ")


def test_measured_cases_say_what_they_took() -> None:
    cases = named(["200mbit"])[:1]
    first, _ = lines_of_cases(cases, 9, {cases[0].name: {"seconds": 90.0}}, {})
    assert first.endswith("measured in 1.5")


def test_more_rounds_and_longer_steps_take_longer() -> None:
    case = CASES[0]
    short, slow = ({case.name: dict.fromkeys(case.variants, seconds)} for seconds in (1.0, 3.0))
    assert expected_seconds(case, 3, short) < expected_seconds(case, 9, short) < expected_seconds(case, 9, slow)


def test_an_unknown_word_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["17gbit"])
    assert "no case has 17gbit in its name" in capsys.readouterr().err


def test_there_is_nothing_in_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert read(tmp_path / "none.json") == {}
