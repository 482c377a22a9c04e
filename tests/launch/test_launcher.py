"""Launchers by their environment, and the refusal of a world that is not what was asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.errors import LaunchError
from hpctrain.launch.launcher import (
    Launcher,
    check_world,
    detect,
    environment_fault,
    expand_counts,
    keeps_job_of_lost_ranks,
    lone_fault,
    may_overlook_exit_codes,
    without_launcher,
)

HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "1"}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_NTASKS": "9",
    "SLURM_PROCID": "6",
    "SLURM_NODEID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "9", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
PALS = {"PALS_RANKID": "9", "PALS_LOCAL_SIZE": "6", "PALS_LOCAL_RANKID": "3", "PMI_SIZE": "12", "PMI_RANK": "9"}


@pytest.mark.parametrize(
    ("environ", "name", "numbers"),
    [
        ({}, "none", (None, None, None, None)),
        (HYDRA, "MPICH hydra mpiexec", (8, 5, 4, 1)),
        (HYDRA | {"I_MPI_INFO_NP": "4"}, "Intel MPI mpiexec", (8, 5, 4, 1)),
        (OPEN_MPI, "Open MPI mpiexec", (3, 2, 2, 1)),
        (PALS, "Cray PALS mpiexec", (12, 9, 6, 3)),
        (SLURM, "Slurm srun", (7, 6, 1, 0)),
        (SLURM | {"PMI_RANK": "6", "PMI_SIZE": "7"}, "Slurm srun", (7, 6, 1, 0)),
        ({k: v for k, v in SLURM.items() if "STEP_NUM" not in k and "STEP_TASKS" not in k}, "Slurm srun", (9, 6, None, 0)),
        # a process started by hand or by another launcher inside a Slurm job
        (BATCH_SCRIPT, "none", (None, None, None, None)),
        (SLURM | {"SLURM_STEP_ID": "4294967290"}, "none", (None, None, None, None)),
        (BATCH_SCRIPT | HYDRA, "MPICH hydra mpiexec", (8, 5, 4, 1)),
        (SLURM | OPEN_MPI, "Open MPI mpiexec", (3, 2, 2, 1)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "a PMI launcher", (2, 1, None, None)),
        ({"OMPI_COMM_WORLD_SIZE": "many"}, "Open MPI mpiexec", (None, None, None, None)),
    ],
)
def test_each_launcher_is_known_by_its_variables(environ: dict, name: str, numbers: tuple) -> None:
    launcher = detect(environ)
    assert launcher.name == name
    assert (launcher.expected_size, launcher.rank, launcher.local_size, launcher.local_rank) == numbers


@pytest.mark.parametrize("environ", [{}, HYDRA, SLURM, OPEN_MPI])
def test_the_users_word_overrules(environ: dict) -> None:
    assert detect(environ | {"HPCTRAIN_EXPECT_RANKS": "64"}).expected_size == 64


@pytest.mark.parametrize(
    ("environ", "starts"),
    [
        ({}, False),
        (BATCH_SCRIPT, False),
        ({"HPCTRAIN_EXPECT_RANKS": "1"}, False),
        ({"HPCTRAIN_EXPECT_RANKS": "2"}, True),  # by a launcher that nobody here knows
        (HYDRA, True),
        (HYDRA | {"HPCTRAIN_EXPECT_RANKS": "1"}, True),
    ],
)
def test_mpi_starts_where_anything_says_that_there_are_ranks(environ: dict, starts: bool) -> None:
    assert detect(environ).starts_mpi is starts


@pytest.mark.parametrize("text", ["", "0", "-1", "four", "2.0"])
def test_a_user_who_does_not_give_a_number_is_told(text: str) -> None:
    with pytest.raises(LaunchError, match=r"HPCTRAIN_EXPECT_RANKS is .* the smallest is 1"):
        detect({"HPCTRAIN_EXPECT_RANKS": text})


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2,3(x2)", [1, 2, 3, 3]), ("", []), ("2(x", []), ("a,1", [])]
)
def test_counts_per_node(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


def test_the_size_asked_for_passes() -> None:
    check_world(detect(HYDRA), 8)
    check_world(detect({}), 1)
    check_world(detect({"OMPI_COMM_WORLD_SIZE": "many"}), 3)  # unknown: nothing to compare with


@pytest.mark.parametrize(
    ("launcher", "size", "parts"),
    [
        (detect(HYDRA), 1, ("MPICH hydra mpiexec was asked for 8 ranks", "MPI's world has 1", "linked to another MPI")),
        (detect(SLURM), 1, ("Slurm srun was asked for 7", "world has 1", "--mpi=")),
        (detect(OPEN_MPI | {"HPCTRAIN_EXPECT_RANKS": "4"}), 3, ("EXPECT_RANKS asks for 4 ranks", "mpiexec has started 3;")),
        (detect(HYDRA | {"HPCTRAIN_EXPECT_RANKS": "2"}), 8, ("HPCTRAIN_EXPECT_RANKS asks for 2 ranks, but MPICH", "started 8;")),
        (detect(HYDRA | {"PMI_SIZE": "1", "HPCTRAIN_EXPECT_RANKS": "2"}), 1, ("RANKS asks for 2 ranks, but MPICH", "started 1;")),
        (Launcher("none", 4), 1, ("asks for 4 ranks", "without an MPI launcher", "mpiexec -n 4")),
    ],
)
def test_another_size_is_refused_with_its_cause(launcher: Launcher, size: int, parts: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError) as caught:
        check_world(launcher, size)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("library", "advice"),
    [
        ("MPICH Version: 5.0.2, thread level serialized", "MPICH needs `srun --mpi=pmi2`"),
        ("Open MPI v5.0.11, thread level serialized", "Open MPI needs `srun --mpi=pmix`"),
        ("MPI VERSION : CRAY MPICH version 8.1.28.2", "Cray MPICH needs `srun --mpi=cray_shasta`"),
        ("", "pmi2 for MPICH and pmix for Open MPI"),
    ],
)
def test_ranks_that_srun_left_alone_are_told_the_option_of_their_mpi(library: str, advice: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(advice)) as caught:
        check_world(detect(SLURM), 1, library)
    assert "MPI in jobs/slurm.sbatch" in str(caught.value)


@pytest.mark.job
def test_neither_numpy_nor_mpi_is_imported() -> None:
    modules = "hpctrain.launch.launcher, hpctrain.launch.threads"
    program = f"import sys, {modules}; print(*[m for m in ('numpy', 'mpi4py') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == ""


def _root(tmp_path: Path, listening: int = 39519) -> Path:
    """Return the root of a file system with a socket at descriptor 9, a file at 8, and one port that listens."""
    (tmp_path / "proc/self/fd").mkdir(parents=True)
    (tmp_path / "proc/self/fd/9").symlink_to("socket:[1]")
    (tmp_path / "proc/self/fd/8").symlink_to("/some/file")
    (tmp_path / "proc/net").mkdir()
    rows = [f"0: 0100007F:{listening:04X} 00000000:0000 0A 0", "1: 0100007F:0FA0 0100007F:9A5F 01 0"]
    (tmp_path / "proc/net/tcp").write_text("\n".join(["sl local_address rem_address st", *rows]) + "\n")
    return tmp_path


_URI = "PMIX_SERVER_URI41"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (HYDRA | {"PMI_FD": "77"}, "PMI_FD is 77, but no such descriptor is open: the variables of MPICH hydra mpiexec"),
        (HYDRA | {"PMI_FD": "8"}, "this descriptor is /some/file, no socket"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "77"}, "unset PMI_FD PMI_RANK PMI_SIZE"),
        (SLURM | {"PMI_RANK": "6", "PMI_SIZE": "7", "PMI_FD": "77"}, "the variables of Slurm srun are left over"),
        (HYDRA, "PMI_RANK is set, but neither PMI_FD nor PMI_PORT"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_PORT": "localhost:4000"}, "PMI_PORT names port 4000, where nothing listens"),
        (OPEN_MPI | {_URI: "prte@0.0;tcp4://127.0.0.1:4000"}, f"{_URI} names port 4000, where nothing listens"),
    ],
)
def test_variables_of_a_launcher_that_is_gone_are_told(tmp_path: Path, environ: dict, words: str) -> None:
    fault = environment_fault(environ, _root(tmp_path))
    assert fault is not None
    assert words in fault
    assert "start it by a launcher" in fault
    assert fault.endswith(".")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH_SCRIPT,
        SLURM,
        PALS,
        OPEN_MPI,
        HYDRA | {"PMI_FD": "9"},
        HYDRA | {"PMI_PORT": "node7:4000"},  # another node's
        HYDRA | {"PMI_SIZE": "1"},
        OPEN_MPI | {_URI: "prte@0.0;tcp4://127.0.0.1:39519"},
        OPEN_MPI | {_URI: "prte@0.0;tcp4://127.0.0.1:4000", "PMIX_SERVER_URI2": "prte@0.0;tcp4://127.0.0.1:39519"},
        OPEN_MPI | {_URI: "prte@0.0;/tmp/socket"},
        {"PMI_RANK": "1", "PMI_SIZE": "2", "FLUX_URI": "local:///x"},
    ],
)
def test_ranks_of_a_launcher_that_is_there_are_not(tmp_path: Path, environ: dict) -> None:
    assert environment_fault(environ, _root(tmp_path)) is None


def test_one_process_of_a_job_of_several_is_told(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\na\nb\n")
    (tmp_path / "host").write_text("a\na\n")
    pbs = {"PBS_JOBID": "1", "PBS_NODEFILE": str(tmp_path / "hosts")}
    several = [BATCH_SCRIPT, {"SLURM_NTASKS": "8"}, {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "2"}, pbs]
    for environ in several:
        fault = lone_fault(detect(environ), environ)
        assert fault is not None
        assert "is the only rank; start it as" in fault
        assert lone_fault(detect(environ), environ | {"HPCTRAIN_EXPECT_RANKS": "1"}) is None
    alone = [{}, {"SLURM_NTASKS": "1"}, {"PBS_NODEFILE": "x"}, pbs | {"PBS_NODEFILE": str(tmp_path / "host")}]
    for environ in (*alone, pbs | {"PBS_NODEFILE": "/nowhere"}, SLURM, BATCH_SCRIPT | HYDRA, SLURM | OPEN_MPI):
        assert lone_fault(detect(environ), environ) is None


def test_only_fault_tolerant_launchers_keep_a_job_that_has_lost_a_rank() -> None:
    assert keeps_job_of_lost_ranks({"OMPI_MCA_mpi_ft_enable": "1"})
    assert not keeps_job_of_lost_ranks({"OMPI_MCA_mpi_ft_enable": "0"})
    assert not keeps_job_of_lost_ranks({"OMPI_COMM_WORLD_SIZE": "4"})


def test_hydra_and_fault_tolerant_launchers_may_overlook_exit_codes() -> None:
    assert may_overlook_exit_codes({"OMPI_MCA_mpi_ft_enable": "1"})
    assert may_overlook_exit_codes({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "2"})
    assert may_overlook_exit_codes({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "2", "I_MPI_INFO_NP": "2"})
    assert not may_overlook_exit_codes({"OMPI_COMM_WORLD_SIZE": "4"})
    assert not may_overlook_exit_codes({})


def test_no_launchers_variable_is_left() -> None:
    environ = {"PMI_RANK": "0", "PMIX_ID": "1", "OMPI_X": "2", "SLURM_JOB_ID": "3", "PATH": "p", "MPICH_X": "4"}
    assert without_launcher(environ) == {"PATH": "p", "MPICH_X": "4"}
