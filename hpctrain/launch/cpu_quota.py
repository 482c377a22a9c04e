"""The limits of control groups on processor time, which containers and some schedulers set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hpctrain.launch.available_memory import control_groups

# Version 1 is mounted by the names of its controllers.
_V1_MOUNTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpu,cpuacct"), Path("/sys/fs/cgroup/cpuacct,cpu"))
_V2_MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the number of CPUs whose time this process's control group may use: the minimum over the group and its ancestors.

    None if there is no limit. More threads than that use the quota up early, and all wait until the next period.

    Args:
        root: of the file system, for tests.
    """
    return min(_quotas(root), default=None)


def whole_quota(root: Path = Path("/")) -> int | None:
    """Return `cpu_quota` rounded down to whole cores, at least 1. That number of threads is never throttled."""
    quota = cpu_quota(root)
    return None if quota is None else max(1, int(quota))


def _quotas(root: Path) -> Iterator[float]:
    for mount in _V2_MOUNTS:
        for folder in control_groups("", mount, root):
            with contextlib.suppress(OSError, ValueError):  # "max 100000" means no limit
                quota, period = map(int, (folder / "cpu.max").read_text().split())
                yield from _share(quota, period)
    for mount in _V1_MOUNTS:
        for folder in control_groups("cpu", mount, root):
            with contextlib.suppress(OSError, ValueError):  # a quota of -1 means no limit
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
                yield from _share(quota, period)


def _share(quota: int, period: int) -> Iterator[float]:
    if quota > 0 and period > 0:
        yield quota / period
