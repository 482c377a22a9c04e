"""The age of a rank, and the time that Slurm leaves it."""

from __future__ import annotations

import time

import pytest

from hpctrain.launch.job_clock import age_seconds, slurm_seconds_left
from tests.support.jobs import run_job


def test_the_end_of_the_slurm_job_is_read_from_the_environment() -> None:
    left = slurm_seconds_left({"SLURM_JOB_END_TIME": str(int(time.time()) + 100)})
    assert left is not None
    assert 98 <= left <= 101
    assert slurm_seconds_left({}) is None
    assert slurm_seconds_left({"SLURM_JOB_END_TIME": "Unknown"}) is None


def test_this_process_gets_older() -> None:
    first = age_seconds()
    time.sleep(0.05)
    assert 0.04 <= age_seconds() - first <= 5


@pytest.mark.job
@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_age_counts_from_the_process_that_was_started(switch: str) -> None:
    """The rank is forked from its keeper late here; its own age would be less than that."""
    program = """
import time
time.sleep(0.6)
from hpctrain.launch.keeper import keep
from hpctrain.launch.job_clock import age_seconds
keeper = keep(None, frozenset())
print(0.6 <= age_seconds() < 10)
keeper.finished()
"""
    outcome = run_job(0, ["-c", program], env={"HPCTRAIN_KEEPER": switch})
    assert (outcome.code, outcome.stdout) == (0, "True\n"), outcome.output
