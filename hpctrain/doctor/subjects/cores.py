"""Where the ranks run, and with how many threads: cores that are shared slow a training more than anything else."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.doctor.check import Check, JobView, OwnPlace
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, fine
from hpctrain.experiment.cores import describe_cores
from hpctrain.launch.cpu_quota import whole_quota
from hpctrain.launch.threads import core_names

TOO_MANY_THREADS = FindingKind(
    "too-many-threads",
    Severity.FAULT,
    "The threads of BLAS or OpenMP of all ranks of a node outnumber its cores: they take turns, and a step takes far longer.",
    "Leave `OMP_NUM_THREADS` and `OPENBLAS_NUM_THREADS` unset, or set them to the cores of a rank.",
)
TOO_MANY_RANKS = FindingKind(
    "too-many-ranks",
    Severity.WARNING,
    "Ranks of one thread outnumber the cores that they may run on.",
    "Start fewer ranks on a node, or let the launcher give each cores of its own.",
)
THREADS_REFUSED = FindingKind(
    "threads-refused",
    Severity.FAULT,
    "The configuration's `threads`, or `OMP_NUM_THREADS`, is a number that a training refuses.",
    "Set `threads` to auto.",
)
OVERLAP = FindingKind(
    "overlapping-cores",
    Severity.WARNING,
    "Ranks of a node are bound to sets of cores that differ, but have cores in common.",
    "Let the launcher bind each rank to cores of its own.",
)
UNBOUND = FindingKind(
    "unbound",
    Severity.REMARK,
    "The ranks of a node may all run on the same cores: the system moves their threads about.",
    "Let the launcher bind each rank to cores of its own.",
)


@dataclass(frozen=True)
class CoreFacts:
    """The cores and threads of a rank.

    Attributes:
        cpus: logical ones that it may run on. cores: the physical ones among them. threads: that it computes with; None where
            they were refused. pools: threads of each library's pool. fault: the refusal.
        variables: of the environment, that set numbers of threads. quota: cores that control groups allow; None: no limit.
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
        """Threads of its largest pool."""
        return max([self.threads or 1, *self.pools.values()])


def gather(place: OwnPlace) -> CoreFacts:
    """The facts of this rank; NumPy and the kernels are loaded, so that their pools can be asked."""
    cpus = frozenset(os.sched_getaffinity(0))
    return CoreFacts(cpus, core_names(cpus), place.threads, _pools(), place.threads_fault, dict(place.variables), whole_quota())


def _pools() -> dict[str, int]:
    import numpy  # noqa: F401  starts its pool
    from threadpoolctl import threadpool_info

    return {str(pool["internal_api"]): int(pool["num_threads"]) for pool in threadpool_info()}


def judge_binding(job: JobView, facts: Sequence[CoreFacts]) -> list[DoctorFinding]:
    """Whether ranks of a node have cores of their own."""
    described = describe_cores([fact.cpus for fact in facts], job.node_of)
    sentence = f"{described[0].upper()}{described[1:]}"
    found = []
    for ranks in job.nodes.values():
        masks = [facts[rank].cpus for rank in ranks]
        distinct = set(masks)
        shared = sum(map(len, masks)) > len(frozenset().union(*masks))
        if len(ranks) > 1 and len(distinct) == 1 and len(facts[ranks[0]].cores) > 1:
            found.append((UNBOUND, len(facts[ranks[0]].cores) // len(ranks)))
        elif shared and len(distinct) > 1:
            found.append((OVERLAP, len(frozenset().union(*(facts[rank].cores for rank in ranks))) // len(ranks)))
    if not found:
        return [fine(f"{sentence}.")]
    kind, cores = min(found, key=lambda one: one[0] is not OVERLAP)
    return [kind.found(f"{sentence}{': they overlap' if kind is OVERLAP else ''}.", bind_line(job, max(1, cores)))]


def bind_line(job: JobView, cores: int) -> str:
    """The line that binds each rank to so many cores, by the launcher of this job."""
    name = job.launcher.name
    if name.startswith("Slurm"):
        return f"srun --cpus-per-task={cores} --cpu-bind=cores ..."
    if name.startswith("Open MPI"):
        return f"mpiexec --map-by slot:PE={cores} --bind-to core ..."
    if name.startswith("Cray PALS"):
        return f"mpiexec --depth={cores} --cpu-bind depth ..."
    return f"mpiexec -bind-to core:{cores} -n {job.size} ..."


def judge_threads(job: JobView, facts: Sequence[CoreFacts]) -> list[DoctorFinding]:
    """Whether the threads of each node fit its cores. The first node where they do not stands for all."""
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
    return [fine(f"{threads} {'thread' if threads == 1 else 'threads'} per rank, which may run on {_cores(cores)}.")]


def _too_many(job: JobView, facts: Sequence[CoreFacts], ranks: Sequence[int], threads: int, cores: int) -> DoctorFinding:
    most = max(ranks, key=lambda rank: facts[rank].most_threads)
    fact = facts[most]
    place = f"on {job.hosts[most]} " if len(job.nodes) > 1 else ""
    told = f"{'1 rank' if len(ranks) == 1 else f'{len(ranks)} ranks'} {place}compute with {threads} threads on {_cores(cores)}"
    if fact.most_threads == 1:
        return TOO_MANY_RANKS.found(f"{told}.", f"Start at most {cores} on a node, or ask for more cores per rank.")
    fitting = max(1, cores // len(ranks))
    guilty = [name for name, value in fact.variables.items() if value.isdecimal() and int(value) > fitting]
    because = f" ({', '.join(f'{name}={fact.variables[name]}' for name in guilty)})" if guilty else ""
    names = guilty or ["OMP_NUM_THREADS"]
    return TOO_MANY_THREADS.found(f"{told}{because}.", f"export {' '.join(f'{name}={fitting}' for name in names)}")


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


BINDING = Check("binding", "the cores that each rank may run on", (OVERLAP, UNBOUND), gather, judge_binding)
THREADS = Check(
    "threads",
    "the threads of BLAS and OpenMP on each node against its cores",
    (TOO_MANY_THREADS, TOO_MANY_RANKS, THREADS_REFUSED),
    gather,
    judge_threads,
)
