"""The time since this process's job began here, and the time that its scheduler leaves it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from hpctrain.launch import keeper

#: in the environment of Slurm's jobs since 22.05: the second of the wall clock at which the job will be ended
SLURM_END = "SLURM_JOB_END_TIME"

# The fields of /proc/<pid>/stat behind the name in brackets begin with the third.
_START_FIELD = 22 - 3


def age_seconds() -> float:
    """Seconds since the launcher started this rank: its keeper, where it has one. 0 where the system does not say."""
    process = os.getpid() if keeper.own().said is None else os.getppid()
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        begun = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begun)


def slurm_seconds_left(environ: Mapping[str, str]) -> float | None:
    """Seconds until Slurm ends this job; None where its environment does not say."""
    end = environ.get(SLURM_END, "")
    return int(end) - time.time() if end.isdecimal() else None
