"""Two hosts without a scheduler, as network namespaces of this machine, and the jobs that `hpctrain submit` starts on them.

Hosts reach each other by a remote shell that is like ssh, without its daemon: the command begins in the home directory, with the
variables of a new session and none of the caller's. What a job needs on the other host must have been handed on by its launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain_testing.lab import Lab
from hpctrain_testing.lab import missing as missing_for_a_lab
from hpctrain_testing.run import clean_environment, find_mpiexec, wait_until
from tests.support.tiny_runs import prepare, tiny

HOSTS = ("h0", "h1")
SITE = "two-hosts"
#: within which a rank that waits for another one stops waiting
DEADLINE_SECONDS = 4.0

_TOP = Path(__file__).parents[2]
_PATIENCE_SECONDS = 60.0
_END = "the script ended with "
_REMOTE_SHELL = """#!/bin/sh
cd /tmp && exec env -i HOME=/tmp PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin {agent} "$@"
"""
_OPTIONS = {"MPICH": '[-launcher-exec, "{shell}"]', "Open MPI": '[--prtemca, plm_ssh_agent, "{shell}"]'}
_PROFILE = """
extends: hostfile
description: two namespaces of this machine
node: {{cores: 1, ranks: 1}}
launch: {{options: {options}}}
setup:
  - {{command: "trap 'echo \\"{end}$?\\"' EXIT", why: the process has no parent}}
environment:
  PYTHONPATH: {{value: "{top}", why: these files}}
"""
_CONFIG = tiny(
    "model: {name: small, channels: [4, 6], hidden: 9, dropout: 0.2}, data: {train: train.h5, test: train.h5}, batch: 12, "
    f"epochs: 40, deadline_seconds: {DEADLINE_SECONDS}, evaluate: {{every_epochs: 20}}, checkpoint: {{every_epochs: 20}}, "
    "metrics: {interval_seconds: 0.1}"
)


def missing() -> str | None:
    """Why there can be no two hosts here; None where there can."""
    return missing_for_a_lab() or (None if find_mpiexec() else "There is no mpiexec, neither next to this Python nor on PATH.")


@dataclass(frozen=True)
class HostJob:
    """A job that was submitted. process: its number. stop: the command that stops it with a checkpoint, as `submit` prints it."""

    process: int
    log: Path
    stop: str

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, reached: Callable[[str], bool], seconds: float = _PATIENCE_SECONDS) -> str:
        """Return the log once `reached` is true of it, which must happen within `seconds`."""
        wait_until(lambda: reached(self.text), seconds, lambda: self.text)
        return self.text

    def code(self, seconds: float = _PATIENCE_SECONDS) -> int:
        """The exit code, once the job has ended."""
        return int(self.wait(lambda text: _END in text, seconds).rpartition(_END)[2])


class TwoHosts:
    """A folder that both hosts see, with a configuration, data, a hostfile and a user's own site profile."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self._environment = clean_environment({"XDG_CONFIG_HOME": str(folder / "config"), "PYTHONPATH": str(_TOP)})

    def prepare(self) -> None:
        """Write the files."""
        shell = self.lab.directory / "remote-shell"
        shell.write_text(_REMOTE_SHELL.format(agent=self.lab.directory / "agent"))
        shell.chmod(0o700)
        profile = self.folder / "config" / "hpctrain" / "sites" / f"{SITE}.yaml"
        profile.parent.mkdir(parents=True)
        profile.write_text(_PROFILE.format(options=_OPTIONS[flavour()].format(shell=shell), top=_TOP, end=_END))
        (self.folder / "hosts").write_text("".join(f"{host}\n" for host in HOSTS))
        prepare(self.folder, _CONFIG, 240, 0)

    def submit(self, *arguments: str) -> HostJob:
        """Submit a job from the first host, on both."""
        words = ["submit", "tiny.yaml", "--site", SITE, "--hostfile", "hosts", "--nodes", str(len(HOSTS)), *arguments]
        said = self.run(0, [sys.executable, "-m", "hpctrain", *words])
        match = re.search(r"^job (\d+) on two-hosts: 2 nodes with 1 rank each", said, re.MULTILINE)
        log, stop = (
            re.search(rf"^{words}:\n  (.*)$", said, re.MULTILINE) for words in ("follow it", "stop it with a checkpoint")
        )
        assert match is not None, said
        assert log is not None, said
        assert stop is not None, said
        return HostJob(int(match[1]), self.folder / log[1].removeprefix("tail -F "), stop[1])

    def run(self, host: int, command: Sequence[str]) -> str:
        """The output of a command on a host, which must succeed."""
        done = subprocess.run(
            self.lab.on_host(host, command), cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ranks(self, host: int) -> list[int]:
        """The processes of a host that train."""
        found = []
        for process in self.lab.processes(host):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                if b"--stopped-file" in words and Path(os.fsdecode(words[0])).name.startswith("python"):
                    found.append(process)
        return found


def flavour() -> str:
    """The name of the MPI whose mpiexec is found."""
    mpiexec = find_mpiexec()
    assert mpiexec is not None
    version = subprocess.run([mpiexec, "--version"], env=clean_environment(), capture_output=True, text=True).stdout
    return "Open MPI" if "Open MPI" in version else "MPICH"


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """The hosts, until the end of the block; what still runs on them then is ended."""
    with Lab(len(HOSTS), None) as lab:
        hosts = TwoHosts(lab, folder)
        hosts.prepare()
        yield hosts
