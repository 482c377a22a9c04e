"""Memory and processor time available to this process, from the machine and from the limits of Linux's control groups.

Containers and schedulers set such limits. `available_bytes` is the available memory, `cpu_quota` the limit of processor time, and
`peak_resident_bytes` the memory of this process. `MemoryGroup` finds out whether the kernel ended a process because memory ran
out. Nothing here starts a process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.core.text import size_text

_MEMINFO = Path("/proc/meminfo")
# (controllers in a line of /proc/self/cgroup, mount point, files of the limit, of the use and of the counts of killed processes,
# name of the part of the use that the kernel can reclaim at once)
_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file")
_MEMORY_FILES = (
    ("memory", Path("/sys/fs/cgroup/memory"), *_V1_FILES),
    ("", Path("/sys/fs/cgroup"), "memory.max", "memory.current", "memory.events", "inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that the processes of this job may still allocate on this node; None if unknown."""
    rooms: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (root / _MEMINFO.relative_to("/")).read_text().splitlines()
        rooms += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for controller, mount, limit, use, _, reclaimable in _MEMORY_FILES:
        for folder in control_groups(controller, mount, root):
            rooms += _room(folder, limit, use, reclaimable)
    return max(0, min(rooms)) if rooms else None


def control_groups(controller: str, mount: Path, root: Path = Path("/")) -> Iterator[Path]:
    """Yield this process's control group and its ancestors, innermost first. A job's limit may be set above that of its step.

    Args:
        controller: controller of version 1; "" for version 2.
        mount: mount point of its hierarchy.
    """
    with contextlib.suppress(OSError, ValueError):
        lines = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        top = root / mount.relative_to("/")
        for _, controllers, group in lines:
            if controller in controllers.split(","):
                folder = top / group.lstrip("/")
                yield from (place for place in (folder, *folder.parents) if place.is_relative_to(top))


def _room(folder: Path, limit: str, use: str, reclaimable: str) -> Iterator[int]:
    """Yield a group's limit minus its use that cannot be reclaimed; nothing without a limit, or if the group is not visible."""
    with contextlib.suppress(OSError, ValueError):
        most, used = int((folder / limit).read_text()), int((folder / use).read_text())
        yield most - used + int(_values(folder / "memory.stat").get(reclaimable, 0))


def _values(path: Path) -> dict[str, str]:
    """Return the values of a file of lines "name value"."""
    return dict(line.split() for line in path.read_text().splitlines() if len(line.split()) == 2)


# Version 1 is mounted by the names of its controllers.
_V1_MOUNTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpu,cpuacct"), Path("/sys/fs/cgroup/cpuacct,cpu"))
_V2_MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the limit of this process's processor time in CPUs, the minimum over its control group and the ancestors.

    The result is None without a limit. More threads than that use up the limit early, and all then wait until the next period.
    """
    return min(_quotas(root), default=None)


def whole_quota(root: Path = Path("/")) -> int | None:
    """Return `cpu_quota` rounded down to whole cores, at least 1; None without a limit."""
    quota = cpu_quota(root)
    return None if quota is None else max(1, int(quota))


def _quotas(root: Path) -> Iterator[float]:
    for mount in _V2_MOUNTS:
        for folder in control_groups("", mount, root):
            with contextlib.suppress(OSError, ValueError):  # "max 100000" means no limit
                yield from _share(*map(int, (folder / "cpu.max").read_text().split()))
    for mount in _V1_MOUNTS:
        for folder in control_groups("cpu", mount, root):
            with contextlib.suppress(OSError, ValueError):  # a quota of -1 means no limit
                yield from _share(*(int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")))


def _share(quota: int, period: int) -> Iterator[float]:
    if quota > 0 and period > 0:
        yield quota / period


# Version 1 writes a number of nearly 2^63 for no limit.
_LARGEST = 1 << 60


@dataclass(frozen=True)
class MemoryGroup:
    """Memory of a control group.

    Attributes:
        counts: file with the number of killed processes; None if it cannot be read.
        limit: file with the memory limit; None if it cannot be read.
        kills: number of processes that the kernel had killed in the group before this object was created.
    """

    counts: Path | None = None
    limit: Path | None = None
    kills: int = 0

    @classmethod
    def own(cls, root: Path = Path("/")) -> MemoryGroup:
        """Return the group of this process; without files if it is not visible."""
        with contextlib.suppress(OSError, ValueError):
            for controller, mount, limit, _, counts, _ in _MEMORY_FILES:
                folders = list(control_groups(controller, mount, root))
                # In a container, the listed path may be the machine's, while the group itself is the mount point.
                for folder in folders[:1] + folders[-1:]:
                    if (folder / counts).is_file():
                        return cls(folder / counts, folder / limit, _kills(folder / counts))
        return cls()

    def hint(self) -> str:
        """Return a bracketed remark on SIGKILL: whether the kernel sent it for lack of memory (yes, no, possibly)."""
        if self.counts is None:
            return " (as the kernel does if memory runs out)"
        try:
            now = _kills(self.counts)
        except (OSError, ValueError):
            now = self.kills
        if now > self.kills:
            return f" (by the kernel, as memory ran out{self._limit_text()})"
        return " (not by the kernel: since the start, it has ended no process of this control group for lack of memory)"

    def _limit_text(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            assert self.limit is not None, "comes with the counts"
            size = int(self.limit.read_text())
            if size < _LARGEST:
                return f": the job's limit here is {size_text(size)}"
        return ""


def _kills(path: Path) -> int:
    """Return the number of killed processes. Raise a ValueError if the file has no such count."""
    return int(_values(path).get("oom_kill", "no count"))


def peak_resident_bytes() -> int:
    """Return the maximum resident memory of this process so far."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
