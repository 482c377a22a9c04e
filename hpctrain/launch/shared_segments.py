"""Removal of shared memory segments that dead processes of the user's own jobs left on this machine.

MPI libraries keep messages between ranks of a node in files of /dev/shm, which occupy memory. A job that ends normally removes
them; a killed job may leave them until the machine restarts. The files do not show who created them. Therefore each rank records
its mapped segments in a file next to them, and the next job of the same user removes those of dead ranks only.

A rank that is killed while MPI starts has mapped segments that it could not record. It therefore first records that MPI is
starting. If such a rank is dead and has recorded nothing else, files with MPI's names that were created during such a start, and
that no process has mapped, are considered its segments.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.core.files import is_private
from hpctrain.core.text import counted, size_text
from hpctrain.launch.processes import process_namespace as _namespace
from hpctrain.launch.processes import start_ticks as _begun

MEMORY = Path("/dev/shm")

#: prefixes of the names of segments of MPICH, Open MPI, UCX, PSM and Intel MPI
_OF_MPI = ("mpich", "sm_segment.", "vader_segment.", "ucx_shm_posix", "psm2_shm", "psm3_shm", "Intel_MPI")
#: maximum duration of MPI's start, with a margin; later files belong to other processes
_START_NS = 120 * 10**9
_STARTS = "MPI starts"


@dataclass(frozen=True)
class Removed:
    """Number and size of the removed segments."""

    count: int = 0
    n_bytes: int = 0

    def __str__(self) -> str:
        segments = f"{counted(self.count, 'segment')} of shared memory ({size_text(self.n_bytes)})"
        return f"removed {segments} left here by killed jobs of yours"


@dataclass(frozen=True)
class _Entry:
    """Recorded segments of one process.

    Attributes:
        file: file that records the segments.
        begin_ns: time at which MPI began to start in the process; None: MPI had started.
    """

    file: Path
    segments: tuple[Path, ...]
    alive: bool
    begin_ns: int | None = None


# Shared memory of one rank with UCX, a fifth of which is MPICH's own, and the amount that must remain free.
_WITH_UCX_BYTES, _MARGIN_BYTES = 5_600_000, 1 << 24


def announce(memory: Path = MEMORY) -> None:
    """Record that MPI is starting in this process. Until `remember` is called, its segments are unknown."""
    with contextlib.suppress(OSError):
        _write([f"{_STARTS} {time.time_ns()}"], memory)


def limit_ucx(ranks: int, memory: Path = MEMORY) -> None:
    """Disable UCX's shared memory where it may not fit, as in the 64 MB of many containers: UCX would crash without a message.

    MPICH does not need it, because it has shared memory of its own for a node's messages, 1.1 MB per rank. If UCX_TLS is set, it
    is kept.

    Args:
        ranks: number of ranks on this node.
    """
    with contextlib.suppress(OSError):
        status = os.statvfs(memory)
        if status.f_bavail * status.f_frsize < ranks * _WITH_UCX_BYTES + _MARGIN_BYTES:
            os.environ.setdefault("UCX_TLS", "^posix")


def hint(memory: Path = MEMORY) -> str:
    """Return a remark in brackets on a crash if little of the memory that MPI needs is left; otherwise ""."""
    with contextlib.suppress(OSError):
        status = os.statvfs(memory)
        if status.f_bavail * status.f_frsize < _MARGIN_BYTES:
            return f" ({memory}, where MPI keeps messages, has {size_text(status.f_bavail * status.f_frsize)} left)"
    return ""


def remember(memory: Path = MEMORY) -> None:
    """Record the segments that this process has mapped, and ignore errors of the file system."""
    segments = sorted({path for path in _mapped() if path.parent == memory})
    with contextlib.suppress(OSError):
        if segments:
            _write(map(str, segments), memory)
        else:
            forget(memory)


def _write(lines: Iterable[str], memory: Path) -> None:
    """Replace this process's file atomically, since the process may be killed at any time."""
    folder = _folder(memory)
    folder.mkdir(mode=0o700, exist_ok=True)
    if is_private(folder):
        file = folder / _name(os.getpid())
        unfinished = file.with_name(f".{file.name}")
        unfinished.write_text("\n".join([_namespace(), *lines, ""]))
        unfinished.replace(file)


def forget(memory: Path = MEMORY) -> None:
    """Remove this process's record, since its MPI ends normally and removes the segments."""
    with contextlib.suppress(OSError):
        (_folder(memory) / _name(os.getpid())).unlink()


def remove_stale(memory: Path = MEMORY) -> Removed:
    """Remove the segments that only dead processes of this user recorded or left; return their number and size."""
    with contextlib.suppress(OSError):
        entries = list(_entries(memory))
        used = {path for entry in entries if entry.alive for path in entry.segments}
        dead = [entry for entry in entries if not entry.alive]
        starting = [entry.begin_ns for entry in entries if entry.alive and entry.begin_ns is not None]
        left, unclear = _abandoned_segments([entry.begin_ns for entry in dead if entry.begin_ns is not None], starting, memory)
        stale = {*left, *(path for entry in dead for path in entry.segments)} - used
        sizes = [_remove(path, memory) for path in sorted(stale)]
        for entry in dead:
            if entry.begin_ns is None or not unclear:
                entry.file.unlink(missing_ok=True)
        gone = [size for size in sizes if size is not None]
        return Removed(len(gone), sum(gone))
    return Removed()


def _abandoned_segments(dead_ns: Sequence[int], living_ns: Sequence[int], memory: Path) -> tuple[set[Path], bool]:
    """Return the segments left by starts of MPI whose ranks are dead, and whether other segments may belong to living ranks.

    Args:
        dead_ns: times at which starts began that never ended.
        living_ns: times at which starts began that are in progress and may just have created a file.
    """
    if not dead_ns:
        return set(), False
    mapped = {path for process in Path("/proc").glob("[0-9]*") for path in _mapped(process)}
    stale, unclear = set[Path](), False
    for path in memory.iterdir():
        with contextlib.suppress(OSError):
            made_ns = path.lstat().st_ctime_ns
            of_dead = any(begin <= made_ns <= begin + _START_NS for begin in dead_ns)
            if not of_dead or path in mapped or not path.name.startswith(_OF_MPI):
                continue
            if any(begin <= made_ns for begin in living_ns):
                unclear = True
            else:
                stale.add(path)
    return stale, unclear


def _remove(path: Path, memory: Path) -> int | None:
    """Delete a file of this user; return its size, or None if it was not deleted."""
    try:
        status = path.lstat()
        if path.parent != memory or status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode):
            return None
        path.unlink()
    except OSError:
        return None
    return status.st_size


def _entries(memory: Path) -> Iterator[_Entry]:
    folder = _folder(memory)
    if not is_private(folder):
        return
    for file in folder.iterdir():
        namespace, *lines = file.read_text().splitlines() or [""]
        if namespace == _namespace():  # whether processes of another namespace, such as a container, are alive is unknown
            number, _, begun = file.name.removeprefix(".").partition("-")
            starts = [int(line.removeprefix(_STARTS)) for line in lines if line.startswith(_STARTS)]
            segments = tuple(Path(line) for line in lines if not line.startswith(_STARTS))
            yield _Entry(file, segments, _begun(int(number)) == begun, *starts)


def _folder(memory: Path) -> Path:
    return memory / f"hpctrain-{os.getuid()}"


def _name(process: int) -> str:
    """Return a process's file name: its ID and its start, as IDs are reused."""
    return f"{process}-{_begun(process)}"


def _mapped(process: Path = Path("/proc/self")) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and not fields[5].endswith("(deleted)"):
                yield Path(fields[5])
