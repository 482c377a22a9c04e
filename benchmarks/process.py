"""Questions of a benchmark's rank to the system about itself. Standard library only: the peer imports it without hpctrain."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def sent_bytes() -> int:
    """Bytes that eth0 has sent; 0 where there is no eth0."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    return 0


def be_nice(nice: int) -> None:
    """Among all processes of the machine. Where the scheduler groups sessions, a process's own value counts in its session only,
    and the launcher starts a session for each rank."""
    if nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)
        group = Path("/proc/self/autogroup")
        if group.exists():
            group.write_text(str(nice))


def cpu_seconds() -> float:
    """CPU time of this process, of all threads, in user and kernel mode."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def busy_seconds() -> float:
    """CPU time that all processes and the kernel of this machine have used, on all cores."""
    user, nice, system, _, _, interrupts, deferred = map(int, Path("/proc/stat").read_text().split(maxsplit=8)[1:8])
    return (user + nice + system + interrupts + deferred) / os.sysconf("SC_CLK_TCK")
