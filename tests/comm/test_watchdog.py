"""A guarded phase that hangs ends its process, whether it holds the interpreter lock or not."""

from __future__ import annotations

import textwrap

import pytest

from hpctrain.speaker import place
from tests.support.jobs import run_job

# The second holds the interpreter lock without end: PyDLL does not let go of it during a call.
_HANGS = {"time.sleep(60)": 124, "ctypes.PyDLL(None).sleep(60)": 1}


@pytest.mark.job
@pytest.mark.parametrize(("hang", "code"), _HANGS.items())
def test_a_phase_that_hangs_ends_the_process_with_its_stacks(hang: str, code: int) -> None:
    program = f"""
    import ctypes, time
    from hpctrain.comm.watchdog import guard

    def the_culprit():
        {hang}

    from hpctrain.launch.signals import hold
    hold()  # as a run does
    with guard("The start of MPI", 0.3, rank=4):
        the_culprit()
    """
    outcome = run_job(0, ["-c", textwrap.dedent(program)])
    assert outcome.code == code
    assert outcome.seconds < 30
    assert "in the_culprit" in outcome.stderr
    if code == 124:
        assert f"{place(4)}The start of MPI did not end within the deadline of 0.3 s" in outcome.stderr


@pytest.mark.job
def test_a_phase_that_ends_is_left_alone() -> None:
    program = """
    import time
    from hpctrain.comm.watchdog import guard
    with guard("quick", 0.2):
        pass
    try:
        with guard("failing", 0.2):
            raise ValueError
    except ValueError:
        pass
    time.sleep(2.6)
    print("alive")
    """
    outcome = run_job(0, ["-c", textwrap.dedent(program)])
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "alive\n", "")
