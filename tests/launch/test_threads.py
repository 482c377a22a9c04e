"""Threads per rank: from the cores, the configuration or the user's environment, set where libraries look for them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from hpctrain.errors import LaunchError
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.threads import outnumbers_cores, physical_cores, rank_cores, set_threads, usable_cores
from tests.support.jobs import Outcome, find_mpiexec, run_job

ALONE = Launcher("none")
CORES = physical_cores(os.sched_getaffinity(0))
SHARED = Launcher("MPICH hydra mpiexec", 4 * CORES, 0, 4 * CORES, 0, "PMI_RANK")  # more ranks than cores


@pytest.fixture(autouse=True)
def _keep_this_process_as_it_is(monkeypatch: pytest.MonkeyPatch):
    from threadpoolctl import threadpool_limits

    monkeypatch.setattr("hpctrain.launch.threads.whole_quota", lambda: None)  # whatever limits the tests' own container
    with threadpool_limits(limits=None):
        yield


def test_a_single_process_takes_all_cores() -> None:
    environ: dict[str, str] = {}
    plan = set_threads(ALONE, None, environ)
    assert plan.threads == plan.cores == CORES
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        assert environ[name] == str(CORES)
    assert str(plan).startswith(f"{CORES} thread")


def test_more_ranks_than_cores_have_one_thread_each() -> None:
    assert set_threads(SHARED, None, {}).threads == 1


def test_ranks_that_are_not_bound_share_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(1000, 1012)))
    for local_size, share in ((1, 12), (2, 6), (5, 2), (12, 1), (13, 1)):
        launcher = Launcher("MPICH hydra mpiexec", local_size, 0, local_size, 0, "PMI_RANK")
        assert rank_cores(launcher, {})[0] == share


def test_ranks_that_their_launcher_bound_own_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(1000, 1003 if process == 0 else 1012)))
    launcher = Launcher("MPICH hydra mpiexec", 4, 0, 4, 0, "PMI_RANK")
    assert rank_cores(launcher, {}) == (3, "bound to 3 of the node's cores by MPICH hydra mpiexec")


SRUN = Launcher("Slurm srun", 8, 0, 4, 0, "SLURM_PROCID")


def _cpus(monkeypatch: pytest.MonkeyPatch, mine: int, launchers: int = 64) -> None:
    """This rank may run on so many CPUs, its launcher on so many."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(1000, 1000 + (launchers if process else mine))))


@pytest.mark.parametrize(("kind", "share"), [("mask_cpu:", 4), ("cores", 4), ("none", 1), (None, 1)])
def test_srun_says_whether_it_binds(monkeypatch: pytest.MonkeyPatch, kind: str | None, share: int) -> None:
    _cpus(monkeypatch, 4)
    environ = {} if kind is None else {"SLURM_CPU_BIND_TYPE": kind}
    assert rank_cores(SRUN, environ)[0] == share


