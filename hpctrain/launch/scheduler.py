"""The scheduler's job that this process belongs to, and what the scheduler says of a job."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

SLURM, PBS = "Slurm", "PBS"
#: in the environment of a PBS job that was submitted again by itself: the number of the first one, and how often
FIRST_JOB, RESTARTS = "HPCTRAIN_FIRST_JOB", "HPCTRAIN_RESTARTS"

_ANSWER_SECONDS = 15
# A job in one of these states may still have processes.
_SLURM_RUNS = {"RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT"}
_SLURM_SUSPENDED = {"SUSPENDED", "STOPPED"}
_PBS_OVER = re.compile(r"unknown job|has finished", re.IGNORECASE)


@dataclass(frozen=True)
class SchedulerJob:
    """A job of a scheduler.

    Args:
        scheduler: "Slurm", "PBS" or "" outside of a job. number: of the job. cluster: of Slurm.
        chain: the number that stays the same when the job is queued again. restart: how often it was.
    """

    scheduler: str = ""
    number: str = ""
    cluster: str = ""
    chain: str = ""
    restart: int = 0

    def __str__(self) -> str:
        return f"{self.scheduler} job {self.number}" if self.number else ""

    def follows(self, other: SchedulerJob) -> bool:
        """Whether this is a later start of the same job, which a scheduler begins only after the end of the earlier one."""
        return self.is_chain_of(other) and self.restart > other.restart

    def is_chain_of(self, other: SchedulerJob) -> bool:
        """Whether both are starts of the same job."""
        here, there = ((each.scheduler, each.cluster, each.chain) for each in (self, other))
        return bool(self.chain) and here == there

    def lives(self) -> bool | None:
        """Ask the scheduler: False where it says that the job is over, True where it holds it suspended, None else.

        A job that runs says nothing of the training in it. Starts a process; without a scheduler returns None at once.
        """
        if not self.number or (self.scheduler, self.cluster) != (here := own_job(os.environ)).scheduler_and_cluster:
            return None
        if self.number == here.number and self.restart >= here.restart:
            return None  # its own job cannot be over
        command = ["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={self.number}"]
        if self.scheduler == PBS:
            command = ["qstat", self.number]
        try:
            # Without functions between fork and exec, so that memory which MPI has registered stays as it is.
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return _pbs_answer(done) if self.scheduler == PBS else _slurm_answer(done)

    @property
    def scheduler_and_cluster(self) -> tuple[str, str]:
        """What a job's number is a number of."""
        return self.scheduler, self.cluster


def own_job(environ: Mapping[str, str]) -> SchedulerJob:
    """Return the job of this process, as its environment names it."""
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
