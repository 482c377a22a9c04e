"""Memory and disks of each node that MPI and a run write to: /dev/shm, the temporary directory, flight records of their own."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.doctor.check import Check, JobView, OwnPlace, present
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, fine
from hpctrain.doctor.subjects.directories import existing, probe_path
from hpctrain.core.errors import ConfigError
from hpctrain.paths import path_of

NO_SCRATCH = FindingKind(
    "no-scratch",
    Severity.WARNING,
    "A node has no temporary directory that can be written: MPIs keep sockets and sessions there.",
    "Set `TMPDIR` to a directory on the nodes' own disks: `export TMPDIR=/tmp`.",
)
FULL_SCRATCH = FindingKind(
    "full-scratch",
    Severity.FAULT,
    "The temporary directory of a node, or that of flight records, has no room.",
    "Remove what earlier jobs have left there, or set `TMPDIR` to another directory.",
)
FULL_MEMORY = FindingKind(
    "full-shared-memory",
    Severity.FAULT,
    "/dev/shm of a node is full: MPI's messages between ranks of a node lie there, and a rank ends by SIGBUS.",
    "Remove what killed jobs have left there (`ls -l /dev/shm`), or give the container a larger one (`--shm-size`).",
)

#: in which programs look for a directory of the node, the first that is set
VARIABLES = ("SLURM_TMPDIR", "TMPDIR")
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_BYTES = 16 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class ScratchFacts:
    """One place of a node. error: errno of writing there, 0 where it went well. variable: that names it; "" where none does."""

    path: str
    variable: str
    error: int
    free_bytes: int


def gather(place: OwnPlace) -> list[ScratchFacts] | None:
    """The places of this node."""
    if not place.leads_node:
        return None
    variable = next((name for name in VARIABLES if os.environ.get(name)), "")
    scratch = Path(os.environ[variable] if variable else "/tmp")
    places = [look(scratch, variable)]
    if _SHARED_MEMORY.is_dir():
        places.append(look(_SHARED_MEMORY, ""))
    if place.config is not None and place.config.flight not in ("run", "none"):
        try:
            places.append(look(existing(path_of(place.config.flight)), "flight"))
        except ConfigError:  # a variable is not set on this node
            places.append(ScratchFacts(place.config.flight, "flight", errno.ENOENT, 0))
    return places


def look(directory: Path, variable: str) -> ScratchFacts:
    """Write a little there, and ask how much more there is room for."""
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


def judge(job: JobView, facts: Sequence[list[ScratchFacts] | None]) -> list[DoctorFinding]:
    """A finding for each place that is not as it should be, of the first node where it is not."""
    found: dict[str, DoctorFinding] = {}
    for rank, places in present(facts):
        where = f" of {job.hosts[rank]}" if len(job.nodes) > 1 else ""
        for fact in places:
            if (finding := _finding(fact, where)) is not None:
                found.setdefault(fact.path, finding)
    if found:
        return list(found.values())
    least: dict[str, int] = {}
    for _, places in present(facts):
        for fact in places:
            least[fact.path] = min(fact.free_bytes, least.get(fact.path, fact.free_bytes))
    return [fine(f"Room on every node: {', '.join(f'{size / 1e9:,.1f} GB in {path}' for path, size in least.items())}.")]


def _finding(fact: ScratchFacts, where: str) -> DoctorFinding | None:
    named = f"{fact.path}{where}{f' ({fact.variable})' if fact.variable else ''}"
    if fact.error in _FULL or (not fact.error and fact.free_bytes < _LEAST_BYTES):
        room = f"{named} has room for {fact.free_bytes / 1e6:,.1f} MB."
        if Path(fact.path) == _SHARED_MEMORY:
            return FULL_MEMORY.found(room)
        return FULL_SCRATCH.found(room, f"Make room in {fact.path}, or export TMPDIR=DIR, a directory with room on the node.")
    if fact.error:
        return NO_SCRATCH.found(f"{named} cannot be written: {os.strerror(fact.error)}.", "export TMPDIR=/tmp")
    return None


CHECK = Check(
    "scratch",
    "the temporary directory, /dev/shm and the flight directory of each node",
    (NO_SCRATCH, FULL_SCRATCH, FULL_MEMORY),
    gather,
    judge,
)
