"""The scheduler's job of this process: its number, its age, its remaining time, and whether a job is still alive."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.launch import keeper
from hpctrain.launch.processes import status_of

SLURM, PBS = "Slurm", "PBS"
#: environment variables of a PBS job that resubmits itself: the number of the first job, and the number of resubmissions
FIRST_JOB, RESTARTS = "HPCTRAIN_FIRST_JOB", "HPCTRAIN_RESTARTS"

_ANSWER_SECONDS = 15
# A job in one of these states may still have processes.
_SLURM_RUNS = {"RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT"}
_SLURM_SUSPENDED = {"SUSPENDED", "STOPPED"}
_PBS_OVER = re.compile(r"unknown job|has finished", re.IGNORECASE)


@dataclass(frozen=True)
class SchedulerJob:
    """A job of a scheduler.

    Attributes:
        scheduler: "Slurm", "PBS", or "" outside of a job.
        cluster: name of Slurm's cluster; "" if unknown.
        chain: job number that stays the same when the job is requeued.
        restart: number of requeues so far.
    """

    scheduler: str = ""
    number: str = ""
    cluster: str = ""
    chain: str = ""
    restart: int = 0

    def __str__(self) -> str:
        return f"{self.scheduler} job {self.number}" if self.number else ""

    def follows(self, other: SchedulerJob) -> bool:
        """Return whether this is a later start of the same job. The scheduler starts it only after the earlier one has ended."""
        return self.is_chain_of(other) and self.restart > other.restart

    def is_chain_of(self, other: SchedulerJob) -> bool:
        """Return whether both are starts of the same job."""
        here, there = ((each.scheduler, each.cluster, each.chain) for each in (self, other))
        return bool(self.chain) and here == there

    def lives(self) -> bool | None:
        """Query the scheduler: return False if the job is over, True if it is suspended, otherwise None.

        None includes a running job, whose training may have ended. For another job of this process's scheduler and cluster, the
        query starts a process.
        """
        here = own_job(os.environ)
        if not self.number or (self.scheduler, self.cluster) != (here.scheduler, here.cluster):
            return None  # a job's number is unique only within one cluster of its scheduler
        if self.number == here.number and self.restart >= here.restart:
            return None  # its own job cannot be over
        command = ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={self.number}"]
        if self.scheduler == PBS:
            command = ["qstat", self.number]
        try:
            # No preexec_fn, so that Python may use vfork, which leaves memory registered by MPI alone.
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return _pbs_answer(done) if self.scheduler == PBS else _slurm_answer(done)


def own_job(environ: Mapping[str, str]) -> SchedulerJob:
    """Return the job of this process from its environment."""
    if number := environ.get("SLURM_JOB_ID", ""):
        restart = environ.get("SLURM_RESTART_COUNT", "0")
        cluster = environ.get("SLURM_CLUSTER_NAME", "")
        return SchedulerJob(SLURM, number, cluster, number, int(restart) if restart.isdecimal() else 0)
    if number := environ.get("PBS_JOBID", ""):
        restart = environ.get(RESTARTS, "0")
        return SchedulerJob(PBS, number, "", environ.get(FIRST_JOB) or number, int(restart) if restart.isdecimal() else 0)
    return SchedulerJob()


def _slurm_answer(done: subprocess.CompletedProcess[str]) -> bool | None:
    if done.returncode:
        return False if "invalid job id" in done.stderr.lower() else None
    states = set(done.stdout.split())
    if states & _SLURM_SUSPENDED:
        return True
    return False if states and not states & _SLURM_RUNS else None


def _pbs_answer(done: subprocess.CompletedProcess[str]) -> bool | None:
    return False if done.returncode and _PBS_OVER.search(done.stdout + done.stderr) else None


#: environment variable of Slurm's jobs since 22.05: second of the wall clock at which Slurm ends the job
SLURM_END = "SLURM_JOB_END_TIME"


def age_seconds() -> float:
    """Return the seconds since the launcher started this rank, or its keeper if it has one; 0 if unknown."""
    process = os.getpid() if keeper.current_keeper().sender is None else os.getppid()
    status = status_of(process)
    if status is None:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - status.begun / os.sysconf("SC_CLK_TCK"))


def slurm_seconds_left(environ: Mapping[str, str]) -> float | None:
    """Return the seconds until Slurm ends this job; None if the environment does not contain the end time."""
    end = environ.get(SLURM_END, "")
    return int(end) - time.time() if end.isdecimal() else None
