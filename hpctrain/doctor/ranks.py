"""The launcher and the size of MPI's world: N processes that are each alone are the usual fault, and a silent one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.doctor.check import Check, JobView, OwnPlace
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, capital, fine
from hpctrain.launch.launcher import Launcher, lone_fault, world_fault

SINGLETONS = FindingKind(
    "singletons",
    Severity.FAULT,
    "Each process is rank 0 of a world of its own: N of them would train N times the same, and write over each other.",
    "Use the mpiexec of the MPI that mpi4py loads, or give srun the `--mpi` option of that MPI.",
)
WORLD_SIZE = FindingKind(
    "world-size",
    Severity.FAULT,
    "MPI's world has another size than the launcher, or `HPCTRAIN_EXPECT_RANKS`, was asked for.",
    "Start as many ranks as `HPCTRAIN_EXPECT_RANKS` says, or unset it.",
)
ONE_OF_SEVERAL = FindingKind(
    "one-of-several",
    Severity.WARNING,
    "The scheduler gave the job several ranks or nodes, but this process was started without a launcher: a training is refused.",
    "Start it by `srun` or `mpiexec`, or set `HPCTRAIN_EXPECT_RANKS=1` for one rank alone.",
)
ALONE = FindingKind(
    "alone",
    Severity.REMARK,
    "One process without a launcher: nothing is said of several ranks.",
    "mpiexec -n 2 python -m mpi4py -m hpctrain doctor",
)


WRONG_LAUNCHER = FindingKind(
    "wrong-launcher",
    Severity.FAULT,
    "The launcher is of another MPI than the library that mpi4py loads, and MPI ends each rank when it starts.",
    "Use the mpiexec of the MPI that `python -m mpi4py --mpi-lib-version` names.",
)


@dataclass(frozen=True)
class LauncherFacts:
    """The processes beside this one.

    Attributes:
        beside: the mpiexec in the folder of this Python; empty where there is none.
        siblings: processes of the same command that the same process has started, this one among them.
        alone: why a training is refused, if the job was allocated several ranks and this process is the only one.
    """

    beside: str
    siblings: int = 1
    alone: str | None = None


def gather(place: OwnPlace) -> LauncherFacts:
    """The facts of this rank."""
    return LauncherFacts(mpiexec_beside_python(), 1 + len(_siblings(os.getppid())), lone_fault(place.launcher, os.environ))


def mpiexec_beside_python() -> str:
    """The mpiexec that was installed with this Python's packages; empty where there is none."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else ""


def wrong_launcher(launcher: Launcher, library: str, beside: str) -> DoctorFinding | None:
    """The finding where one of launcher and library is Open MPI's, and the other one is not; None where that is not known.

    Args:
        library: the name of the library. beside: the mpiexec in the folder of this Python.
    """
    hydras = ("MPICH", "Intel", "MVAPICH", "Cray")  # these understand each other
    of_open_mpi = launcher.name.startswith("Open MPI")
    known = of_open_mpi or launcher.name.startswith(hydras)
    if not library or not known or of_open_mpi == ("Open MPI" in library):
        return None
    mend = f"{beside} -n {launcher.expected_size} python -m mpi4py -m hpctrain ..." if beside else ""
    return WRONG_LAUNCHER.found(f"{launcher.name} has started these ranks, but mpi4py loads {library}.", mend)


def first_of_siblings() -> bool:
    """False where an older process of the same command, from the same starter, is there to speak for this one."""
    keeper = os.getppid()  # the doctor's rank is a child of the process that was started
    return all(sibling > keeper for sibling in _siblings(keeper))


def judge(job: JobView, facts: Sequence[LauncherFacts]) -> list[DoctorFinding]:
    """One finding: the first fault, or who started how many ranks."""
    launcher, first = job.launcher, facts[0]
    fault = world_fault(launcher, job.size, job.library)
    if fault is not None and job.size == 1 and launcher.name != "none" and launcher.overruled_size != 1:
        processes = launcher.expected_size
        sentence = (
            f"{launcher.name} has started {processes} processes, and each is rank 0 of 1: they would train {processes} times."
        )
        own = f"{first.beside} -n {processes} python -m mpi4py -m hpctrain ..."
        return [SINGLETONS.found(sentence, own if first.beside and not launcher.name.startswith("Slurm") else _line(fault[1]))]
    if fault is not None:
        return [WORLD_SIZE.found(f"{fault[0]}.", _line(fault[1]))]
    if launcher.name == "none" and first.siblings > 1:
        sentence = (
            f"{first.siblings} processes of this command run side by side, and each is rank 0 of 1: "
            "what started them is no launcher that MPI here knows."
        )
        return [SINGLETONS.found(sentence, f"{first.beside or 'mpiexec'} -n {first.siblings} python -m mpi4py -m hpctrain ...")]
    if launcher.name == "none" and first.alone is not None:
        return [ONE_OF_SEVERAL.from_error(first.alone)]
    if launcher.name == "none":
        return [ALONE.found("One process without a launcher: nothing can be said of several ranks.")]
    count = "1 rank" if job.size == 1 else f"{job.size} ranks"
    nodes = len(job.nodes)
    return [fine(f"{count} on {'1 node' if nodes == 1 else f'{nodes} nodes'}, started by {launcher.name}.")]


CHECK = Check(
    "launcher",
    "the launcher, and whether MPI's world has the size that it was asked for",
    (SINGLETONS, WRONG_LAUNCHER, WORLD_SIZE, ONE_OF_SEVERAL, ALONE),
    gather,
    judge,
)


def _line(mend: str) -> str:
    return capital(f"{mend}.")


def _siblings(process: int) -> list[int]:
    """Other processes with the parent and the command line of this one."""
    parent, words = _parent(process), _words(process)
    found = []
    for entry in Path("/proc").iterdir():
        number = int(entry.name) if entry.name.isdecimal() else process
        if number != process and _parent(number) == parent and _words(number) == words:
            found.append(number)
    return found


def _parent(process: int) -> int | None:
    try:
        # "pid (name) state parent ...", where the name may hold blanks and brackets
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _words(process: int) -> bytes | None:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return None