def test_srun_that_cannot_bind_says_that_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Slurm has no plugin for it, the variable is as asked for, and the ranks run on all cores."""
    _cpus(monkeypatch, 64)
    assert rank_cores(SRUN, {"SLURM_CPU_BIND_TYPE": "cores"}) == (16, "4 ranks share 64 cores")


@pytest.mark.parametrize(
    ("mine", "kind", "asked", "cores", "reason"),
    [
        (64, "none", "8", 8, "SLURM_CPUS_PER_TASK is 8"),  # not bound
        (64, "cores", "8", 8, "SLURM_CPUS_PER_TASK is 8"),  # nobody there who binds
        (32, "none", "8", 8, "4 ranks share 32 cores"),  # a job of this size, confined as a whole
        (8, "cores", "8", 8, "bound to 8 of the node's cores by Slurm srun"),
        (16, "sockets", "8", 8, "SLURM_CPUS_PER_TASK is 8"),  # bound to more than its own
        (1, "cores", "8", 1, "bound to 1 of .* although SLURM_CPUS_PER_TASK is 8: give --cpus-per-task to srun, too"),
        (64, "none", "", 16, "4 ranks share 64 cores"),
        (64, "none", "0", 16, "4 ranks share 64 cores"),
    ],
)
def test_a_rank_takes_the_cores_that_slurm_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, mine: int, kind: str, asked: str, cores: int, reason: str
) -> None:
    _cpus(monkeypatch, mine)
    environ = {"SLURM_CPU_BIND_TYPE": kind, "SLURM_CPUS_PER_TASK": asked}
    number, text = rank_cores(SRUN, environ)
    assert number == cores
    assert re.search(reason, text)
    assert set_threads(SRUN, None, environ).threads == cores


def test_a_task_of_its_own_node_takes_what_slurm_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _cpus(monkeypatch, 64)
    alone = Launcher("Slurm srun", 2, 0, 1, 0, "SLURM_PROCID")
    assert rank_cores(alone, {"SLURM_CPUS_PER_TASK": "12"})[0] == 12
    assert rank_cores(alone, {})[0] == 64


def test_another_launcher_inside_of_a_slurm_job_divides_the_cores_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    _cpus(monkeypatch, 64)
    hydra = Launcher("MPICH hydra mpiexec", 4, 0, 4, 0, "PMI_RANK")
    assert rank_cores(hydra, {"SLURM_CPUS_PER_TASK": "2"})[0] == 16


def test_hardware_threads_that_slurm_counts_are_not_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    _cpus(monkeypatch, 64)
    monkeypatch.setattr("hpctrain.launch.threads.physical_cores", lambda cpus: len(set(cpus)) // 2)
    assert rank_cores(SRUN, {"SLURM_CPUS_PER_TASK": "8"})[0] == 4


def test_the_users_variable_is_respected_and_said() -> None:
    environ = {"OMP_NUM_THREADS": "3,2", "MKL_NUM_THREADS": "1"}
    plan = set_threads(ALONE, None, environ)
    assert plan.threads == 3
    assert environ["OMP_NUM_THREADS"] == "3,2"
    assert environ["MKL_NUM_THREADS"] == "1"
    assert environ["OPENBLAS_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS was set" in str(plan)
    assert ("share cores" in str(plan)) == (CORES < 3)


@pytest.mark.parametrize("text", ["", "many", "0", "-2"])
def test_a_variable_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"OMP_NUM_THREADS is .* must be a number"):
        set_threads(ALONE, None, {"OMP_NUM_THREADS": text})


def test_the_configuration_comes_before_the_variable() -> None:
    environ = {"OMP_NUM_THREADS": "7"}
    assert set_threads(ALONE, 1, environ).threads == 1
    assert environ["OMP_NUM_THREADS"] == environ["OPENBLAS_NUM_THREADS"] == "1"


@pytest.mark.parametrize("requested", [0, -1, CORES + 1])
def test_more_threads_than_cores_are_refused(requested: int) -> None:
    environ: dict[str, str] = {}
    with pytest.raises(LaunchError, match=f"threads: {requested} does not fit: .* at most {CORES} "):
        set_threads(ALONE, requested, environ)
    assert environ == {}
    with pytest.raises(LaunchError, match="at most 1 thread "):
        set_threads(SHARED, 2, {})


@pytest.mark.parametrize(
    ("quota", "ranks", "cores"), [(None, 1, 12), (12, 1, 12), (5, 1, 5), (1, 1, 1), (6, 4, 1), (6, 2, 3), (100, 4, 3)]
)
def test_ranks_share_the_processor_time_that_control_groups_allow(
    monkeypatch: pytest.MonkeyPatch, quota: int | None, ranks: int, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(1000, 1012)))
    monkeypatch.setattr("hpctrain.launch.threads.whole_quota", lambda: quota)
    launcher = Launcher("MPICH hydra mpiexec", ranks, 0, ranks, 0, "PMI_RANK")
    found, reason = rank_cores(launcher, {})
    assert found == cores
    assert ("a control group allows the time of" in reason) is (quota is not None and quota // ranks < 12 // ranks)
    assert outnumbers_cores(launcher) is (quota is not None and ranks > quota)
    assert usable_cores(range(1000, 1012)) == min(12, quota or 12)
    if cores == 1:
        with pytest.raises(LaunchError, match="a control group allows the time of"):
            set_threads(launcher, 2, {})


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert physical_cores({0, 2}, tmp_path) == 1
    assert physical_cores({0, 1, 7}, tmp_path) == 3  # unknown ones count


_PROGRAM = """
import os, sys
for name in [name for name in os.environ if name.endswith("_NUM_THREADS")]:
    del os.environ[name]
from hpctrain.launch.launcher import detect
from hpctrain.launch.threads import set_threads
plan = set_threads(detect(os.environ), None)
assert "numpy" not in sys.modules
import numpy
from threadpoolctl import threadpool_info
assert all(pool["num_threads"] == plan.threads for pool in threadpool_info()), threadpool_info()
print(str(plan) + "\\n", end="", flush=True)
"""


def _lines(outcome: Outcome) -> list[str]:
    assert outcome.code == 0, outcome.output
    return outcome.stdout.splitlines()


@pytest.mark.job
def test_numpys_pools_have_the_planned_size() -> None:
    assert _lines(run_job(0, ["-c", _PROGRAM]))[0].startswith(f"{CORES} thread")


@pytest.mark.job
@pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec, neither beside this Python nor on PATH")
def test_ranks_of_a_real_launcher_share_the_cores() -> None:
    lines = _lines(run_job(CORES + 1, ["-c", _PROGRAM]))
    assert len(lines) == CORES + 1
    assert all(line.startswith("1 thread per rank") for line in lines)


@pytest.mark.parametrize(("ranks", "mine", "expected"), [(8, 8, False), (9, 8, True), (64, 8, True), (64, 1, False)])
def test_ranks_outnumber_cores_that_they_share(monkeypatch: pytest.MonkeyPatch, ranks: int, mine: int, expected: bool) -> None:
    """A rank that its launcher has bound owns its cores, however few of the node's they are."""
    _cpus(monkeypatch, mine, launchers=8)
    assert outnumbers_cores(Launcher("MPICH hydra mpiexec", ranks, 0, ranks, 0, "PMI_RANK")) is expected
