"""Jobs over two hosts without a scheduler, submitted as a user does: trained, stopped, gone on with, cut off, killed."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from hpctrain.runs.directory import latest
from hpctrain_testing.run import wait_until
from tests.support.newest_checkpoint import read_newest
from tests.support.two_hosts import DEADLINE_SECONDS, TwoHosts, flavour, missing, two_hosts

pytestmark = [pytest.mark.job, pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "")]

# To notice that nothing moves, to write the flight records and to end the other processes.
_GRACE_SECONDS = 15.0


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


def _newest(hosts: TwoHosts, output: str) -> tuple[int, dict[str, np.ndarray]]:
    """Step and tensors of the newest checkpoint below `output`."""
    run = latest(hosts.folder / output, "tiny")
    newest = read_newest(run.checkpoints) if run is not None else None
    assert newest is not None, f"{output} has no checkpoint"
    return int(newest[1].meta["global_step"]), dict(newest[1].tensors)  # type: ignore[call-overload]


def _wait_until_idle(hosts: TwoHosts, seconds: float) -> None:
    """Until nothing runs on either host any more."""
    wait_until(lambda: not [*hosts.lab.processes(0), *hosts.lab.processes(1)], seconds)


def test_a_job_is_looked_at_stopped_and_gone_on_with_over_both_hosts(hosts: TwoHosts) -> None:
    whole = hosts.submit("output=whole")
    assert whole.code() == 0, whole.text
    text = whole.text
    assert "2 ranks on 2 nodes" in text
    assert "A training would run" in text  # without "well" if the machine of the tests is busy
    assert "2 ranks as 1 x 2" in text
    assert "\x1b" not in text, "a log is no terminal"

    parts = hosts.submit("output=parts", "--no-doctor")
    parts.wait(lambda text: "epoch 3/" in text)
    hosts.run(0, shlex.split(parts.stop))
    assert parts.code() == 85, parts.text
    assert "job script: stopped with a checkpoint; start it again to continue" in parts.text
    step, _ = _newest(hosts, "parts")
    assert 0 < step < 800

    rest = hosts.submit("output=parts", "--no-doctor")
    assert rest.code() == 0, rest.text
    assert "resumed" in rest.text
    ours, theirs = _newest(hosts, "whole"), _newest(hosts, "parts")
    assert ours[0] == theirs[0] == 800
    assert ours[1].keys() == theirs[1].keys()
    assert all(np.array_equal(tensor, theirs[1][name]) for name, tensor in ours[1].items())
    _wait_until_idle(hosts, 5)


@pytest.mark.mpi_differs
@pytest.mark.thorough  # the next test ends a job in the same way, and tests/cli/test_many_ranks.py kills on one host
def test_a_rank_that_is_killed_on_the_other_host_ends_the_job(hosts: TwoHosts) -> None:
    job = hosts.submit("output=killed", "epochs=100000", "--no-doctor")
    job.wait(lambda text: "epoch 2/" in text)
    for process in hosts.ranks(1):
        os.kill(process, signal.SIGKILL)
    assert job.code(DEADLINE_SECONDS + _GRACE_SECONDS) not in (0, 85), job.text
    _wait_until_idle(hosts, DEADLINE_SECONDS + _GRACE_SECONDS)


def test_a_host_that_is_cut_off_ends_the_job_with_who_waited_for_whom(hosts: TwoHosts) -> None:
    job = hosts.submit("output=cut", "epochs=100000", "--no-doctor")
    job.wait(lambda text: "epoch 2/" in text)
    hosts.lab.cut(1)
    try:
        pattern = r"autopsy: All ranks posted the operation that rank \d waited \d+ s for .*a link may be broken\."
        text = job.wait(lambda text: bool(re.search(pattern, text)), DEADLINE_SECONDS + _GRACE_SECONDS)
        assert re.search(r"\[\d/2@h\d\] no completion within the deadline of 4 s: ", text), text
        wait_until(lambda: not [*hosts.ranks(0), *hosts.ranks(1)], DEADLINE_SECONDS + _GRACE_SECONDS)
        if flavour() == "MPICH":  # Open MPI's mpiexec goes on to wait for its own process on the other host
            assert job.code(_GRACE_SECONDS) not in (0, 85), job.text
    finally:
        hosts.lab.mend(1)
    assert job.code() not in (0, 85), job.text
    _wait_until_idle(hosts, _GRACE_SECONDS)
