"""The number of threads per rank; default: the rank's cores. The module is used before NumPy is imported."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.core.errors import LaunchError
from hpctrain.core.text import counted
from hpctrain.launch.control_groups import whole_quota
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.processes import launcher_process

_VARIABLE = "OMP_NUM_THREADS"
#: environment variables in which thread pools read their number of threads
VARIABLES = (_VARIABLE, "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
#: number of times that a thread of GNU OpenMP looks for work before it sleeps if the node is busy, and the variables with which a
#: user sets it. OpenMP's default, 300,000, takes longer than a time slice: a team then waits for a thread whose core is taken by
#: a waiting thread. On a quiet node a thread that sleeps starts to work later.
_SPINS, _SPIN_VARIABLES = "1000", ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_SLURM_CPUS = "SLURM_CPUS_PER_TASK"
_TOPOLOGY = Path("/sys/devices/system/cpu")
#: process IDs of this process and of those from which it was forked, if hpctrain has started MPI or several threads there
_started_in: set[int] = set()


def check_fork() -> None:
    """Raise a LaunchError in a process forked after hpctrain started MPI or several threads: a training would hang in it."""
    if _started_in - {os.getpid()}:
        raise LaunchError(
            "This process was forked from one in which hpctrain has started MPI or several threads, which do not survive a "
            'fork; start it with multiprocessing.get_context("spawn").'
        )


@dataclass(frozen=True)
class ThreadPlan:
    """Number of threads with which this rank computes.

    Attributes:
        threads: size of every library's thread pool.
        cores: number of physical cores that this rank does not share; 1 if ranks outnumber them.
        reason: origin of the number, in words.
        load: load of the node when its first rank started; None on other ranks, if it is unknown, or if it was not measured.
    """

    threads: int
    cores: int
    reason: str
    load: NodeLoad | None = None

    def __str__(self) -> str:
        slow = f", which take turns on {counted(self.cores, 'core')}, so a step takes longer" if self.threads > self.cores else ""
        return f"{counted(self.threads, 'thread')} per rank{slow} ({self.reason})"


def set_threads(
    launcher: Launcher, requested: int | None, environ: MutableMapping[str, str] = os.environ, *, measures: bool = False
) -> ThreadPlan:
    """Choose the number of threads, and set the environment variables that thread pools read when they start.

    Args:
        requested: number from the configuration; None: OMP_NUM_THREADS if it is set, otherwise the rank's cores.
        environ: environment; changed in place.
        measures: whether the first rank of a node measures the node's load. On a busy node its threads sleep earlier. If no
            number is requested, a process without MPI that may use all cores then leaves the busy ones to other programs.

    Raises:
        LaunchError: `requested`, or else OMP_NUM_THREADS, is not a number from 1 to that of the CPUs on which the rank may run.
    """
    cores, how = rank_cores(launcher, environ)
    if requested is not None:
        plan = _requested("threads", str(requested), requested, cores, how)
    elif _VARIABLE in environ:
        text = environ[_VARIABLE]
        first = text.split(",")[0].strip()  # a list contains numbers for nested levels
        plan = _requested(_VARIABLE, text, int(first) if first.isdecimal() else None, cores, how)
    else:
        plan = ThreadPlan(cores, cores, how)
    load = node_load(launcher, plan.threads) if measures and not launcher.local_rank else None
    chooses = requested is None and _VARIABLE not in environ and not launcher.starts_mpi
    if load is not None and load.is_busy and chooses and cores == load.cores:
        taken = min(load.others, cores - 1)  # a thread without a core would delay the others in each kernel
        plan = replace(plan, threads=cores - taken, reason=f"{how}, of which other programs use {taken}")
    for variable in VARIABLES:
        if requested is not None:
            environ[variable] = str(plan.threads)
        else:
            environ.setdefault(variable, str(plan.threads))
    _started_in.update([os.getpid()] if launcher.starts_mpi or plan.threads > 1 else [])
    if load is not None and load.is_busy and not any(variable in environ for variable in _SPIN_VARIABLES):
        environ[_SPIN_VARIABLES[0]] = _SPINS
    if "numpy" in sys.modules:  # its pools have started and no longer read the environment
        from threadpoolctl import threadpool_limits

        threadpool_limits(limits=plan.threads)
    return replace(plan, load=None if load is None else replace(load, threads=plan.threads))


def _requested(name: str, text: str, threads: int | None, cores: int, how: str) -> ThreadPlan:
    """Return the plan for `threads` threads, which may exceed the rank's cores. `threads` is None if `text` is no number."""
    cpus = len(os.sched_getaffinity(0))
    if threads is None or not 1 <= threads <= cpus:
        otherwise = "to auto" if name == "threads" else "unset it"
        raise LaunchError(
            f"{name} is {text if name == 'threads' else repr(text)}, but a rank here may run on {counted(cpus, 'CPU')} ({how}); "
            f"set {name} to {'1' if cpus == 1 else f'a number from 1 to {cpus}'}, or {otherwise}."
        )
    origin = "as configured" if name == "threads" else f"{name} was set"
    return ThreadPlan(threads, cores, f"{origin}; {how}")


