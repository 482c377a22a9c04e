"""Checks of how the ranks were started: launcher, MPI library, cores and threads, and the start of a training.

The most frequent fault has no error message: N processes that each form a job of one rank. Shared cores slow down a training more
than any other fault. For each check, `gather_...` returns the facts of a rank, and `judge_...` is a pure function of the facts of
all ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.assembly.images import check_files
from hpctrain.assembly.recipe import Recipe, check_batch, columns, describe
from hpctrain.comm.base import compare, raise_on_all_ranks
from hpctrain.comm.groups import check_grid
from hpctrain.config.schema import Config
from hpctrain.core.errors import HpctrainError
from hpctrain.core.text import counted
from hpctrain.doctor.check import (
    Check,
    DoctorFinding,
    FindingKind,
    JobView,
    JoinedPlace,
    OwnPlace,
    Severity,
    capital,
    fine,
)
from hpctrain.job.same_start import check_same_start
from hpctrain.job.session import describe_cores
from hpctrain.launch.control_groups import whole_quota
from hpctrain.launch.launcher import Launcher, lone_fault, without_launcher, world_fault
from hpctrain.launch.threads import core_names
from hpctrain.run.build import read_weights
from hpctrain.run.images import open_alike

SINGLETONS = FindingKind(
    "singletons",
    Severity.FAULT,
    "Each process is rank 0 of a world of one rank: N processes would train N times and overwrite each other's files.",
    "Use the mpiexec of the MPI that mpi4py loads, or give srun the `--mpi` option of that MPI.",
)
WORLD_SIZE = FindingKind(
    "world-size",
    Severity.FAULT,
    "MPI's world has another size than requested from the launcher or by `HPCTRAIN_EXPECT_RANKS`.",
    "Start the number of ranks that `HPCTRAIN_EXPECT_RANKS` has, or unset it.",
)
ONE_OF_SEVERAL = FindingKind(
    "one-of-several",
    Severity.WARNING,
    "The scheduler allocated several ranks or nodes, but no launcher started this process; a training would be refused.",
    "Start it by `srun` or `mpiexec`, or set `HPCTRAIN_EXPECT_RANKS=1` for one rank alone.",
)
ALONE = FindingKind(
    "alone",
    Severity.REMARK,
    "One process without a launcher: several ranks were not checked.",
    "mpiexec -n 2 python -m mpi4py -m hpctrain doctor",
)


WRONG_LAUNCHER = FindingKind(
    "wrong-launcher",
    Severity.FAULT,
    "The launcher belongs to another MPI than the library that mpi4py loads, and MPI ends each rank when it starts.",
    "Use the mpiexec of the MPI that `python -m mpi4py --mpi-lib-version` names.",
)


@dataclass(frozen=True)
class LauncherFacts:
    """How this process was started.

    Attributes:
        mpiexec: path of mpiexec in the folder of this Python; "" if there is none.
        alone: why a training is refused, if the job was allocated several ranks and this process is the only one.
    """

    mpiexec: str
    alone: str | None = None


def gather_launcher(place: OwnPlace) -> LauncherFacts:
    """Return how this rank was started."""
    return LauncherFacts(environment_mpiexec(), lone_fault(place.launcher, os.environ))


def environment_mpiexec() -> str:
    """Return the path of the mpiexec installed with this Python's packages; "" if there is none."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    return str(mpiexec) if mpiexec.exists() else ""


def wrong_launcher(launcher: Launcher, library: str | None, mpiexec: str) -> DoctorFinding | None:
    """Return a finding if only one of launcher and library is Open MPI's; None otherwise, or if that is unknown."""
    compatible = ("MPICH", "Intel", "MVAPICH", "Cray")  # their launchers start each other's programs
    of_open_mpi = launcher.name.startswith("Open MPI")
    known = of_open_mpi or launcher.name.startswith(compatible)
    if not library or not known or of_open_mpi == ("Open MPI" in library):
        return None
    fix = f"{mpiexec} -n {launcher.expected_size} python -m mpi4py -m hpctrain ..." if mpiexec else ""
    return WRONG_LAUNCHER.found(f"{launcher.name} has started these ranks, but mpi4py loads {library}.", fix)


