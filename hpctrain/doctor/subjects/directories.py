"""The run directory: that it can be written as checkpoints are, that all nodes see it, and that HDF5 works in it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.doctor.check import Check, JobView, JoinedPlace, OwnPlace
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, fine
from hpctrain.storage.atomic_write import write_bytes

NOT_WRITABLE = FindingKind(
    "run-directory",
    Severity.FAULT,
    "The directory for runs cannot be written: it is read-only, full, or of somebody else.",
    "Set `output` in the configuration, or `--run-directory` here, to a directory that you may write.",
)
READS_OTHER = FindingKind(
    "read-back",
    Severity.FAULT,
    "A file that was written, brought to the disk and renamed there reads otherwise than it was written.",
    "Put `output` on another file system: checkpoints on this one cannot be trusted.",
)
SLOW_DIRECTORY = FindingKind(
    "slow-run-directory",
    Severity.WARNING,
    "Writing 1 MB to the disk, with fsync and rename, takes more than 5 s.",
    "Put `output` on a parallel or local file system.",
)
NOT_SHARED = FindingKind(
    "not-shared",
    Severity.WARNING,
    "Nodes do not see what rank 0 writes in the run directory: sharded checkpoints and resumes need that.",
    "Put `output` on a file system that all nodes share.",
)

_SECONDS = 5.0
_LOOKS = 20  # a network file system may show a new name late
_LOOK_SECONDS = 0.1
_PROBE_BYTES = 1 << 20


@dataclass(frozen=True)
class DirectoryFacts:
    """The outcome of a probe. error: errno, 0 where all went well. matches: what was read is what was written."""

    directory: str
    error: int = 0
    matches: bool = True
    seconds: float = 0.0


def existing(directory: Path) -> Path:
    """The directory itself, or the nearest above it that is there: a training makes what lacks below."""
    directory = directory.absolute()
    return next((path for path in (directory, *directory.parents) if path.exists()), directory)


def probe_path(directory: Path, name: str) -> Path:
    """A file of this process in a directory."""
    return directory / f".hpctrain-doctor-{name}-{os.getpid()}"


def gather(place: OwnPlace) -> DirectoryFacts | None:
    """The facts of the first rank, which writes the files of a run."""
    if not place.leads_job:
        return None
    directory = existing(place.directory)
    content, path = os.urandom(_PROBE_BYTES), probe_path(directory, "write")
    begin = time.perf_counter()
    try:
        write_bytes(path, content)
        matches = path.read_bytes() == content
        path.unlink()
    except OSError as error:
        return DirectoryFacts(str(directory), error.errno or errno.EIO)
    return DirectoryFacts(str(directory), 0, matches, time.perf_counter() - begin)


def judge(job: JobView, facts: Sequence[DirectoryFacts | None]) -> list[DoctorFinding]:
    """One finding."""
    fact = facts[0]
    assert fact is not None, "the first rank looks"
    if fact.error:
        return [NOT_WRITABLE.found(f"{fact.directory} cannot be written: {os.strerror(fact.error)}.", _mend(fact.error))]
    if not fact.matches:
        return [READS_OTHER.found(f"A file in {fact.directory} reads otherwise than it was written.")]
    sentence = f"1 MB was written, brought to the disk and read back in {fact.directory} in {fact.seconds:.2f} s."
    return [SLOW_DIRECTORY.found(sentence) if fact.seconds > _SECONDS else fine(sentence)]


def _mend(error: int) -> str:
    if error in (errno.ENOSPC, errno.EDQUOT):
        return "Make room, or train with output=DIR on another disk."
    return "Train with output=DIR, a directory that you may write."


def gather_shared(place: JoinedPlace) -> bool | None:
    """Whether the first rank of this node sees a file that rank 0 has made. Collective."""
    world, directory = place.world, existing(place.own.directory)
    path = Path(world.broadcast_object(str(probe_path(directory, "shared"))))
    if world.rank == 0:
        made = _make(path)
    made = world.broadcast_object(made if world.rank == 0 else None)
    seen = _sees(path) if made and place.node.rank == 0 else None
    world.allgather_object(None)  # nobody looks any more
    if world.rank == 0 and made:
        path.unlink(missing_ok=True)
    return seen


def _make(path: Path) -> bool:
    try:
        path.touch()
    except OSError:
        return False
    return True


def _sees(path: Path) -> bool:
    for _ in range(_LOOKS):
        if path.exists():
            return True
        time.sleep(_LOOK_SECONDS)
    return False


def judge_shared(job: JobView, facts: Sequence[bool | None]) -> list[DoctorFinding]:
    """One finding."""
    blind = [rank for rank, sees in enumerate(facts) if sees is False]
    if blind:
        hosts = ", ".join(dict.fromkeys(job.hosts[rank] for rank in blind))
        return [NOT_SHARED.found(f"What rank 0 writes in the run directory is not seen on {hosts}.")]
    if len(job.nodes) == 1 or not any(facts):
        return [fine("One node." if len(job.nodes) == 1 else "Not looked at: rank 0 cannot write there.")]
    return [fine(f"All {len(job.nodes)} nodes see what rank 0 writes in the run directory.")]


DIRECTORY = Check(
    "directory",
    "writing, fsync, rename and reading back in the directory for runs",
    (NOT_WRITABLE, READS_OTHER, SLOW_DIRECTORY),
    gather,
    judge,
)
SHARED = Check("sharing", "that all nodes see the directory for runs", (NOT_SHARED,), gather_shared, judge_shared, joined=True)
