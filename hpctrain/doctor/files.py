"""Checks of directories and files: the run directory, HDF5 and its locks, data files, and the nodes' local disks and memory.

Checkpoints must be writable in the run directory, and all nodes must see them. MPI and a run also write to /dev/shm, the
temporary directory, and a directory of flight records. For each check, `gather_...` returns the facts of a rank, and `judge_...`
is a pure function of the facts of all ranks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.core.errors import ConfigError, DataError, HpctrainError
from hpctrain.core.files import path_of, read_bytes
from hpctrain.core.text import size_text
from hpctrain.doctor.check import Check, DoctorFinding, FindingKind, JobView, JoinedPlace, OwnPlace, Severity, fine, present
from hpctrain.storage.atomic_write import write_bytes

NOT_WRITABLE = FindingKind(
    "run-directory",
    Severity.FAULT,
    "The directory for runs cannot be written: it is read-only, full, or belongs to another user.",
    "Set `output` in the configuration, or `--run-directory` of the doctor, to a directory that you may write to.",
)
READS_OTHER = FindingKind(
    "read-back",
    Severity.FAULT,
    "A file that was written, synchronised and renamed in the directory for runs is read back with other content.",
    "Put `output` on another file system: checkpoints on this one cannot be trusted.",
)
SLOW_DIRECTORY = FindingKind(
    "slow-run-directory",
    Severity.WARNING,
    "Writing 1 MB to the directory for runs, with fsync and rename, takes more than 5 s.",
    "Put `output` on a parallel or local file system.",
)
NOT_SHARED = FindingKind(
    "not-shared",
    Severity.WARNING,
    "Some nodes do not see the files that rank 0 writes in the directory for runs, as sharded checkpoints and resumes require.",
    "Put `output` on a file system that all nodes share.",
)

_SECONDS = 5.0
_LOOKS = 20  # a network file system may show a new file late
_LOOK_SECONDS = 0.1
_PROBE_BYTES = 1 << 20


@dataclass(frozen=True)
class DirectoryFacts:
    """Outcome of a test write.

    Attributes:
        directory: tested directory.
        error: errno; 0 on success.
        matches: whether the file was read back unchanged.
        seconds: duration of writing and reading.
    """

    directory: str
    error: int = 0
    matches: bool = True
    seconds: float = 0.0


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
    content, path = os.urandom(_PROBE_BYTES), probe_path(directory, "write")
    begin = time.perf_counter()
    try:
        write_bytes(path, content)
        matches = read_bytes(path) == content
        path.unlink()
    except OSError as error:
        return DirectoryFacts(str(directory), error.errno or errno.EIO)
    return DirectoryFacts(str(directory), 0, matches, time.perf_counter() - begin)


def judge_directory(job: JobView, facts: Sequence[DirectoryFacts | None]) -> list[DoctorFinding]:
    """Return one finding: whether the directory for runs can be written, returns what was written, and is fast enough."""
    fact = facts[0]
    assert fact is not None, "rank 0 gathers facts"
    if fact.error:
        return [NOT_WRITABLE.found(f"{fact.directory} cannot be written: {os.strerror(fact.error)}.", _directory_fix(fact.error))]
    if not fact.matches:
        return [READS_OTHER.found(f"A file in {fact.directory} is read back with other content than was written.")]
    sentence = f"1 MB was written, synchronised and read back in {fact.directory} in {fact.seconds:.2f} s."
    return [SLOW_DIRECTORY.found(sentence) if fact.seconds > _SECONDS else fine(sentence)]


def _directory_fix(error: int) -> str:
    if error in (errno.ENOSPC, errno.EDQUOT):
        return "Free space, or train with output=DIR on another disk."
    return "Train with output=DIR, a directory that you may write to."


def gather_shared(place: JoinedPlace) -> bool | None:
    """Return whether the first rank of this node sees a file created by rank 0. Collective."""
    world, directory = place.world, existing(place.own.directory)
    path = Path(world.broadcast_object(str(probe_path(directory, "shared"))))
    if world.rank == 0:
        made = _make(path)
    made = world.broadcast_object(made if world.rank == 0 else None)
    seen = _sees(path) if made and place.node.rank == 0 else None
    world.allgather_object(None)  # wait until all ranks have checked
    if world.rank == 0 and made:
        path.unlink(missing_ok=True)
    return seen


def _make(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
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
    "writing, fsync, rename and reading back in the directory for runs",
    (NOT_WRITABLE, READS_OTHER, SLOW_DIRECTORY),
    gather_directory,
    judge_directory,
)
SHARED = Check("sharing", "that all nodes see the directory for runs", (NOT_SHARED,), gather_shared, judge_shared, joined=True)


LOCKED = FindingKind(
    "hdf5-lock",
    Severity.FAULT,
    "HDF5 cannot lock a data file, because the file system has no locks or another process holds one.",
    "export HDF5_USE_FILE_LOCKING=FALSE",
)
NO_LOCKS = FindingKind(
    "no-hdf5-locks",
    Severity.WARNING,
    "HDF5 cannot lock a new file in the directory for runs. hpctrain needs no locks, but other programs that read its files may.",
    "export HDF5_USE_FILE_LOCKING=FALSE",
)
DATA = FindingKind(
    "data-file",
    Severity.FAULT,
    "A data file of the configuration cannot be opened on some node.",
    "Create it, or correct its path: `data.train`, `data.validation`, `data.test`.",
)

OTHER_DATA = FindingKind(
    "other-data",
    Severity.FAULT,
    "Data files or files of weights differ between ranks, or do not fit each other or the model, which a training refuses.",
    "Give all nodes the same files, with the same classes and for this model.",
)

MADE_DIFFERENTLY = FindingKind(
    "data-made-differently",
    Severity.REMARK,
    "Data files or weights were made with different options, or a metric does not depend on the training.",
    "Convert all files with the same options, and choose another metric.",
)

_SWITCH = "HDF5_USE_FILE_LOCKING"


@dataclass(frozen=True)
class Hdf5Facts:
    """HDF5 on a node.

    Attributes:
        directory: directory of the test file.
        failure: error of writing or reading it; "" on success.
        data: data files that cannot be opened, each as (path, sentence, whether a lock is the cause).
        files: number of data files that can be opened.
        switch: value of HDF5_USE_FILE_LOCKING.
    """

    directory: str = ""
    failure: str = ""
    data: tuple[tuple[str, str, bool], ...] = ()
    files: int = 0
    switch: str = ""


def gather_hdf5(place: OwnPlace) -> Hdf5Facts | None:
    """Return the facts of HDF5 on this node, on its first rank."""
    if not place.leads_node:
        return None
    directory = existing(place.directory)
    wanted = _data_files(place)
    closed = tuple(fault for fault in map(_fault_of, wanted) if fault is not None)
    return Hdf5Facts(str(directory), _probe(directory), closed, len(wanted) - len(closed), os.environ.get(_SWITCH, ""))


def _data_files(place: OwnPlace) -> list[Path]:
    from hpctrain.config.schema import SYNTHETIC

    if place.config is None:
        return []
    return [Path(path) for path in place.config.data.files.values() if path != SYNTHETIC]


def _fault_of(path: Path) -> tuple[str, str, bool] | None:
    """Return (path, sentence, whether a lock is the cause) of a file that cannot be opened; None if it can be opened."""
    from hpctrain.data.image_file import ImageFile

    try:
        ImageFile.open(path)
    except DataError as error:
        return str(path), str(error), "lock" in str(error.__cause__).lower()
    return None


def _probe(directory: Path) -> str:
    """Create and read an HDF5 file with default settings. Return the error if a lock is its cause, else ""."""
    import h5py

    path = probe_path(directory, "hdf5")
    try:
        with h5py.File(path, "x") as file:
            file["probe"] = 1
        with h5py.File(path, "r") as file:
            file["probe"][()]
    except OSError as error:
        return str(error) if "lock" in str(error) else ""  # other faults of the directory have their own check
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return ""


def judge_hdf5(job: JobView, facts: Sequence[Hdf5Facts | None]) -> list[DoctorFinding]:
    """Return a finding for each data file that cannot be opened on a node, and one for locks."""
    findings: dict[str, DoctorFinding] = {}
    for rank, fact in present(facts):
        where = f" on {job.hosts[rank]}" if len(job.nodes) > 1 else ""
        for path, sentence, locked in fact.data:
            switch = f" ({_SWITCH} is {fact.switch})" if fact.switch else ""
            text = f"HDF5 cannot lock the data file {path}{where}{switch}."
            findings.setdefault(path, LOCKED.found(text) if locked else DATA.from_error(sentence))
        if fact.failure:
            text = f"HDF5 cannot lock a file in {fact.directory}{where}: {fact.failure}."
            findings.setdefault(fact.directory, NO_LOCKS.found(text))
    if findings:
        return list(findings.values())
    count = facts[0].files if facts[0] is not None else 0
    files = "" if not count else "; the data file can be opened" if count == 1 else f"; {count} data files can be opened"
    return [fine(f"Locks work in the run directory{files}.")]


def gather_same(place: JoinedPlace) -> tuple[str, int, tuple[str, ...]]:
    """Compare data files and weights between ranks, and with each other and the model. Collective.

    Return (message of the error that a training would raise, "" if the ranks agree; number of compared files; notes).
    """
    config, world = place.own.config, place.world
    if config is None:
        return "", 0, ()
    from hpctrain.comm.base import compare, raise_on_all_ranks
    from hpctrain.config.images import check_files, configured_splits
    from hpctrain.run.build import read_weights
    from hpctrain.run.images import open_alike

    try:
        files = len(open_alike(world, config, configured_splits(config)))
        if config.init.weights is not None:
            weights = Path(config.init.weights)
            compare(world, raise_on_all_ranks(world, lambda: read_weights(world, weights)))
            files += 1
        images = raise_on_all_ranks(world, lambda: check_files(config))
    except HpctrainError as error:
        return str(error), 0, ()
    return "", files, () if images is None else images.notes


def judge_same(job: JobView, facts: Sequence[tuple[str, int, tuple[str, ...]]]) -> list[DoctorFinding]:
    """Return one finding: whether all ranks have the same data files and weights."""
    difference, files, notes = facts[0]
    if difference or notes:
        return (
            [OTHER_DATA.from_error(difference)]
            if difference
            else [MADE_DIFFERENTLY.found(f"{note}.".removeprefix("warning: ")) for note in notes]
        )
    if job.size == 1 or not files:
        return [fine("Nothing to compare.")]
    return [fine(f"All ranks have the same {'data file' if files == 1 else f'{files} data files'}.")]


SAME = Check(
    "data files",
    "that all ranks have the same data files and weights, and that these fit the model",
    (OTHER_DATA, MADE_DIFFERENTLY),
    gather_same,
    judge_same,
    joined=True,
)
HDF5 = Check(
    "HDF5", "locks of HDF5 in the directory for runs, and the data files", (LOCKED, NO_LOCKS, DATA), gather_hdf5, judge_hdf5
)


NO_SCRATCH = FindingKind(
    "no-scratch",
    Severity.WARNING,
    "A node has no writable temporary directory, where MPI keeps sockets and sessions.",
    "Set `TMPDIR` to a directory on the nodes' own disks: `export TMPDIR=/tmp`.",
)
FULL_SCRATCH = FindingKind(
    "full-scratch",
    Severity.FAULT,
    "The temporary directory of a node, or the directory of flight records, is full.",
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
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class ScratchFacts:
    """One directory of a node.

    Attributes:
        path: path of the directory.
        variable: environment variable or key with its path; "" if there is none.
        error: errno of a test write; 0 on success.
        free_bytes: free space.
    """

    path: str
    variable: str
    error: int
    free_bytes: int


def gather_scratch(place: OwnPlace) -> list[ScratchFacts] | None:
    """Return the facts of this node's temporary directory, /dev/shm and flight directory, on its first rank."""
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
    """Write a few bytes to a directory, and return its free space."""
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
    """Return a finding for each directory with a fault, or one finding with the free space.

    A fault on several nodes is reported for the first of them.
    """
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
    return [fine(f"Free space on every node: {', '.join(f'{size_text(size)} in {path}' for path, size in least.items())}.")]


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
    "the temporary directory, /dev/shm and the flight directory of each node",
    (NO_SCRATCH, FULL_SCRATCH, FULL_MEMORY),
    gather_scratch,
    judge_scratch,
)
