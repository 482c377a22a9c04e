"""The memory that processes of this node may still take: what the machine has free, and what control groups allow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
# (what a line of /proc/self/cgroup has for controllers, where that hierarchy is, files of the limit and of the use, and the name
# of the part of it that the kernel can take back at once)
_VERSIONS = (
    ("memory", Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("", Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> int | None:
    """The bytes that may still be taken here; None where nothing tells. root: of the file system, for tests."""
    rooms = [*_of_machine(root), *_of_groups(root)]
    return max(0, min(rooms)) if rooms else None


def _of_machine(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / _MEMINFO.relative_to("/")).read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _of_groups(root: Path) -> Iterator[int]:
    for controller, mount, *files in _VERSIONS:
        for folder in control_groups(controller, mount, root):
            yield from _room(folder, *files)


def control_groups(controller: str, mount: Path, root: Path = Path("/")) -> Iterator[Path]:
    """Yield this process's control group and its ancestors, innermost first: a job's limit may be set above that of its step.

    Args:
        controller: of version 1; empty for version 2. mount: of its hierarchy. root: of the file system, for tests.
    """
    with contextlib.suppress(OSError, ValueError):
        lines = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        top = root / mount.relative_to("/")
        for _, controllers, group in lines:
            if controller in controllers.split(","):
                folder = top / group.lstrip("/")
                yield from (place for place in (folder, *folder.parents) if place.is_relative_to(top))


def _room(folder: Path, limit: str, use: str, reclaimable: str) -> Iterator[int]:
    """The limit of a group less its use; nothing where there is no limit, or no such group here, as in a container."""
    with contextlib.suppress(OSError, ValueError):
        most, used = int((folder / limit).read_text()), int((folder / use).read_text())
        values = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines() if len(line.split()) == 2)
        yield most - used + int(values.get(reclaimable, 0))