#: number, for a process that is alone and for ranks, and interval of the counts of running tasks; the minimum excludes tasks that
#: run only briefly
_LONE_COUNTS, _COUNTS, _COUNT_SECONDS = 100, 5, 2e-3


@dataclass(frozen=True)
class NodeLoad:
    """Programs that compete with the ranks of a node for its cores.

    Attributes:
        others: number of threads of other programs that are running or ready to run.
        ranks, threads: number of ranks of the node, and of threads per rank.
        cores: number of physical cores of the node.
    """

    others: int
    ranks: int
    threads: int
    cores: int

    @property
    def is_busy(self) -> bool:
        """Whether there are other programs, and the node has too few cores for them and the ranks."""
        return self.others > 0 and self.others + self.ranks * self.threads > self.cores

    def sentence(self, where: str = "here") -> str:
        """Return a sentence about the load, without a full stop. `where` is a phrase for the node."""
        return (
            f"{counted(self.others, 'thread')} of other programs {'runs' if self.others == 1 else 'run'} {where}, next to "
            f"{self.ranks * self.threads} of this job on {counted(self.cores, 'core')}"
        )

    def advice(self) -> str:
        """Return advice on how to lose less time on a busy node, without a full stop."""
        if self.threads > 1:
            return "train on another machine or later, or set threads to 1, because a thread without a core delays the others"
        return f"train on another machine or later{', or on fewer ranks' if self.ranks > 1 else ''}"


def node_load(launcher: Launcher, threads: int, proc: Path = Path("/proc")) -> NodeLoad | None:
    """Return the load of this node; None if the system does not report it. Call it before this rank computes.

    A thread counts if it is running now. Next to other ranks, which start at the same time, it must also have been running during
    the last minute, by the load average; a process that is alone counts for 0.2 s instead.
    """
    ranks, counts = launcher.local_size or 1, []
    try:
        for _ in range(_COUNTS if launcher.starts_mpi else _LONE_COUNTS):
            average, _, _, tasks, _ = (proc / "loadavg").read_text().split()
            running = int(tasks.partition("/")[0]) - ranks
            counts.append(min(round(float(average)), running) if launcher.starts_mpi else running)
            if running <= 0:
                break
            time.sleep(_COUNT_SECONDS)
    except (OSError, ValueError):
        return None
    others = max(0, min(counts))
    return NodeLoad(others, ranks, threads, physical_cores(range(os.cpu_count() or 1)))


def rank_cores(launcher: Launcher, environ: MutableMapping[str, str] = os.environ) -> tuple[int, str]:
    """Return the number of physical cores that this rank does not share, at least 1, and its origin in words.

    A rank that its launcher has bound owns its cores; ranks that are not bound share the cores of the node evenly. Under Slurm a
    rank uses at most the cores of --cpus-per-task, bound or not. If a control group limits processor time, the ranks of a node
    share the limit.
    """
    mask = os.sched_getaffinity(0)
    cores, reason = _within_quota(launcher, *_cores_by_mask(launcher, mask, environ))
    requested = _slurm_cores(launcher, mask, environ)
    if requested is None or requested == cores:
        return cores, reason
    if requested < cores:
        return requested, f"{_SLURM_CPUS} is {environ[_SLURM_CPUS]}"
    return cores, f"{reason}, although {_SLURM_CPUS} is {environ[_SLURM_CPUS]}: pass --cpus-per-task to srun as well"


