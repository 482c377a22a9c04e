"""A person with an account on a cluster under Slurm: submits from a directory, follows jobs, sends signals."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.jobs import clean_environment
from tests.support.slurm_cluster import SlurmCluster

_PATIENCE_SECONDS = 150
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass(frozen=True)
class SlurmJob:
    """A submitted job, where its output goes, and the command that stops it for good."""

    number: str
    log: Path
    stop: str = ""

    @property
    def text(self) -> str:
        """All that it has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class SlurmUser:
    """Works in `folder`, with site profiles of their own in its directory `settings`."""

    def __init__(self, folder: Path, cluster: SlurmCluster) -> None:
        self.folder, self.cluster = folder, cluster
        # The rest of Slurm's variables would be those of a job in which the tests themselves run.
        own = {name: cluster.environment[name] for name in ("SLURM_CONF", "PATH")}
        self.environment = clean_environment({**own, "XDG_CONFIG_HOME": str(folder / "settings")})

    def write_site(self, name: str, profile: str) -> None:
        """A site profile of their own."""
        sites = self.folder / "settings" / "hpctrain" / "sites"
        sites.mkdir(parents=True, exist_ok=True)
        (sites / f"{name}.yaml").write_text(profile)

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """The output of a command."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment or self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout + done.stderr

    def submit(self, *arguments: str, python: str = sys.executable, environment: Mapping[str, str] | None = None) -> SlurmJob:
        """`hpctrain submit` with these arguments, by a Python that has it."""
        said = self.run(python, "-m", "hpctrain", "submit", *arguments, environment=environment)
        number, log, stop = (
            re.search(pattern, said, re.MULTILINE)
            for pattern in (r"^job (\d+) on ", r"^  tail -F (\S+)$", r"^stop it with a checkpoint, for good:\n  (.+)$")
        )
        assert number is not None, said
        assert log is not None, said
        assert stop is not None, said
        return SlurmJob(number[1], self.folder / log[1], stop[1])

    def shown(self, job: SlurmJob) -> dict[str, str]:
        """The state of a job, as Slurm tells it."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", job.number)))

    def wait(self, reached: Callable[[], bool], job: SlurmJob, *, may_end: bool = False) -> None:
        """Until something has come true; the job is shown where it does not.

        Args:
            may_end: it can come true after the end of the job.

        Raises:
            TimeoutError: it has not, for long, or the job has ended before.
        """
        end = time.monotonic() + _PATIENCE_SECONDS
        while not reached():
            shown = self.shown(job)
            ended = not may_end and shown.get("JobState") in _ENDED and not reached()
            if ended or time.monotonic() > end:
                raise TimeoutError(f"Job {job.number} does not get on: {shown}\n{job.text}")
            time.sleep(0.1)

    def code(self, job: SlurmJob) -> int:
        """The exit code of a job, once it has ended; the greatest number where a signal has ended it."""
        self.wait(lambda: self.shown(job).get("JobState") in _ENDED, job, may_end=True)
        code, _, number = self.shown(job)["ExitCode"].partition(":")
        return int(code) or (255 if int(number) else 0)
