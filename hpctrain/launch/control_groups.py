"""The memory limit that a process runs under, and how often the kernel has ended one under it: Linux's control groups."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

# (what a line of /proc/self/cgroup has for controllers, where that hierarchy is, the files of counts and of the limit)
_VERSIONS = (
    ("memory", Path("/sys/fs/cgroup/memory"), "memory.oom_control", "memory.limit_in_bytes"),
    ("", Path("/sys/fs/cgroup"), "memory.events", "memory.max"),
)
# Version 1 says "none" by a number of nearly 2^63.
_LARGEST = 1 << 60


@dataclass(frozen=True)
class MemoryGroup:
    """A control group's memory.

    counts, limit: its files; None where none can be read. kills: processes that the kernel had ended in it, when this was made.
    """

    counts: Path | None = None
    limit: Path | None = None
    kills: int = 0

    @classmethod
    def own(cls, listing: Path = Path("/proc/self/cgroup"), root: Path = Path("/")) -> MemoryGroup:
        """The group of this process. root: of the file system, for tests."""
        with contextlib.suppress(OSError, ValueError):
            lines = [line.split(":", 2) for line in listing.read_text().splitlines()]
            for controller, mount, counts, limit in _VERSIONS:
                for _, controllers, group in lines:
                    # In a container the path may be that of the machine, where the group itself is mounted.
                    for folder in (root / mount.relative_to("/") / group.lstrip("/"), root / mount.relative_to("/")):
                        if controller in controllers.split(",") and (folder / counts).is_file():
                            return cls(folder / counts, folder / limit, _kills(folder / counts))
        return cls()

    def hint(self) -> str:
        """How to read the end of a process by SIGKILL, in brackets: surely for lack of memory, perhaps, or for no such reason."""
        if self.counts is None:
            return " (as the kernel does where memory runs out)"
        try:
            now = _kills(self.counts)
        except (OSError, ValueError):
            now = self.kills
        if now > self.kills:
            return f" (by the kernel, as memory ran out{self._limit_text()})"
        return " (not by the kernel for lack of memory in this control group, which has counted none)"

    def _limit_text(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            assert self.limit is not None, "comes with the counts"
            size = int(self.limit.read_text())
            if size < _LARGEST:
                return f": the job's limit here is {size / 1e9:.3f} GB"
        return ""


def _kills(path: Path) -> int:
    """The count in a file of lines "name number".

    Raises:
        ValueError: it has none.
    """
    values = dict(line.split() for line in path.read_text().splitlines() if len(line.split()) == 2)
    if "oom_kill" not in values:
        raise ValueError("no count of processes")
    return int(values["oom_kill"])
