"""Checks of directories: the directory for runs, and the nodes' local disks and shared memory.

Checkpoints must be writable in the run directory, and all nodes must see them. MPI also writes to /dev/shm and the temporary
directory. For each check, `gather_...` returns the facts of a rank, and `judge_...` is a pure function of the facts of all ranks.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.core.text import size_text
from hpctrain.doctor.check import Check, DoctorFinding, FindingKind, JobView, JoinedPlace, OwnPlace, Severity, fine, present
from hpctrain.storage.atomic_write import write_bytes

NOT_WRITABLE = FindingKind(
    "run-directory",
    Severity.FAULT,
    "The directory for runs cannot be written: it is read-only, full, or belongs to another user.",
    "Set `output` in the configuration to a directory that you may write to.",
)
NOT_SHARED = FindingKind(
    "not-shared",
    Severity.WARNING,
    "Some nodes do not see the files that rank 0 writes in the directory for runs, as sharded checkpoints and resumes require.",
    "Put `output` on a file system that all nodes share.",
)

_LOOKS = 20  # a network file system may show a new file late
_LOOK_SECONDS = 0.1
_PROBE_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class DirectoryFacts:
    """Outcome of a test write; `error` is its errno, or 0 on success."""

    directory: str
    error: int = 0


def existing(directory: Path) -> Path:
    """Return the directory, or its nearest existing ancestor; a training creates missing directories."""
    directory = directory.absolute()
    return next((path for path in (directory, *directory.parents) if path.exists()), directory)


def probe_path(directory: Path, name: str) -> Path:
    """Return the path of a test file of this process in a directory."""
    return directory / f".hpctrain-doctor-{name}-{os.getpid()}"


def gather_directory(place: OwnPlace) -> DirectoryFacts | None:
    """Return the facts of the directory for runs. Only rank 0 tests it, since it writes the files of a run."""
    if not place.leads_job:
        return None
    directory = existing(place.directory)
    path = probe_path(directory, "write")
    try:
        write_bytes(path, bytes(_PROBE_BYTES))
        path.unlink()
    except OSError as error:
        return DirectoryFacts(str(directory), error.errno or errno.EIO)
    return DirectoryFacts(str(directory))


def judge_directory(job: JobView, facts: Sequence[DirectoryFacts | None]) -> list[DoctorFinding]:
    """Return one finding: whether the directory for runs can be written."""
    fact = facts[0]
    assert fact is not None, "rank 0 gathers facts"
    if fact.error:
        fix = "Train with output=DIR, a directory that you may write to."
        if fact.error in _FULL:
            fix = "Free space, or train with output=DIR on another disk."
        return [NOT_WRITABLE.found(f"{fact.directory} cannot be written: {os.strerror(fact.error)}.", fix)]
    return [fine(f"1 MB was written to {fact.directory}.")]


def gather_shared(place: JoinedPlace) -> bool | None:
    """Return whether the first rank of this node sees a file created by rank 0. Collective."""
    world, directory = place.world, existing(place.own.directory)
    path = Path(world.broadcast_object(str(probe_path(directory, "shared"))))
    made = False
    if world.rank == 0:
        with suppress(OSError):
            path.touch(exist_ok=False)
            made = True
    made = world.broadcast_object(made)
    seen = _sees(path) if made and place.node.rank == 0 else None
    world.allgather_object(None)  # wait until all ranks have checked
    if world.rank == 0 and made:
        path.unlink(missing_ok=True)
    return seen


def _sees(path: Path) -> bool:
    for _ in range(_LOOKS):
        if path.exists():
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def judge_shared(job: JobView, facts: Sequence[bool | None]) -> list[DoctorFinding]:
    """Return one finding: the nodes that do not see the directory for runs, if any."""
    blind = [rank for rank, sees in enumerate(facts) if sees is False]
    if blind:
        hosts = ", ".join(dict.fromkeys(job.hosts[rank] for rank in blind))
        return [NOT_SHARED.found(f"Files that rank 0 writes in the directory for runs are not visible on {hosts}.")]
    if len(job.nodes) == 1 or not any(facts):
        return [fine("One node." if len(job.nodes) == 1 else "Not checked: rank 0 cannot write to the directory for runs.")]
    return [fine(f"All {len(job.nodes)} nodes see the files that rank 0 writes in the directory for runs.")]


DIRECTORY = Check(
    "directory",
    "writing, fsync and rename in the directory for runs",
    (NOT_WRITABLE,),
    gather_directory,
    judge_directory,
)
SHARED = Check("sharing", "that all nodes see the directory for runs", (NOT_SHARED,), gather_shared, judge_shared, joined=True)


NO_SCRATCH = FindingKind(
    "no-scratch",
    Severity.WARNING,
    "A node has no writable temporary directory, where MPI keeps sockets and sessions.",
    "Set `TMPDIR` to a directory on the nodes' own disks: `export TMPDIR=/tmp`.",
)
FULL_SCRATCH = FindingKind(
    "full-scratch",
    Severity.FAULT,
    "The temporary directory of a node is full.",
    "Delete files that earlier jobs left there, or set `TMPDIR` to another directory.",
)
FULL_MEMORY = FindingKind(
    "full-shared-memory",
    Severity.FAULT,
    "/dev/shm of a node is full. MPI keeps messages between ranks of a node there, and a rank would end by SIGBUS.",
    "Delete files that killed jobs left there (`ls -l /dev/shm`), or give the container a larger /dev/shm (`--shm-size`).",
)

#: environment variables with a local directory of the node; the first one that is set is used
VARIABLES = ("SLURM_TMPDIR", "TMPDIR")
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_BYTES = 16 << 20


@dataclass(frozen=True)
class ScratchFacts:
    """Outcome of a test write to a local directory of a node.

    Attributes:
        variable: environment variable with its path; "" if there is none.
        error: errno of a test write; 0 on success.
    """

    path: str
    variable: str
    error: int
    free_bytes: int


def gather_scratch(place: OwnPlace) -> list[ScratchFacts] | None:
    """Return the facts of this node's temporary directory and /dev/shm, on its first rank."""
    if not place.leads_node:
        return None
    variable = next((name for name in VARIABLES if os.environ.get(name)), "")
    scratch = Path(os.environ[variable] if variable else "/tmp")
    places = [look(scratch, variable)]
    if _SHARED_MEMORY.is_dir():
        places.append(look(_SHARED_MEMORY, ""))
    return places


