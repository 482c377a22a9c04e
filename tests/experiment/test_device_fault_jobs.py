"""Faults in jobs with a device on each rank: they end in time, and the rank and the place are named as without devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.emulated import EmulatedDeviceFactory
from tests.support.faults import DEADLINE_SECONDS, FAULTS, findings, is_named, prepare, run_fault

pytestmark = [pytest.mark.job, pytest.mark.slow]

#: one of each kind; `benchmarks/faults.py --device` runs all
NAMES = (
    "a skipped step",
    "operations in another order",
    "a wrong count",
    "a wrong dtype",
    "an exception",
    "os._exit(0)",
    "SIGKILL",
    "SIGSTOP",
    "a rank that is too slow",
    "a number that is not finite",
    "a flipped bit of a parameter",
    "a flipped bit of the optimizer's state, which its owner holds",
)
_START_SECONDS = 40.0  # on a loaded machine


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_faulty_job_ends_and_the_rank_is_named(tmp_path: Path, emulated_device: EmulatedDeviceFactory, name: str) -> None:
    [fault] = [fault for fault in FAULTS if fault.name == name]
    prepare(tmp_path)
    outcome = run_fault(fault, tmp_path, timeout_seconds=90, device="emulated:7")
    assert outcome.code != 0, outcome.output
    assert outcome.seconds < DEADLINE_SECONDS + _START_SECONDS
    assert "kernels cuda on emulated" in outcome.output
    assert is_named(fault, outcome, findings(tmp_path)), outcome.output