def judge_launcher(job: JobView, facts: Sequence[LauncherFacts]) -> list[DoctorFinding]:
    """Return one finding: the first fault, or the launcher and the number of ranks."""
    launcher, first = job.launcher, facts[0]
    fault = world_fault(launcher, job.size, job.library)
    if fault is not None and job.size == 1 and launcher.name != "none" and launcher.overruled_size != 1:
        processes = launcher.expected_size
        sentence = (
            f"{launcher.name} has started {processes} processes, but each is rank 0 of 1, so they would train {processes} times."
        )
        own = f"{first.mpiexec} -n {processes} python -m mpi4py -m hpctrain ..."
        return [SINGLETONS.found(sentence, own if first.mpiexec and not launcher.name.startswith("Slurm") else _line(fault[1]))]
    if fault is not None:
        return [WORLD_SIZE.found(f"{fault[0]}.", _line(fault[1]))]
    if launcher.name == "none" and first.alone is not None:
        return [ONE_OF_SEVERAL.from_error(first.alone)]
    if launcher.name == "none":
        return [ALONE.found("One process without a launcher: several ranks were not checked.")]
    return [fine(f"{counted(job.size, 'rank')} on {counted(len(job.nodes), 'node')}, started by {launcher.name}.")]


LAUNCHER = Check(
    "launcher",
    "the launcher, and whether MPI's world has the requested size",
    (SINGLETONS, WRONG_LAUNCHER, WORLD_SIZE, ONE_OF_SEVERAL, ALONE),
    gather_launcher,
    judge_launcher,
)


def _line(fix: str) -> str:
    return capital(f"{fix}.")


NO_LIBRARY = FindingKind(
    "no-mpi-library",
    Severity.FAULT,
    "mpi4py finds no MPI library, without which no training starts under a launcher.",
    "pip install mpich",
)
_ANSWER_SECONDS = 5.0
#: words of the version texts of known MPI libraries
_LIBRARIES = ("Open MPI", "Intel", "MPICH", "MVAPICH")


@dataclass(frozen=True)
class LibraryFacts:
    """MPI library of mpi4py.

    Attributes:
        mpiexec: path of mpiexec in the folder of this Python; "" if there is none.
        library: library that mpi4py loads, found by a process that starts no MPI; None if the process did not answer.
        error: why no library could be loaded; "" if one could.
    """

    mpiexec: str = ""
    library: str | None = ""
    error: str = ""


def gather_library(place: OwnPlace) -> LibraryFacts | None:
    """Return the MPI library, on rank 0. A process that starts no MPI loads it."""
    if not place.leads_job:
        return None
    command, environment = [sys.executable, "-m", "mpi4py", "--mpi-lib-version"], without_launcher(os.environ)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return LibraryFacts(environment_mpiexec(), None)
    first_line = " ".join(done.stdout.partition("\n")[0].split())
    return LibraryFacts(environment_mpiexec(), first_line if any(name in first_line for name in _LIBRARIES) else "")


def judge_library(job: JobView, facts: Sequence[LibraryFacts]) -> list[DoctorFinding]:
    """Return one finding: the name of the library, or that there is none."""
    library = job.library or facts[0].library
    if library is None and not facts[0].error:
        return [fine(f"Not checked: mpi4py did not name its library within {_ANSWER_SECONDS:g} s.")]
    if facts[0].error or not library:
        return [NO_LIBRARY.from_error(facts[0].error or "mpi4py loads no MPI library known to hpctrain.")]
    return [fine(f"{library}.")]


MPI_LIBRARY = Check("MPI", "the MPI library of mpi4py", (NO_LIBRARY,), gather_library, judge_library)


TOO_MANY_THREADS = FindingKind(
    "too-many-threads",
    Severity.WARNING,
    "The threads of BLAS or OpenMP of all ranks of a node outnumber its cores, so they take turns and a step takes much longer.",
    "Leave `OMP_NUM_THREADS` and `OPENBLAS_NUM_THREADS` unset, or set them to the cores of a rank.",
)
TOO_MANY_RANKS = FindingKind(
    "too-many-ranks",
    Severity.WARNING,
    "Ranks with one thread each outnumber the cores on which they may run.",
    "Start fewer ranks on a node, or let the launcher bind each rank to separate cores.",
)
THREADS_REFUSED = FindingKind(
    "threads-refused",
    Severity.FAULT,
    "A training refuses the number in the configuration's `threads` or in `OMP_NUM_THREADS`.",
    "Set `threads` to auto.",
)
OVERLAP = FindingKind(
    "overlapping-cores",
    Severity.WARNING,
    "Ranks of a node are bound to different sets of cores that overlap.",
    "Let the launcher bind each rank to separate cores.",
)
UNBOUND = FindingKind(
    "unbound",
    Severity.REMARK,
    "The ranks of a node may all run on the same cores, so the system moves their threads between cores.",
    "Let the launcher bind each rank to separate cores.",
)