def outnumbers_cores(launcher: Launcher) -> bool:
    """Return whether the ranks of this node outnumber the cores that they share, or those that a control group allows."""
    mask = os.sched_getaffinity(0)
    ranks, quota = launcher.local_size or 1, whole_quota()
    if quota is not None and ranks > quota:
        return True
    return ranks > physical_cores(mask) and not _is_bound(launcher, mask, os.environ)


def _within_quota(launcher: Launcher, cores: int, reason: str) -> tuple[int, str]:
    """Return the cores of a rank, reduced to its share of a limit of processor time, and their origin in words."""
    quota, ranks = whole_quota(), launcher.local_size or 1
    if quota is None or quota // ranks >= cores:
        return cores, reason
    shared = "" if ranks == 1 else f", shared by {ranks} ranks"
    return max(1, quota // ranks), f"a control group allows the time of {counted(quota, 'core')}{shared}"


def usable_cores(cpus: Iterable[int]) -> int:
    """Return the number of physical cores among logical CPUs, at most the number that control groups allow."""
    quota, cores = whole_quota(), physical_cores(cpus)
    return cores if quota is None else min(cores, quota)


def _cores_by_mask(launcher: Launcher, mask: set[int], environ: MutableMapping[str, str]) -> tuple[int, str]:
    """Return the cores of this rank by its affinity mask, and their origin in words."""
    cores = physical_cores(mask)
    local_size = launcher.local_size or 1
    if local_size == 1:
        return cores, f"1 rank on {counted(cores, 'core')}"
    if _is_bound(launcher, mask, environ):
        return cores, f"bound to {cores} of the node's cores by {launcher.name}"
    return max(1, cores // local_size), f"{local_size} ranks share {cores} cores"


def _slurm_cores(launcher: Launcher, mask: set[int], environ: MutableMapping[str, str]) -> int | None:
    """Return the physical cores of --cpus-per-task, counted as in the mask, with or without hardware threads; None if unset."""
    text = environ.get(_SLURM_CPUS, "")
    if not launcher.name.startswith("Slurm") or not text.isdecimal() or int(text) < 1:
        return None
    return max(1, int(text) * physical_cores(mask) // len(mask))


def _is_bound(launcher: Launcher, mask: set[int], environ: MutableMapping[str, str]) -> bool:
    """Return whether the launcher has bound each rank to separate cores."""
    outer = _launcher_mask(launcher.rank_variable)
    confined = outer is not None and mask < outer
    if launcher.name.startswith("Slurm"):
        # A step's tasks may all be confined to the step's cores; this variable shows whether each was to be bound. A Slurm
        # without a plugin that binds sets it too, and binds nothing.
        return confined and environ.get("SLURM_CPU_BIND_TYPE", "none").rstrip(":") not in ("", "none")
    return confined


def _launcher_mask(rank_variable: str | None) -> set[int] | None:
    """Return the CPUs on which the launcher's process on this node may run; None if it is not visible.

    If the machine's cores were compared instead, a container or `taskset mpiexec` would look like a binding of each rank.
    """
    process = launcher_process(rank_variable)
    with contextlib.suppress(OSError):
        return os.sched_getaffinity(process) if process > 0 else None
    return None


def physical_cores(cpus: Iterable[int], topology: Path = _TOPOLOGY) -> int:
    """Return the number of physical cores among logical CPUs. Without a topology, every CPU counts."""
    return len(core_names(cpus, topology))


def core_names(cpus: Iterable[int], topology: Path = _TOPOLOGY) -> frozenset[str]:
    """Return the names of the physical cores of logical CPUs: their hardware threads, "0,64"; without a topology, "cpu0"."""
    names = set()
    for cpu in cpus:
        try:
            names.add((topology / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            names.add(f"cpu{cpu}")
    return frozenset(names)
