"""Launchers and sizes of the world, judged from made-up facts."""

from __future__ import annotations

import os

import pytest

from hpctrain.doctor.findings import Severity
from hpctrain.doctor.subjects import launcher
from hpctrain.doctor.subjects.launcher import LauncherFacts
from hpctrain.launch.launcher import Launcher
from tests.support.doctored import keys, view

OWN = LauncherFacts("/venv/bin/mpiexec")
NONE = LauncherFacts("")


@pytest.mark.parametrize(
    ("by", "facts", "mend"),
    [
        (Launcher("Open MPI mpiexec", 4, 0), OWN, "/venv/bin/mpiexec -n 4 python -m mpi4py"),
        (Launcher("Open MPI mpiexec", 4, 0), NONE, "mpi-lib-version"),
        (Launcher("Slurm srun", 4, 0), OWN, "srun --mpi=pmi2"),
    ],
)
def test_processes_that_are_each_alone_are_named_with_their_number(by: Launcher, facts: LauncherFacts, mend: str) -> None:
    [found] = launcher.judge(view(1, launcher=by), [facts])
    assert (found.key, found.severity) == ("singletons", Severity.FAULT)
    assert f"{by.name} has started 4 processes, and each is rank 0 of 1" in found.sentence
    assert mend in found.mend


def test_a_world_of_another_size_than_wanted_is_named() -> None:
    by = Launcher("MPICH hydra mpiexec", 3, 0, overruled_size=2)
    [found] = launcher.judge(view(2, launcher=by), [OWN] * 2)
    assert (found.key, found.mend) == ("world-size", "Start as many as HPCTRAIN_EXPECT_RANKS says, or unset it.")
    alone = Launcher("none", 3)
    assert keys(launcher.judge(view(1, launcher=alone), [OWN])) == ["world-size"]


def test_processes_side_by_side_without_a_launcher_are_named() -> None:
    [found] = launcher.judge(view(1, launcher=Launcher("none")), [LauncherFacts("/venv/bin/mpiexec", 5)])
    assert found.key == "singletons"
    assert found.mend.startswith("/venv/bin/mpiexec -n 5 ")


def test_one_process_is_a_remark_and_a_job_is_well() -> None:
    assert keys(launcher.judge(view(1, launcher=Launcher("none")), [OWN])) == ["alone"]
    [found] = launcher.judge(view(2, 2), [OWN] * 4)
    assert (found.key, found.sentence) == ("", "4 ranks on 2 nodes, started by MPICH hydra mpiexec.")
    assert launcher.judge(view(1), [OWN])[0].sentence == "1 rank on 1 node, started by MPICH hydra mpiexec."


@pytest.mark.parametrize(
    ("name", "library", "wrong"),
    [
        ("Open MPI mpiexec", "MPICH Version: 5.0.2", True),
        ("MPICH hydra mpiexec", "Open MPI v5.0.11", True),
        ("Cray PALS mpiexec", "Open MPI v5.0.11", True),
        ("Open MPI mpiexec", "Open MPI v5.0.11", False),
        ("Intel MPI mpiexec", "MPICH Version: 5.0.2", False),
        ("Slurm srun", "Open MPI v5.0.11", False),
        ("Open MPI mpiexec", "", False),
    ],
)
def test_a_launcher_of_another_mpi_is_known_by_names(name: str, library: str, wrong: bool) -> None:
    found = launcher.wrong_launcher(Launcher(name, 4, 0), library, "/venv/bin/mpiexec")
    assert (found is not None) == wrong
    if found is not None:
        assert found.mend == "/venv/bin/mpiexec -n 4 python -m mpi4py -m hpctrain ..."
        general = launcher.wrong_launcher(Launcher(name, 4, 0), library, "")
        assert general is not None
        assert general.mend == launcher.WRONG_LAUNCHER.remedy


def test_this_process_has_no_siblings_of_its_command() -> None:
    assert launcher._siblings(os.getpid()) == [] or "PYTEST_XDIST_WORKER" in os.environ
    assert launcher._parent(os.getpid()) == os.getppid()
    assert launcher._parent(2**22 + 1) is None
    assert launcher._words(2**22 + 1) is None
