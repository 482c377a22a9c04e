"""Fixtures of all tests, and what makes a test with ranks fail as a whole: its outcome is agreed on after every phase.

Tests with ranks run as `mpiexec -n N python -m mpi4py -m pytest -m "parallel[N]" tests/mpi`, the others in one process with
`-m "parallel[1]"`. Rank 0 reports; another rank's failure is printed where rank 0 has none of its own.
"""

from __future__ import annotations

import functools
import gc
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core import user_code
from hpctrain.launch.launcher import detect
from hpctrain.nn.compile import validate
from hpctrain_testing.run import Outcome, find_mpiexec, run_job
from tests.support import sampling
from tests.support.emulated import EmulatedDevices
from tests.support.marking import JobMarker

# The same examples in every run: one that fails is found where the code or the test changes, not by chance elsewhere. Nothing is
# timed: a machine that is busy with other things is no failure.
hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("repeatable"), max_examples=17)
hypothesis.settings.register_profile("usual", hypothesis.settings.get_profile("repeatable"), max_examples=50)
hypothesis.settings.register_profile("all", hypothesis.settings.get_profile("repeatable"), max_examples=100)

# A script's background job ignores SIGINT, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Python's readline, which pytest loads, sets them for the processes that it starts; output without a terminal follows COLUMNS.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# Every plan that a test makes is checked, also on virtual ranks and in the jobs that tests start.
os.environ[validate.ENVIRONMENT_VARIABLE] = "1"

# The first call starts a process, which a test that is not marked `job` may not.
platform.processor()

DEADLINE_SECONDS = float(os.environ.get("HPCTRAIN_TEST_DEADLINE_SECONDS", "30"))

# How long a rank with a failed test waits for the others to end theirs before it ends the job: they may be waiting for it.
_GRACE_SECONDS = min(5.0, DEADLINE_SECONDS)

_PASSED, _SKIPPED, _FAILED = 0, 1, 2
_OUTCOMES = {"passed": _PASSED, "skipped": _SKIPPED, "failed": _FAILED}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection while tests are collected, and exclude the collected tests from later collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session")
def world() -> Communicator:
    """All ranks of the test run (1 without mpiexec), with the tests' deadline."""
    from hpctrain.comm import mpi

    return mpi.world(DEADLINE_SECONDS)


@pytest.fixture(autouse=True, scope="module")
def _own_code_and_garbage() -> Generator[None]:
    """Forget user code that the tests of a module have loaded, because a run records all user code of its process.

    Then collect the garbage of the module, and exclude the remaining objects from later collections. `hpctrain.train` ends with a
    collection, which would take seconds if it visited all tests and the caches of earlier modules.
    """
    files, folders = dict(user_code._files), list(user_code._config_folders)
    yield
    user_code._files.clear()
    user_code._files.update(files)
    user_code._config_folders[:] = folders
    gc.collect()
    gc.freeze()


@pytest.fixture
def progress(world: Communicator) -> ProgressEngine:
    """A progress engine of the test's own, with the tests' deadline."""
    return ProgressEngine(rank=world.rank, deadline_seconds=DEADLINE_SECONDS, abort=world.abort)


class RankAgreement:
    """Makes every rank give a test the same outcome, so that all go on, stop and exit alike."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._waits = ProgressEngine(rank=comm.rank, deadline_seconds=2 * DEADLINE_SECONDS, abort=comm.abort)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when != "teardown":
            self._agree(item.nodeid, report)
        elif report.failed:  # the barrier between tests is past: no rank is there to agree with
            self._end(item.nodeid, report)
        return report

    def _agree(self, name: str, report: pytest.TestReport) -> None:
        outcomes = np.zeros(self._comm.size, np.int64)
        outcomes[self._comm.rank] = _OUTCOMES[report.outcome]
        handle = self._comm.iallgather(None, outcomes, [1] * self._comm.size)
        if report.failed:
            impatient = ProgressEngine(
                rank=self._comm.rank, deadline_seconds=_GRACE_SECONDS, abort=lambda code: self._end(name, report)
            )
            impatient.wait_handle(handle, f"outcome of {name}")
        else:
            self._waits.wait_handle(handle, f"outcome of {name}")
        if len(set(outcomes)) > 1:
            self._make_alike(name, report, outcomes)

    def _make_alike(self, name: str, report: pytest.TestReport, outcomes: np.ndarray) -> None:
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome == _FAILED]
        if report.failed:
            if self._comm.rank != 0 and failed[0] == self._comm.rank:
                self._print(name, report)
            return
        where = f"failed on rank {', '.join(map(str, failed))}" if failed else f"skipped on some ranks only: {outcomes}"
        report.outcome = "failed"
        report.longrepr = f"{where} of {self._comm.size}"

    def _print(self, name: str, report: pytest.TestReport) -> None:
        text = "\n".join([f"[rank {self._comm.rank}] {name} {report.when} failed", report.longreprtext, ""])
        os.write(2, text.encode())  # whole, whatever captures sys.stderr

    def _end(self, name: str, report: pytest.TestReport) -> None:
        self._print(name, report)
        self._comm.abort(1)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Leave together: the first rank to exit with failures aborts the others, which may still be printing."""
        sys.stdout.flush()
        self._waits.wait_handle(self._comm.ibarrier(), "the end of the tests")


class TemporaryDirectories:
    """Make a root for each rank: where ranks share one and pytest tidies up, they remove each other's directories."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        if config.option.basetemp is None:
            root = tempfile.mkdtemp(prefix="hpctrain-tests-")
            config.option.basetemp = os.path.join(root, "base")  # pytest makes it, and insists that it is new
            config.add_cleanup(functools.partial(shutil.rmtree, root, ignore_errors=True))


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the level; with several ranks, see to their directories before pytest does (MPI has not started yet)."""
    sampling.add_option(parser)
    if (detect(os.environ).expected_size or 1) > 1:
        pluginmanager.register(TemporaryDirectories(), "temporary-directories")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Watch who starts processes; with several ranks: silence all but rank 0."""
    hypothesis.settings.load_profile(config.getoption("--level"))
    config.pluginmanager.register(JobMarker(), "job-marker")
    config.pluginmanager.register(sampling.Sampling(config), "sampling")
    config.pluginmanager.register(EmulatedDevices(), "emulated-devices")
    launcher = detect(os.environ)
    if launcher.rank:
        config.pluginmanager.unregister(name="terminalreporter")
        nowhere = Path(os.devnull).open("w")  # noqa: SIM115  as long as the process
        config.add_cleanup(nowhere.close)
        config.pluginmanager.register(pytest.TerminalReporter(config, nowhere), "terminalreporter")


def pytest_sessionstart(session: pytest.Session) -> None:
    """With several ranks: agree on outcomes."""
    if (detect(os.environ).expected_size or 1) > 1:
        from hpctrain.comm import mpi

        comm = mpi.world(DEADLINE_SECONDS)
        assert comm.size > 1, "the launcher started several ranks, but MPI's world has one"
        session.config.pluginmanager.register(RankAgreement(comm), "rank-agreement")


@pytest.fixture(scope="session")
def job() -> Callable[..., Outcome]:
    """Return `hpctrain_testing.run.run_job`; skip the test without mpiexec."""
    if find_mpiexec() is None:
        pytest.skip("there is no mpiexec, neither next to this Python nor on PATH")
    return run_job
