"""The time since this process's job began here, and the time that its scheduler leaves it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from hpctrain.launch import keeper
from hpctrain.launch.processes import status_of

#: in the environment of Slurm's jobs since 22.05: the second of the wall clock at which the job will be ended
SLURM_END = "SLURM_JOB_END_TIME"


def age_seconds() -> float:
    """Seconds since the launcher started this rank: its keeper, where it has one. 0 where the system does not say."""
    process = os.getpid() if keeper.own().said is None else os.getppid()
    status = status_of(process)
    if status is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - status.begun / os.sysconf("SC_CLK_TCK"))


def slurm_seconds_left(environ: Mapping[str, str]) -> float | None:
    """Seconds until Slurm ends this job; None where its environment does not say."""
    end = environ.get(SLURM_END, "")
    return int(end) - time.time() if end.isdecimal() else None
