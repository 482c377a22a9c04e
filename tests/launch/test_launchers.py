"""Launchers and threads of ranks by their environment, and the training in a command line."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.core.errors import LaunchError
from hpctrain.launch.launcher import (
    Launcher,
    check_world,
    detect,
    environment_fault,
    expand_counts,
    lone_fault,
    may_overlook_exit_codes,
    without_launcher,
)
from hpctrain.launch.supervisor import TrainCommand
from hpctrain.launch.threads import NodeLoad, node_load, outnumbers_cores, physical_cores, rank_cores, set_threads, usable_cores
from hpctrain.process.rank import RankProcess
from hpctrain_testing.run import Outcome, find_mpiexec, run_job

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


@pytest.mark.parametrize(
    ("environ", "starts"),
    [
        ({}, False),
        (BATCH_SCRIPT, False),
        ({"HPCTRAIN_EXPECT_RANKS": "1"}, False),
        ({"HPCTRAIN_EXPECT_RANKS": "2"}, True),  # by an unknown launcher
        (HYDRA, True),
        (HYDRA | {"HPCTRAIN_EXPECT_RANKS": "1"}, True),
    ],
)
def test_mpi_starts_where_anything_says_that_there_are_ranks(environ: dict, starts: bool) -> None:
    assert detect(environ).starts_mpi is starts


@pytest.mark.parametrize("text", ["", "0", "-1", "four", "2.0"])
def test_a_user_who_does_not_give_a_number_sees_an_error(text: str) -> None:
    with pytest.raises(LaunchError, match=r"HPCTRAIN_EXPECT_RANKS is .*, but must be an integer of at least 1"):
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
        (detect(OPEN_MPI | {"HPCTRAIN_EXPECT_RANKS": "4"}), 3, ("EXPECT_RANKS is 4", "mpiexec has started 3 ranks;")),
        (detect(HYDRA | {"HPCTRAIN_EXPECT_RANKS": "2"}), 8, ("HPCTRAIN_EXPECT_RANKS is 2, but MPICH", "started 8 ranks;")),
        (detect(HYDRA | {"PMI_SIZE": "1", "HPCTRAIN_EXPECT_RANKS": "2"}), 1, ("RANKS is 2, but MPICH", "started 1 rank;")),
        (Launcher("none", 4), 1, ("is 4", "no MPI launcher known", "mpiexec -n 4")),
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
def test_ranks_that_srun_left_alone_name_the_option_of_their_mpi(library: str, advice: str) -> None:
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
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_PORT": "localhost:4000"},
            "PMI_PORT names port 4000, on which no server listens",
        ),
        (OPEN_MPI | {_URI: "prte@0.0;tcp4://127.0.0.1:4000"}, f"{_URI} names port 4000, on which no server listens"),
    ],
)
def test_variables_of_a_launcher_that_is_gone_are_reported(tmp_path: Path, environ: dict, words: str) -> None:
    fault = environment_fault(environ, _root(tmp_path))
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
def test_ranks_of_a_known_launcher_are_no_fault(tmp_path: Path, environ: dict) -> None:
    assert environment_fault(environ, _root(tmp_path)) is None


def test_one_process_of_a_job_of_several_is_reported(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\na\nb\n")
    (tmp_path / "host").write_text("a\na\n")
    pbs = {"PBS_JOBID": "1", "PBS_NODEFILE": str(tmp_path / "hosts")}
    several = [BATCH_SCRIPT, {"SLURM_NTASKS": "8"}, {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "2"}, pbs]
    several += [{"RANK": "1", "WORLD_SIZE": "3"}, {"HOROVOD_SIZE": "2"}]
    for environ in several:
        fault = lone_fault(detect(environ), environ)
        assert fault is not None
        assert "is the only rank; start it as" in fault
        assert lone_fault(detect(environ), environ | {"HPCTRAIN_EXPECT_RANKS": "1"}) is None
    alone = [{}, {"SLURM_NTASKS": "1"}, {"PBS_NODEFILE": pbs["PBS_NODEFILE"]}, pbs | {"PBS_NODEFILE": str(tmp_path / "host")}]
    torchrun = [{"RANK": "0", "WORLD_SIZE": "1"}, SLURM | {"WORLD_SIZE": "7"}, HYDRA | {"WORLD_SIZE": "2"}]
    for environ in (*alone, *torchrun, pbs | {"PBS_NODEFILE": "/nowhere"}, SLURM, BATCH_SCRIPT | HYDRA, SLURM | OPEN_MPI):
        assert lone_fault(detect(environ), environ) is None


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "HOROVOD_SIZE", "PADDLE_TRAINERS_NUM"])
def test_copies_of_a_launcher_without_mpi_are_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs refuse them, too, although they only warn of a lone process in an allocation."""
    for name in set(os.environ) - set(without_launcher(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, "3")
    with pytest.raises(LaunchError, match=f"{variable} is 3, .* start it as `mpiexec -n 3"):
        RankProcess().start_world(10.0)
    monkeypatch.setenv(variable, "1")
    assert RankProcess().start_world(10.0).size == 1


@pytest.mark.job
@pytest.mark.parametrize(("threads", "launcher"), [(2, Launcher("none")), (1, detect(HYDRA)), (1, Launcher("none"))])
def test_a_process_forked_after_threads_or_mpi_refuses_to_train(
    threads: int, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent may continue to train. A child whose parent had one thread, or had not trained yet, may train as well."""
    monkeypatch.setattr("hpctrain.launch.threads._started_in", set())
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr("threadpoolctl.threadpool_limits", lambda limits: None)

    def refused_in_child() -> bool:
        child = os.fork()
        if not child:
            try:
                RankProcess(launcher)
                os._exit(0)
            except LaunchError as error:
                os._exit(1 if "spawn" in str(error) else 2)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1

    assert not refused_in_child()
    set_threads(launcher, threads, {})
    assert refused_in_child() == (threads > 1 or launcher.starts_mpi)
    RankProcess(launcher)


def test_hydra_may_overlook_exit_codes() -> None:
    assert may_overlook_exit_codes({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "2"})
    assert may_overlook_exit_codes({"MPI_LOCALNRANKS": "2", "PMI_SIZE": "2", "I_MPI_INFO_NP": "2"})
    assert not may_overlook_exit_codes({"OMPI_COMM_WORLD_SIZE": "4"})
    assert not may_overlook_exit_codes({})


def test_no_launchers_variable_is_left() -> None:
    environ = {"PMI_RANK": "0", "PMIX_ID": "1", "OMPI_X": "2", "SLURM_JOB_ID": "3", "PATH": "p", "MPICH_X": "4"}
    assert without_launcher(environ) == {"PATH": "p", "MPICH_X": "4"}


ALONE = Launcher("none")
CORES = physical_cores(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def thread_pools_stay(monkeypatch: pytest.MonkeyPatch):
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


@pytest.mark.parametrize("others", [0, 3])
def test_a_team_sleeps_early_on_a_busy_node_unless_the_user_decides(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.launch.threads.node_load", lambda launcher, threads: NodeLoad(others, 1, threads, 2))
    for chosen in ({}, {"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}):
        environ = dict(chosen)
        set_threads(ALONE, 1, environ, measures=True)
        found = {name: environ[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in environ}
        assert found == (chosen or ({"GOMP_SPINCOUNT": "1000"} if others else {}))


@pytest.mark.parametrize("others", [0, 1, 3, 9])
def test_a_lone_process_leaves_busy_cores_to_other_programs(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if it chooses its number and may use all cores: other programs may have other cores; ranks have equal numbers."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(1000, 1004)))
    monkeypatch.setattr("hpctrain.launch.threads.node_load", lambda launcher, threads: NodeLoad(others, 1, threads, 4))
    plan = set_threads(ALONE, None, {}, measures=True)
    assert plan.threads == max(1, 4 - others)
    assert ("other programs" in str(plan)) is (others > 0)
    assert [set_threads(ALONE, *given, measures=True).threads for given in ((3, {}), (None, {"OMP_NUM_THREADS": "3"}))] == [3, 3]
    assert set_threads(Launcher("MPICH hydra mpiexec", 1, 0, 1, 0, "PMI_RANK"), None, {}, measures=True).threads == 4
    monkeypatch.setattr("hpctrain.launch.threads.node_load", lambda launcher, threads: NodeLoad(others, 1, threads, 64))
    assert set_threads(ALONE, None, {}, measures=True).threads == 4


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
    """Let this rank run on `mine` CPUs, and its launcher on `launchers`."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(1000, 1000 + (launchers if process else mine))))


_ASKED = "SLURM_CPUS_PER_TASK is 8"


@pytest.mark.parametrize(
    ("mine", "kind", "asked", "cores", "reason"),
    [
        (4, "mask_cpu:", "", 4, "bound"),
        (4, "cores", "", 4, "bound"),
        (4, "none", "", 1, ""),
        (4, None, "", 1, ""),
        (64, "cores", "", 16, "^4 ranks share 64 cores$"),  # without a plugin the variable is as asked for, and nothing is bound
        (64, "none", "8", 8, _ASKED),  # not bound
        (64, "cores", "8", 8, _ASKED),  # nothing there that binds
        (32, "none", "8", 8, "4 ranks share 32 cores"),  # a job of this size, confined as a whole
        (8, "cores", "8", 8, "bound to 8 of the node's cores by Slurm srun"),
        (16, "sockets", "8", 8, _ASKED),  # bound to more than its own
        (1, "cores", "8", 1, f"bound to 1 of .* although {_ASKED}: pass --cpus-per-task to srun as well"),
        (64, "none", "", 16, "4 ranks share 64 cores"),
        (64, "none", "0", 16, "4 ranks share 64 cores"),
    ],
)
def test_a_rank_takes_the_cores_that_slurm_was_asked_for(
    monkeypatch, mine: int, kind: str | None, asked: str, cores: int, reason: str
):
    _cpus(monkeypatch, mine)
    environ = {"SLURM_CPUS_PER_TASK": asked} | ({} if kind is None else {"SLURM_CPU_BIND_TYPE": kind})
    number, text = rank_cores(SRUN, environ)
    assert number == cores
    assert re.search(reason, text)
    assert set_threads(SRUN, None, environ).threads == cores


def test_a_task_alone_on_its_node_takes_what_it_asked_for_and_another_launcher_divides_the_cores(monkeypatch) -> None:
    _cpus(monkeypatch, 64)
    alone, hydra = Launcher("Slurm srun", 2, 0, 1, 0, "SLURM_PROCID"), Launcher("MPICH hydra mpiexec", 4, 0, 4, 0, "PMI_RANK")
    assert (rank_cores(alone, {"SLURM_CPUS_PER_TASK": "12"})[0], rank_cores(alone, {})[0]) == (12, 64)
    assert rank_cores(hydra, {"SLURM_CPUS_PER_TASK": "2"})[0] == 16


def test_hardware_threads_that_slurm_counts_are_not_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    _cpus(monkeypatch, 64)
    monkeypatch.setattr("hpctrain.launch.threads.physical_cores", lambda cpus: len(set(cpus)) // 2)
    assert rank_cores(SRUN, {"SLURM_CPUS_PER_TASK": "8"})[0] == 4


def test_the_users_variable_is_respected_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _cpus(monkeypatch, 4)
    environ = {"OMP_NUM_THREADS": "3,2", "MKL_NUM_THREADS": "1"}
    plan = set_threads(ALONE, None, environ)
    assert (plan.threads, environ["OMP_NUM_THREADS"], environ["MKL_NUM_THREADS"]) == (3, "3,2", "1")
    assert environ["OPENBLAS_NUM_THREADS"] == "3"
    assert str(plan) == "3 threads per rank (OMP_NUM_THREADS was set; 1 rank on 4 cores)"


@pytest.mark.parametrize("text", ["", "many", "0", "-2"])
def test_a_variable_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"OMP_NUM_THREADS is .* set OMP_NUM_THREADS to .*, or unset it"):
        set_threads(ALONE, None, {"OMP_NUM_THREADS": text})


def test_the_configuration_comes_before_the_variable() -> None:
    environ = {"OMP_NUM_THREADS": "7"}
    assert set_threads(ALONE, 1, environ).threads == 1
    assert environ["OMP_NUM_THREADS"] == environ["OPENBLAS_NUM_THREADS"] == "1"


@pytest.mark.parametrize("requested", [0, -1, 5])
def test_more_threads_than_cpus_are_refused(monkeypatch: pytest.MonkeyPatch, requested: int) -> None:
    _cpus(monkeypatch, 4)
    environ: dict[str, str] = {}
    rule = "but a rank here may run on 4 CPUs .*set threads to a number from 1 to 4, or to auto"
    with pytest.raises(LaunchError, match=f"threads is {requested}, {rule}"):
        set_threads(ALONE, requested, environ)
    assert environ == {}


def test_one_rule_for_the_key_and_for_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key `threads` and the variable OMP_NUM_THREADS have the same range, also if ranks share cores."""
    _cpus(monkeypatch, 2, 2)
    two = Launcher("MPICH hydra mpiexec", 2, 0, 2, 0, "PMI_RANK")
    turns = "2 threads per rank, which take turns on 1 core, so a step takes longer"
    assert str(set_threads(two, 2, {})) == f"{turns} (as configured; 2 ranks share 2 cores)"
    assert str(set_threads(two, None, {"OMP_NUM_THREADS": "2"})) == f"{turns} (OMP_NUM_THREADS was set; 2 ranks share 2 cores)"
    for requested, environ in ((3, {}), (None, {"OMP_NUM_THREADS": "3"})):
        with pytest.raises(LaunchError, match="may run on 2 CPUs"):
            set_threads(two, requested, environ)


@pytest.mark.parametrize(
    ("average", "running", "threads", "others", "busy"),
    [
        ("0.20", 9, 0, 8, True),  # 0: a process that is alone, with 2 threads
        ("8.10", 1, 0, 0, False),
        ("8.10", 9, 2, 8, True),
        ("8.10", 2, 2, 1, True),  # most of them have ended or wait for a disk
        ("2.90", 1, 2, 0, False),  # the load of a training that has ended a moment ago
        ("0.20", 9, 2, 0, False),  # programs that have just started, such as other ranks of this node
        ("1.00", 2, 1, 1, False),  # a core for each
        ("nothing", 1, 1, None, False),
    ],
)
def test_the_load_of_other_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, average: str, running: int, threads: int, others: int | None, busy: bool
) -> None:
    """The load average includes a training that has just ended, and the count includes ranks that are starting."""
    monkeypatch.setattr("hpctrain.launch.threads.physical_cores", lambda cpus: 2)
    (tmp_path / "loadavg").write_text(f"{average} 1.00 1.00 {running}/80 11\n")
    launcher = Launcher("MPICH hydra mpiexec", 2, 0, 1, 0, "PMI_RANK") if threads else ALONE
    load = node_load(launcher, threads or 2, tmp_path)
    assert (None if load is None else load.others) == others
    assert (load is not None and load.is_busy) == busy
    if busy:
        assert load is not None
        assert "set threads to 1" in load.advice()


@pytest.mark.parametrize(
    ("quota", "ranks", "cores"), [(None, 1, 12), (12, 1, 12), (5, 1, 5), (1, 1, 1), (6, 4, 1), (6, 2, 3), (100, 4, 3)]
)
def test_ranks_share_the_processor_time_that_control_groups_allow(monkeypatch, quota: int | None, ranks: int, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(1000, 1012)))
    monkeypatch.setattr("hpctrain.launch.threads.whole_quota", lambda: quota)
    launcher = Launcher("MPICH hydra mpiexec", ranks, 0, ranks, 0, "PMI_RANK")
    found, reason = rank_cores(launcher, {})
    assert found == cores
    assert ("a control group allows the time of" in reason) is (quota is not None and quota // ranks < 12 // ranks)
    assert outnumbers_cores(launcher) is (quota is not None and ranks > quota)
    assert usable_cores(range(1000, 1012)) == min(12, quota or 12)
    if cores == 1:
        assert "a control group allows the time of" in str(set_threads(launcher, 2, {}))


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert (physical_cores({0, 1, 2, 3}, tmp_path), physical_cores({0, 2}, tmp_path)) == (2, 1)
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
@pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec, neither next to this Python nor on PATH")
def test_ranks_of_a_real_launcher_share_the_cores() -> None:
    lines = _lines(run_job(CORES + 1, ["-c", _PROGRAM]))
    assert len(lines) == CORES + 1
    assert all(line.startswith("1 thread per rank") for line in lines)


@pytest.mark.parametrize(("ranks", "mine", "expected"), [(8, 8, False), (9, 8, True), (64, 8, True), (64, 1, False)])
def test_ranks_outnumber_cores_that_they_share(monkeypatch: pytest.MonkeyPatch, ranks: int, mine: int, expected: bool) -> None:
    """A rank that its launcher has bound owns its cores, however few of the node's they are."""
    _cpus(monkeypatch, mine, launchers=8)
    assert outnumbers_cores(Launcher("MPICH hydra mpiexec", ranks, 0, ranks, 0, "PMI_RANK")) is expected


_MPIEXEC = ["mpiexec", "-n", "4", "python", "-m", "mpi4py", "-m", "hpctrain", "train", "a.yaml", "batch=8", "--steps", "3"]
_SRUN = ["/usr/bin/srun", "--mpi=pmix", "-n", "4", "python", "-m", "mpi4py", "-m", "hpctrain", "train", "a.yaml"]


@pytest.mark.parametrize("words", [_MPIEXEC, _SRUN, ["hpctrain", "train", "a.yaml"], ["x/bin/hpctrain", "train", "a.yaml"]])
def test_a_training_is_found(words: list[str]) -> None:
    command = TrainCommand.find(words)
    assert (command.training[0], command.uses_srun) == ("a.yaml", words is _SRUN)


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("sleep 3", "no training"),
        ("bash -c 'hpctrain train a.yaml'", "no training"),  # the line is one word
        ("hpctrain eval a.yaml", "no training"),
        ("train a.yaml", "no training"),
        ("hpctrain train a.yaml : hpctrain train b.yaml", "2 trainings"),
    ],
)
def test_other_commands_are_refused(command: str, found: str) -> None:
    with pytest.raises(LaunchError, match=f'contains {found}; it must contain "hpctrain train FILE" exactly once'):
        TrainCommand.find(shlex.split(command))


@pytest.mark.parametrize("earlier", [[], ["--resume", "auto"], ["--resume=runs/old"]])
def test_a_resumed_command_has_one_resume(earlier: list[str]) -> None:
    resumed = TrainCommand.find([*_MPIEXEC, *earlier]).resumed(Path("runs/a-1"))
    at = _MPIEXEC.index("train") + 1
    assert list(resumed.words) == [*_MPIEXEC[:at], "--resume", "runs/a-1", *_MPIEXEC[at:]]
    assert (TrainCommand.find(resumed.words), resumed.resumed(Path("runs/a-1"))) == (resumed, resumed)


@pytest.mark.parametrize(
    ("given", "option"), [([], "--exclude=n3,n7"), (["-x", "n1"], "--exclude=n1,n3,n7"), (["--exclude=n3"], "--exclude=n3,n7")]
)
def test_nodes_are_left_out_in_addition_to_those_that_were(given: list[str], option: str) -> None:
    command = TrainCommand.find([_SRUN[0], *given, *_SRUN[1:]])
    excluding = command.excluding(["n3", "n7"])
    assert (list(excluding.words), TrainCommand.find(excluding.words)) == ([_SRUN[0], option, *_SRUN[1:]], excluding)
