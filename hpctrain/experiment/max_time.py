"""The limit that a configuration sets to the time of a run, by the clock of this rank."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.config.duration import SLURM
from hpctrain.core.errors import ConfigError
from hpctrain.launch.job_clock import SLURM_END, age_seconds, slurm_seconds_left
from hpctrain.train.stopping import TimeLimit


@dataclass(frozen=True)
class MaxTime:
    """The limit, and the words for it. sentence: for the start of a run; "" where there is no limit."""

    limit: TimeLimit = field(default_factory=TimeLimit)
    name: str = ""
    sentence: str = ""

    @property
    def reason(self) -> str | None:
        """The reason of a run's end, where this limit has asked for it."""
        return self.name if self.limit.asked else None


def max_time(configured: float | str | None, environ: Mapping[str, str] = os.environ) -> MaxTime:
    """The limit of `max_time`, counted from the launcher's start of this rank, or until the end of the Slurm job.

    Raises:
        ConfigError: it is the Slurm job's, and the environment does not tell of that.
    """
    if configured is None:
        return MaxTime()
    if configured != SLURM:
        return _named(float(configured) - age_seconds(), f"max_time, {float(configured):g} s")
    left = slurm_seconds_left(environ)
    if left is None:
        raise ConfigError(
            f"max_time is {SLURM}, but {SLURM_END} is not in the environment, where Slurm has put it since 22.05; "
            "give a time such as 3h50m."
        )
    return _named(left, "max_time, the end of the Slurm job")


def _named(left: float, name: str) -> MaxTime:
    end = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + left))
    sentence = f"{name}: the run ends with a checkpoint and exit code 85 before {end}, if it is not done by then"
    return MaxTime(TimeLimit(left), name, sentence)