def look(directory: Path, variable: str) -> ScratchFacts:
    """Write a few bytes to a directory, and return the outcome with its free space."""
    path = probe_path(directory, "scratch")
    try:
        status = os.statvfs(directory)
        with path.open("xb", buffering=0) as file:
            file.write(bytes(4096))
        path.unlink()
    except OSError as error:
        path.unlink(missing_ok=True) if directory.is_dir() else None
        return ScratchFacts(str(directory), variable, error.errno or errno.EIO, 0)
    return ScratchFacts(str(directory), variable, 0, status.f_bavail * status.f_frsize)


def judge_scratch(job: JobView, facts: Sequence[list[ScratchFacts] | None]) -> list[DoctorFinding]:
    """Return a finding for each directory with a fault, for the first node that has it, or one finding with the free space."""
    findings: dict[str, DoctorFinding] = {}
    for rank, places in present(facts):
        where = f" of {job.hosts[rank]}" if len(job.nodes) > 1 else ""
        for fact in places:
            if (finding := _finding(fact, where)) is not None:
                findings.setdefault(fact.path, finding)
    if findings:
        return list(findings.values())
    least: dict[str, int] = {}
    for _, places in present(facts):
        for fact in places:
            least[fact.path] = min(fact.free_bytes, least.get(fact.path, fact.free_bytes))
    return [fine(f"Free on every node: {', '.join(f'{size_text(size)} in {path}' for path, size in least.items())}.")]


def _finding(fact: ScratchFacts, where: str) -> DoctorFinding | None:
    named = f"{fact.path}{where}{f' ({fact.variable})' if fact.variable else ''}"
    if fact.error in _FULL or (not fact.error and fact.free_bytes < _LEAST_BYTES):
        room = f"{named} has {size_text(fact.free_bytes)} left."
        if Path(fact.path) == _SHARED_MEMORY:
            return FULL_MEMORY.found(room)
        return FULL_SCRATCH.found(room, f"Free space in {fact.path}, or export TMPDIR=DIR, a directory with space on the node.")
    if fact.error:
        return NO_SCRATCH.found(f"{named} cannot be written: {os.strerror(fact.error)}.", "export TMPDIR=/tmp")
    return None


SCRATCH = Check(
    "scratch",
    "the temporary directory and /dev/shm of each node",
    (NO_SCRATCH, FULL_SCRATCH, FULL_MEMORY),
    gather_scratch,
    judge_scratch,
)