@dataclass(frozen=True)
class CoreFacts:
    """Cores and threads of a rank.

    Attributes:
        cores: physical cores of `cpus`, the CPUs on which the rank may run.
        threads: number of threads of the rank; None if the requested number was refused. `pools` has those of each library.
        fault: why the requested number of threads was refused; "" if it was not.
        quota: number of cores that control groups allow; None: no limit.
    """

    cpus: frozenset[int]
    cores: frozenset[str]
    threads: int | None
    pools: Mapping[str, int]
    fault: str
    variables: Mapping[str, str]
    quota: int | None = None

    @property
    def most_threads(self) -> int:
        """Number of threads of the largest pool."""
        return max([self.threads or 1, *self.pools.values()])


def gather_cores(place: OwnPlace) -> CoreFacts:
    """Return the cores and threads of this rank. NumPy and the kernels must be loaded, so that their pools can be queried."""
    import numpy  # noqa: F401  starts its pool
    from threadpoolctl import threadpool_info

    cpus = frozenset(os.sched_getaffinity(0))
    pools = {str(pool["internal_api"]): int(pool["num_threads"]) for pool in threadpool_info()}
    return CoreFacts(cpus, core_names(cpus), place.threads, pools, place.threads_fault, dict(place.variables), whole_quota())


def judge_binding(job: JobView, facts: Sequence[CoreFacts]) -> list[DoctorFinding]:
    """Return one finding: whether the ranks of a node have separate cores."""
    described = describe_cores([fact.cpus for fact in facts], job.node_of)
    sentence = f"{described[0].upper()}{described[1:]}"
    findings = []
    for ranks in job.nodes.values():
        masks = [facts[rank].cpus for rank in ranks]
        distinct = set(masks)
        shared = sum(map(len, masks)) > len(frozenset().union(*masks))
        if len(ranks) > 1 and len(distinct) == 1 and len(facts[ranks[0]].cores) > 1:
            findings.append((UNBOUND, len(facts[ranks[0]].cores) // len(ranks)))
        elif shared and len(distinct) > 1:
            findings.append((OVERLAP, len(frozenset().union(*(facts[rank].cores for rank in ranks))) // len(ranks)))
    if not findings:
        return [fine(f"{sentence}.")]
    kind, cores = min(findings, key=lambda one: one[0] is not OVERLAP)
    return [kind.found(f"{sentence}{': they overlap' if kind is OVERLAP else ''}.", bind_line(job, max(1, cores)))]


def bind_line(job: JobView, cores: int) -> str:
    """Return the command that binds each rank to a number of cores, for the launcher of this job."""
    name = job.launcher.name
    if name.startswith("Slurm"):
        return f"srun --cpus-per-task={cores} --cpu-bind=cores ..."
    if name.startswith("Open MPI"):
        return f"mpiexec --map-by slot:PE={cores} --bind-to core ..."
    if name.startswith("Cray PALS"):
        return f"mpiexec --depth={cores} --cpu-bind depth ..."
    return f"mpiexec -bind-to core:{cores} -n {job.size} ..."


def judge_threads(job: JobView, facts: Sequence[CoreFacts]) -> list[DoctorFinding]:
    """Return one finding: a refused number of threads, the first node with more threads than cores, or that all is well."""
    refused = [rank for rank, fact in enumerate(facts) if fact.fault]
    if refused:
        return [THREADS_REFUSED.from_error(facts[refused[0]].fault)]
    for ranks in job.nodes.values():
        cores = len(frozenset().union(*(facts[rank].cores for rank in ranks)))
        cores = min([cores, *(quota for rank in ranks if (quota := facts[rank].quota) is not None)])
        threads = sum(facts[rank].most_threads for rank in ranks)
        if threads > cores:
            return [_too_many(job, facts, ranks, threads, cores)]
    threads, cores = facts[0].most_threads, len(facts[0].cores)
    return [fine(f"{counted(threads, 'thread')} per rank, which may run on {counted(cores, 'core')}.")]


def _too_many(job: JobView, facts: Sequence[CoreFacts], ranks: Sequence[int], threads: int, cores: int) -> DoctorFinding:
    most = max(ranks, key=lambda rank: facts[rank].most_threads)
    fact = facts[most]
    place = f"on {job.hosts[most]} " if len(job.nodes) > 1 else ""
    sentence = f"{counted(len(ranks), 'rank')} {place}compute with {threads} threads on {counted(cores, 'core')}"
    if fact.most_threads == 1:
        return TOO_MANY_RANKS.found(f"{sentence}.", f"Start at most {cores} on a node, or request more cores per rank.")
    fitting = max(1, cores // len(ranks))
    guilty = [name for name, value in fact.variables.items() if value.isdecimal() and int(value) > fitting]
    because = f" ({', '.join(f'{name}={fact.variables[name]}' for name in guilty)})" if guilty else ""
    names = guilty or ["OMP_NUM_THREADS"]
    return TOO_MANY_THREADS.found(f"{sentence}{because}.", f"export {' '.join(f'{name}={fitting}' for name in names)}")


BINDING = Check("binding", "the cores that each rank may run on", (OVERLAP, UNBOUND), gather_cores, judge_binding)
THREADS = Check(
    "threads",
    "the threads of BLAS and OpenMP on each node against its cores",
    (TOO_MANY_THREADS, TOO_MANY_RANKS, THREADS_REFUSED),
    gather_cores,
    judge_threads,
)


REFUSED = FindingKind(
    "refused",
    Severity.FAULT,
    "A training refuses this job: ranks have other packages, configurations or files than rank 0, or the grid, the batch, data "
    "files or weights do not fit.",
    "Give all nodes the same environment and files, and set `grid` and `batch` for this number of ranks.",
)


def gather_training(place: JoinedPlace) -> tuple[str, str]:
    """Compare and check what a training compares and checks before its first step, in the same order. Collective.

    Return (message of the first error, "" if there is none; sentence on a job without an error).
    """
    config, world = place.own.config, place.world
    try:
        check_same_start(world, config, leads_node=place.own.leads_node)
        if config is None:
            return "", f"{'All ranks have the same packages and files. ' * (world.size > 1)}No configuration was given."
        # If each rank is alone, the launcher is at fault, not the grid.
        ranks = place.own.launcher.expected_size or world.size
        grid = raise_on_all_ranks(world, lambda: _grid(config, ranks))
        files = len(open_alike(world, config, tuple(config.data.files)))
        if config.init.weights is not None:
            weights = Path(config.init.weights)
            compare(world, raise_on_all_ranks(world, lambda: read_weights(world, weights)))
            files += 1
        raise_on_all_ranks(world, lambda: check_files(config))
    except HpctrainError as error:
        return str(error), ""
    return "", f"Grid {grid}; {counted(files, 'data file')}{', the same on all ranks' if world.size > 1 else ''}."


def _grid(config: Config, ranks: int) -> str:
    """Return a short description of the grid.

    Raises:
        HpctrainError: the grid or the batch does not fit the number of ranks.
    """
    if "grid" in config.automatic or "plan" in config.automatic:
        return "chosen when a training starts (auto)"
    cols = columns(config, ranks)
    check_grid(config.grid.rows, cols, ranks)
    check_batch(config.batch, config.grid.rows, cols)
    return describe(Recipe.of(config, grid=(config.grid.rows, cols)).plan)


def judge_training(job: JobView, facts: Sequence[tuple[str, str]]) -> list[DoctorFinding]:
    """Return one finding: the first error of a training, or its grid and files."""
    error, sentence = facts[0]
    if not error:
        return [fine(sentence)]
    finding = REFUSED.from_error(error)
    differ = [rank for rank in range(job.size) if f"Rank {rank} has " in error]
    where = "".join(f" (rank {rank} is on {job.hosts[rank]})" for rank in differ)
    return [REFUSED.found(f"{finding.sentence.removesuffix('.')}{where}.", finding.fix)]


TRAINING = Check(
    "training",
    "what a training compares and checks: packages, files of hpctrain, configurations, grid, batch, data files and weights",
    (REFUSED,),
    gather_training,
    judge_training,
    joined=True,
)
