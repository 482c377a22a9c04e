"""Faults put into jobs: one of them for real, and how all are reported."""

from __future__ import annotations

import pytest

from benchmarks import faults
from tests.support.faults import FAULTS


def _values(*, named: bool, seconds: float | None = 4.0) -> dict[str, object]:
    return {
        "ends": seconds is not None,
        "seconds": seconds,
        "code": None if seconds is None else 9,
        "named": named,
        "said": "words",
    }


def test_the_report_counts_what_ended_and_what_was_named() -> None:
    values = {"a": _values(named=True), "b": _values(named=False), "c": _values(named=False, seconds=None)}
    text = faults.markdown({"faults": values})
    assert "| a | 4.0 | 9 | yes | words |" in text
    assert "| c | never |  | no | words |" in text
    assert "2 of 3 ended within 13 s of their start, 1 were named rightly." in text


def test_faults_have_names_of_their_own() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 20


@pytest.mark.job
@pytest.mark.parametrize("name", ["SIGKILL", "a wrong dtype", "a rank that is too slow", "a flipped bit of a parameter"])
def test_a_fault_is_named(name: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    values = faults.measure(fault)
    assert values["named"], values
    assert values["code"] not in (0, None)


@pytest.mark.job
def test_without_a_fault_nobody_is_blamed() -> None:
    fault = next(fault for fault in FAULTS if fault.name == "SIGKILL")
    sound = type(fault)("none", "pass", fault.words)
    values = faults.measure(sound)
    assert not values["named"], values
    assert values["code"] == 0
