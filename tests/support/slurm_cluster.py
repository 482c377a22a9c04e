"""A Slurm of two nodes on this machine, for the time of a `with` block: real daemons, ranks bound to cores, no accounting."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libpmi2-0"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "munged", "runuser")
_START_SECONDS = 60
_MUNGE_SOCKET = Path("/run/munge/munge.socket.2")

# Both nodes are this machine, and each has all of its cores.
_CONFIGURATION = """
ClusterName=hpctrain
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerParameters=sched_interval=2
AccountingStorageType=accounting_storage/none
NodeName=n[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]},{ports[2]}] CPUs={cores} RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=01:00:00 State=UP
"""


def missing() -> str | None:
    """None where a cluster can be brought up; else one sentence that says what is missing."""
    if os.geteuid() != 0:
        return "A Slurm of one's own is brought up as root only."
    absent = [program for program in PROGRAMS if shutil.which(program, path=_search_path()) is None]
    return f"There is no {', '.join(absent)}; on Debian: apt-get install --no-install-recommends {PACKAGES}." if absent else None


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Mapping[str, str]]:
    """The environment in which Slurm's commands talk to the cluster. All state lies below `folder`.

    Raises:
        RuntimeError: the nodes do not come up; the message has the ends of the logs.
    """
    (folder / "state").mkdir(parents=True)
    names = {"host": socket.gethostname().partition(".")[0], "folder": folder, "cores": os.cpu_count(), "ports": _free_ports(3)}
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(**names))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _search_path()}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        if not _MUNGE_SOCKET.exists():
            daemons.append(_start(folder, "munged", [*_munged(), "-F"], environment))
            _wait_until(_MUNGE_SOCKET.exists, folder, "munged")
        daemons.append(_start(folder, "slurmctld", ["slurmctld", "-D", "-c"], environment))
        for node in ("n0", "n1"):
            (folder / f"spool.{node}").mkdir()
            daemons.append(_start(folder, f"slurmd.{node}", ["slurmd", "-D", "-N", node], environment))
        _wait_until(lambda: "idle 2" in _sinfo(environment), folder, "both nodes")
        yield environment
    finally:
        subprocess.run(["scancel", "--state=RUNNING", "--user=root"], env=environment, capture_output=True, timeout=30)
        subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True, timeout=30)
        for daemon in reversed(daemons):
            _end(daemon)


def _munged() -> list[str]:
    """munged as its own user, after its directories and key are as it wants them."""
    for directory in ("/run/munge", "/var/log/munge", "/var/lib/munge"):
        Path(directory).mkdir(parents=True, exist_ok=True)
        shutil.chown(directory, "munge", "munge")
    Path("/run/munge").chmod(0o755)
    return ["runuser", "-u", "munge", "--", "munged"]


def _start(folder: Path, name: str, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.out").open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _wait_until(ready: object, folder: Path, what: str) -> None:
    assert callable(ready)
    end = time.monotonic() + _START_SECONDS
    while not ready():
        if time.monotonic() > end:
            logs = "\n".join(f"{path.name}: {path.read_text(errors='replace')[-400:]}" for path in sorted(folder.glob("*.out")))
            raise RuntimeError(f"Slurm: {what} not there after {_START_SECONDS} s.\n{logs}")
        time.sleep(0.25)


def _sinfo(environment: Mapping[str, str]) -> str:
    done = subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=environment, capture_output=True, text=True, timeout=30)
    return done.stdout


def _search_path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
