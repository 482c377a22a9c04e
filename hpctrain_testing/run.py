"""Start jobs of several ranks from a test, and watch from outside how they end and what they print."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.nn.compile import validate

# Variables of a launcher, or of the test process's own MPI. With them, the job's ranks would join that launcher's job.
_LAUNCHER_PREFIXES = ("PMI", "PALS_", "MPI_LOCAL", "OMPI_", "PRTE_", "SLURM_", "HYDRA_", "HYDI_", "HPCTRAIN_")
# If Python may not keep compiled modules, every rank of every job compiles the package. If it does not buffer, it writes a line
# and the line's end separately, and another rank's line may come between them.
_LEFT_OUT = (*_LAUNCHER_PREFIXES, "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")

_PATCHED = """
import errno, os, runpy, signal, sys, threading, time
from pathlib import Path
here = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
BODY
from hpctrain.cli import main
command = main.LazyGroup.get_command
def patched(*arguments):
    patch()
    return command(*arguments)
main.LazyGroup.get_command = patched
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


def patched_program(body: str) -> str:
    """Return the text of a program that is `hpctrain` with some functions replaced.

    Args:
        body: code that defines `patch()`, which is called before the job starts; `here` is the rank.
    """
    return _PATCHED.replace("BODY", body)


@dataclass(frozen=True)
class Outcome:
    """The end of a job: exit code, everything that its ranks printed, and its duration."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def find_mpiexec() -> str | None:
    """Return the path of mpiexec: the one next to this Python, else the one on PATH; None if there is none."""
    sibling = Path(sys.executable).with_name("mpiexec")
    return str(sibling) if sibling.exists() else shutil.which("mpiexec")


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this environment without variables of launchers, with one thread per rank, validation of plans, and `extra`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    checks = {validate.ENVIRONMENT_VARIABLE: "1"}
    root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return kept | threads | checks | root | dict(extra or {})


def run_job(
    ranks: int,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_seconds: float = 180,
    through_mpi4py: bool = True,
    launcher_options: Sequence[str] = (),
) -> Outcome:
    """Run `python -m mpi4py *arguments` on `ranks` ranks; 0 ranks: as one process without a launcher.

    Args:
        through_mpi4py: whether to use `-m mpi4py`.
        launcher_options: options of mpiexec.

    Raises:
        subprocess.TimeoutExpired: the job hangs; it has been ended.
    """
    command = [sys.executable, *(["-m", "mpi4py"] if through_mpi4py else []), *arguments]
    if ranks:
        mpiexec = find_mpiexec()
        assert mpiexec is not None, "there is no mpiexec"
        command = [mpiexec, *launcher_options, "-n", str(ranks), *command]
    begin = time.monotonic()
    # A new session contains all ranks, so a timeout can kill them together.
    with subprocess.Popen(
        command,
        env=clean_environment(env),
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            raise
    return Outcome(process.returncode, stdout, stderr, time.monotonic() - begin)


def wait_until(reached: Callable[[], object], seconds: float = 60.0, said: Callable[[], object] = str) -> None:
    """Return once `reached` returns true.

    Raises:
        AssertionError: that takes longer than `seconds`; it ends with the result of `said`.
    """
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, f"not reached within {seconds:g} s: {said()}"
        time.sleep(0.01)


def processes_with(variable: str) -> list[int]:
    """Return the running processes that were started with this `NAME=value` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


class StartedJob:
    """A command in a new session, which a test can disturb while it runs.

    Attributes:
        killed: whether `kill` has ended the command.
    """

    def __init__(self, command: Sequence[str], folder: Path, extra: Mapping[str, str] | None = None) -> None:
        self._token = uuid.uuid4().hex
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  open as long as the job runs
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=clean_environment({"STARTED_JOB": self._token, **(extra or {})}),
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.killed, self._said = False, ""

    def started_processes(self) -> list[int]:
        """Return the running processes of the command and of what it has started, the ranks of a launcher included."""
        return processes_with(f"STARTED_JOB={self._token}")

    def kill(self) -> None:
        """Kill all that it has started if the command still runs. Ranks of a launcher may have sessions of their own."""
        if self.process.poll() is None:
            self.killed = True
            for process in self.started_processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, patience_seconds: float) -> tuple[int, str]:
        """Wait for the end, and return the exit code and all output. Kill it after `patience_seconds`, with code -9."""
        try:
            self.process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()
        if not self._output.closed:
            self._output.seek(0)
            self._said = self._output.read()
            self._output.close()
        return self.process.returncode, self._said
