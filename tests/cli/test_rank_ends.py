"""However a rank ends inside a step, the job ends within seconds, says why once, and the other ranks are silent."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.support.faults import FAULTS, findings, is_named, prepare, run_fault

pytestmark = [pytest.mark.job, pytest.mark.slow]

# Only of errors in Python mpi4py's runner knows; what the keeper sees is the same, whoever has started the rank.
_ENDS = [
    *((name, False) for name in ("an exception", "sys.exit", "os._exit(0)", "SIGKILL", "SIGABRT", "no memory")),
    *((name, True) for name in ("an exception", "sys.exit", "no memory")),
]
_LONGEST_SECONDS = 100.0  # below the deadline, with its start, on a loaded machine
_DEADLINE_SECONDS = 120


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "through_mpi4py"), _ENDS)
def test_the_job_ends_and_says_why_once(tmp_path: Path, name: str, through_mpi4py: bool) -> None:
    [fault] = [fault for fault in FAULTS if fault.name == name]
    fault = dataclasses.replace(fault, overrides=(f"deadline_seconds={_DEADLINE_SECONDS}",))
    prepare(tmp_path)
    outcome = run_fault(fault, tmp_path, timeout_seconds=180, through_mpi4py=through_mpi4py)
    assert outcome.code not in (0, 85, 124), outcome.output
    assert outcome.seconds < _LONGEST_SECONDS
    assert is_named(fault, outcome, findings(tmp_path)), outcome.output
    errors = outcome.stderr
    assert errors.count("Traceback (most recent call last)") == (name in ("an exception", "sys.exit")), errors
    said = [line for line in errors.splitlines() if line.startswith("hpctrain: ")]
    assert len(said) == (name in ("os._exit(0)", "SIGKILL", "SIGABRT", "no memory")), errors
    assert "[0/" not in errors
    assert "[2/" not in errors

    if name == "no memory":
        for words in ("Memory ran out on rank 1 (", "allocate 4.00 EiB", "the plan has 0.000 GB for a pass over 4 samples"):
            assert words in said[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["an import error at the start", "SIGKILL of the launcher's process"])
def test_an_end_before_the_run_and_one_without_a_launcher_are_named(tmp_path: Path, name: str) -> None:
    [fault] = [fault for fault in FAULTS if fault.name == name]
    prepare(tmp_path)
    outcome = run_fault(fault, tmp_path, timeout_seconds=180)
    assert outcome.code not in (0, 85), outcome.output
    assert is_named(fault, outcome, findings(tmp_path)), outcome.output
