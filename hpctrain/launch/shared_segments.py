"""Remove segments of shared memory that dead processes of the user's own jobs left on this machine.

MPI libraries keep messages between ranks of a node in files of /dev/shm, which are memory. A job that ends in order removes them;
one that is killed may leave them until the machine restarts. The files do not show who made them. So each rank records the
segments it has mapped, in a file next to them, and the next job of the same user removes those of dead ranks only.

A rank that is killed while MPI starts has mapped segments that it could not record. So it first records that MPI starts. If such
a rank is dead and has recorded nothing else, files with MPI's names that were made during such a start, and that no process has
mapped, are taken to be its segments.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.core.text import counted
from hpctrain.launch.processes import process_namespace as _namespace
from hpctrain.launch.processes import start_ticks as _begun

MEMORY = Path("/dev/shm")

#: beginnings of the names of segments of MPICH, Open MPI, UCX, PSM and Intel MPI
_OF_MPI = ("mpich", "sm_segment.", "vader_segment.", "ucx_shm_posix", "psm2_shm", "psm3_shm", "Intel_MPI")
#: longest start of MPI, with a margin; later files belong to other processes
_START_NS = 120 * 10**9
_STARTS = "MPI starts"


@dataclass(frozen=True)
class Removed:
    """The segments that were removed."""

    count: int = 0
    n_bytes: int = 0

    def __str__(self) -> str:
        size = f"{self.n_bytes / 1e6:,.1f} MB"
        return f"removed {counted(self.count, 'segment')} of shared memory ({size}) that killed jobs of yours have left here"


@dataclass(frozen=True)
class _Entry:
    """The segments of one process.

    Attributes:
        file: in which they are recorded. begin_ns: when its MPI began to start; None: it had started.
    """

    file: Path
    segments: tuple[Path, ...]
    alive: bool
    begin_ns: int | None = None


def announce(memory: Path = MEMORY) -> None:
    """Record that MPI starts in this process now. Until `remember`, its segments are unknown."""
    with contextlib.suppress(OSError):
        _write([f"{_STARTS} {time.time_ns()}"], memory)


def remember(memory: Path = MEMORY) -> None:
    """Record the segments that this process has mapped now. Has no effect if they cannot be recorded."""
    segments = sorted({path for path in _mapped() if path.parent == memory})
    with contextlib.suppress(OSError):
        if segments:
            _write(map(str, segments), memory)
        else:
            forget(memory)


def _write(lines: Iterable[str], memory: Path) -> None:
    """Write this process's file as a whole: the process may be killed here, too."""
    folder = _folder(memory)
    folder.mkdir(mode=0o700, exist_ok=True)
    if _is_own(folder):
        file = folder / _name(os.getpid())
        unfinished = file.with_name(f".{file.name}")
        unfinished.write_text("\n".join([_namespace(), *lines, ""]))
        unfinished.replace(file)


def forget(memory: Path = MEMORY) -> None:
    """Remove this process's record: it ends in order, and its MPI removes the segments."""
    with contextlib.suppress(OSError):
        (_folder(memory) / _name(os.getpid())).unlink()


def remove_stale(memory: Path = MEMORY) -> Removed:
    """Remove the segments that only dead processes of this user have recorded; return what was removed."""
    with contextlib.suppress(OSError):
        entries = list(_entries(memory))
        used = {path for entry in entries if entry.alive for path in entry.segments}
        dead = [entry for entry in entries if not entry.alive]
        starting = [entry.begin_ns for entry in entries if entry.alive and entry.begin_ns is not None]
        of_starts, unclear = _of_starts([entry.begin_ns for entry in dead if entry.begin_ns is not None], starting, memory)
        stale = {*of_starts, *(path for entry in dead for path in entry.segments)} - used
        sizes = [_remove(path, memory) for path in sorted(stale)]
        for entry in dead:
            if entry.begin_ns is None or not unclear:
                entry.file.unlink(missing_ok=True)
        gone = [size for size in sizes if size is not None]
        return Removed(len(gone), sum(gone))
    return Removed()


def _of_starts(dead_ns: Sequence[int], living_ns: Sequence[int], memory: Path) -> tuple[set[Path], bool]:
    """Return the segments that starts of MPI left whose ranks are all dead, and whether there are some that may belong to others.

    Args:
        dead_ns: when the starts began that never ended. living_ns: when those began that are under way, which may just have made
            a file.
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
    """Remove a file of this user; return its size, or None if there was none to remove."""
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
    if not _is_own(folder):
        return
    for file in folder.iterdir():
        namespace, *lines = file.read_text().splitlines() or [""]
        if namespace == _namespace():  # of others, such as another container's, it is unknown who is alive
            number, _, begun = file.name.removeprefix(".").partition("-")
            starts = [int(line.removeprefix(_STARTS)) for line in lines if line.startswith(_STARTS)]
            segments = tuple(Path(line) for line in lines if not line.startswith(_STARTS))
            yield _Entry(file, segments, _begun(int(number)) == begun, *starts)


def _folder(memory: Path) -> Path:
    return memory / f"hpctrain-{os.getuid()}"


def _is_own(folder: Path) -> bool:
    """Return whether a path is a real directory of this user that no other user may write to."""
    with contextlib.suppress(OSError):
        status = folder.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return False


def _name(process: int) -> str:
    """Return the name of a process by number and start: numbers are reused."""
    return f"{process}-{_begun(process)}"


def _mapped(process: Path = Path("/proc/self")) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and not fields[5].endswith("(deleted)"):
                yield Path(fields[5])
