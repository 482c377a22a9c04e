"""Segments of shared memory that dead processes of one's own jobs have left on this machine: remembered by name, and removed.

MPIs keep messages between ranks of a node in files of /dev/shm, which are memory. A job that ends in order removes them; one that
is killed may leave them until the machine restarts. Whose the files there are cannot be told from outside; so each rank writes
down those that it has mapped, in a file beside them, and the next job of the same user removes those of dead ranks alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Removed:
    """Segments that were removed."""

    count: int = 0
    n_bytes: int = 0

    def __str__(self) -> str:
        noun = "segment" if self.count == 1 else "segments"
        size = f"{self.n_bytes / 1e6:,.1f} MB"
        return f"removed {self.count} {noun} of shared memory ({size}) that killed jobs of yours have left here"


@dataclass(frozen=True)
class _Entry:
    """The segments of one process. file: in which they are written down."""

    file: Path
    segments: tuple[Path, ...]
    alive: bool


def remember(memory: Path = MEMORY) -> None:
    """Write down the segments that this process has mapped now. Where that cannot be, nothing happens."""
    segments = sorted({path for path in _mapped() if path.parent == memory})
    with contextlib.suppress(OSError):
        folder = _folder(memory)
        folder.mkdir(mode=0o700, exist_ok=True)
        if segments and _is_own(folder):
            text = "\n".join([_namespace(), *map(str, segments)])
            (folder / _name(os.getpid())).write_text(f"{text}\n")


def forget(memory: Path = MEMORY) -> None:
    """This process ends in order, and its MPI removes the segments."""
    with contextlib.suppress(OSError):
        (_folder(memory) / _name(os.getpid())).unlink()


def remove_stale(memory: Path = MEMORY) -> Removed:
    """Remove the segments that only dead processes of this user have written down."""
    with contextlib.suppress(OSError):
        entries = list(_entries(memory))
        used = {path for entry in entries if entry.alive for path in entry.segments}
        dead = [entry for entry in entries if not entry.alive]
        sizes = [_remove(path, memory) for path in sorted({path for entry in dead for path in entry.segments} - used)]
        for entry in dead:
            entry.file.unlink(missing_ok=True)
        gone = [size for size in sizes if size is not None]
        return Removed(len(gone), sum(gone))
    return Removed()


def _remove(path: Path, memory: Path) -> int | None:
    """Remove a file of this user; give its size, None where there was none to remove."""
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
        namespace, *segments = file.read_text().splitlines() or [""]
        if namespace == _namespace():  # of others, as in a container beside this one, nobody here can tell who lives
            number, _, begun = file.name.partition("-")
            yield _Entry(file, tuple(map(Path, segments)), _begun(int(number)) == begun)


def _folder(memory: Path) -> Path:
    return memory / f"hpctrain-{os.getuid()}"


def _is_own(folder: Path) -> bool:
    """A real directory of this user, in which nobody else can write."""
    with contextlib.suppress(OSError):
        status = folder.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return False


def _name(process: int) -> str:
    """A process by number and begin, as numbers come again."""
    return f"{process}-{_begun(process)}"


def _begun(process: int) -> str:
    """When a process began, in ticks since the machine did; "" where it has ended, though its parent may not have asked yet."""
    try:
        state, *values = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else values[18]


def _namespace() -> str:
    """The machine's start and the namespace of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _mapped() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and not fields[5].endswith("(deleted)"):
                yield Path(fields[5])
