"""A Slurm of two nodes on this machine, for the time of a `with` block: real daemons, ranks bound to cores, no accounting.

Each node is a host name, a tree of processes and a disk of its own (Linux namespaces); both see all other files, as nodes see a
parallel file system. No daemon and no job outlives the process that brought it up, even where that is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain_testing.run import clean_environment, wait_until

PROGRAMS = (
    *("slurmctld", "slurmd", "sbatch", "sbcast", "srun", "scontrol", "scancel", "sinfo", "munged"),
    *("unshare", "setpriv", "mount", "hostname"),
)

NODES = ("n0", "n1")

#: that a job which was queued again waits: the lifetime of a job's credentials, in which its ranks must have started
REQUEUE_SECONDS = 6

_START_SECONDS = 60

_CONFIGURATION = """
ClusterName=hpctrain
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={munge}/socket,cred_expire={requeue_seconds}
SlurmctldPort={ports[0]}
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SchedulerParameters=sched_interval=1,sched_min_interval=0
AccountingStorageType=accounting_storage/none
"""

_NODE = (
    "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs={cores} {reserved} RealMemory=1000 State=UNKNOWN\n"
)

# Jobs may share cores: one that waits for its time to end keeps no other from running.
_PARTITION = "PartitionName=all Nodes=ALL Default=YES MaxTime=01:00:00 OverSubscribe=FORCE:2 State=UP\n"

# Arguments: the node's name, its disk, the path of the disk, the file of host names. MPI would take the other node's ranks for
# neighbours where both share /dev/shm.
_ON_NODE = """
set -e
hostname "$1"
mount --bind "$2" "$3"
mount --bind "$4" /etc/hosts
mount -t tmpfs shm /dev/shm
exec slurmd -D -N "$1"
"""

_NAMESPACES = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child=KILL")


@dataclass(frozen=True)
class SlurmCluster:
    """A cluster that is up.

    Attributes:
        environment: in which Slurm's commands talk to it. cores: the number of cores of each node.
        node_disk: a directory that is another one on each node. disks: the same as this machine sees them, by the node's name.
    """

    environment: Mapping[str, str]
    cores: int
    node_disk: Path
    disks: Mapping[str, Path]


def missing() -> str | None:
    """None where a cluster can be brought up; else one sentence that says what is missing."""
    if os.geteuid() != 0:
        return "A Slurm of one's own is brought up as root only."
    absent = [program for program in PROGRAMS if shutil.which(program, path=_search_path()) is None]
    if absent:
        return f"There is no {', '.join(absent)}; make slurm-packages installs Slurm on Debian."
    if len(os.sched_getaffinity(0)) < len(NODES):
        return "Two nodes need a core each, and this machine has one."
    done = subprocess.run([*_NAMESPACES, "true"], capture_output=True, text=True, timeout=30, check=False)
    return f"Nodes need namespaces of their own: {done.stderr.strip()}." if done.returncode else None


@contextlib.contextmanager
def slurm_cluster(folder: Path, *, shared_cores: bool = False) -> Iterator[SlurmCluster]:
    """A cluster whose state lies below `folder`, and in a directory of a short name that holds munge's socket.

    From the main thread, with whose end the daemons end.

    Args:
        shared_cores: each node has all cores of this machine, which are then promised twice; else they divide them.

    Raises:
        RuntimeError: the nodes do not come up; the message has the ends of the logs.
    """
    for name in ("state", "node-disk"):
        (folder / name).mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        # The path of a socket has 107 bytes at most.
        munge = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hpctrain-munge-")))
        cluster = _prepare(folder, munge, shared_cores=shared_cores)
        start = _Starter(folder, cluster.environment, stack)
        start.daemon("munged", [*_munged(munge), "-F"])
        _wait_until((munge / "socket").exists, folder, "munged")
        start.daemon("slurmctld", ["slurmctld", "-D", "-c"])
        for name in NODES:
            arguments = [name, str(cluster.disks[name]), str(cluster.node_disk), str(folder / "hosts")]
            start.node(name, [*_NAMESPACES, "bash", "-c", _ON_NODE, "node", *arguments])
        _wait_until(lambda: f"idle {len(NODES)}" in _sinfo(cluster.environment), folder, "both nodes")
        yield cluster


def _prepare(folder: Path, munge: Path, *, shared_cores: bool) -> SlurmCluster:
    """All files of a cluster."""
    host, ports = socket.gethostname().partition(".")[0], _free_ports(1 + len(NODES))
    names = {"host": host, "folder": folder, "munge": munge, "ports": ports, "requeue_seconds": REQUEUE_SECONDS}
    allowed, total = sorted(os.sched_getaffinity(0)), os.cpu_count() or 1
    share = len(allowed) if shared_cores else len(allowed) // len(NODES)
    text = _CONFIGURATION.format(**names)
    disks = {}
    for index, name in enumerate(NODES):
        first = 0 if shared_cores else index * share
        reserved = sorted(set(range(total)) - set(allowed[first : first + share]))
        option = f"CpuSpecList={','.join(map(str, reserved))}" if reserved else ""
        text += _NODE.format(name=name, port=ports[1 + index], cores=total, reserved=option)
        (folder / f"spool.{name}").mkdir()
        disks[name] = folder / f"disk.{name}"
        disks[name].mkdir()
    (folder / "slurm.conf").write_text(text + _PARTITION)
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    (folder / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(NODES)}\n")
    munge.chmod(0o755)  # which munged insists on
    (munge / "key").write_bytes(secrets.token_bytes(128))
    (munge / "key").chmod(0o600)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": _search_path()}
    return SlurmCluster(environment, share, folder / "node-disk", disks)


def _munged(munge: Path) -> list[str]:
    """A munged with a key and a socket of its own: whether one runs on this machine, and whose, does not matter."""
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return ["munged", *(f"--{option}={munge / name}" for option, name in files.items())]


class _Starter:
    """Starts daemons that end with the stack, or with the thread that has started them."""

    def __init__(self, folder: Path, environment: Mapping[str, str], stack: contextlib.ExitStack) -> None:
        self._folder, self._environment, self._stack = folder, environment, stack

    def daemon(self, name: str, command: Sequence[str]) -> None:
        """A daemon that is asked to end."""
        self._start(name, "TERM", command, subprocess.Popen.terminate)

    def node(self, name: str, command: Sequence[str]) -> None:
        """A node, which ends as by a loss of power: all that runs on it is gone."""
        self._start(f"slurmd.{name}", "KILL", command, _power_off)

    def _start(self, name: str, number: str, command: Sequence[str], end: Callable[[subprocess.Popen[bytes]], None]) -> None:
        with (self._folder / f"{name}.out").open("wb") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", number, *command],
                env=self._environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                # Ctrl-C at the terminal is for the tests, which then end the daemons in order.
                start_new_session=True,
            )
        self._stack.callback(_end, process, end)


def _end(process: subprocess.Popen[bytes], end: Callable[[subprocess.Popen[bytes]], None]) -> None:
    end(process)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _power_off(node: subprocess.Popen[bytes]) -> None:
    """Kill the first process of a node's own, and with it all others; the one that has made its namespaces then ends, too."""
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    if not children:
        node.kill()


def _wait_until(ready: Callable[[], bool], folder: Path, what: str) -> None:
    def logs() -> list[str]:
        return [what, *(f"{path.name}: {path.read_text(errors='replace')[-800:]}" for path in sorted(folder.glob("*.out")))]

    wait_until(ready, _START_SECONDS, logs)


def _sinfo(environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        ["sinfo", "-h", "-o", "%T %D"], env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout


def _search_path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _free_ports(count: int) -> list[int]:
    """Return free ports, drawn at random below those that the system itself assigns to connections meanwhile."""
    ports: set[int] = set()
    while len(ports) < count:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            ports.add(port)
    return sorted(ports)


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
            command, cwd=self.folder, env=environment or self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    def submit(self, *arguments: str, python: str = sys.executable, environment: Mapping[str, str] | None = None) -> SlurmJob:
        """`hpctrain submit` with these arguments, by a Python that has it."""
        said = self.run(python, "-m", "hpctrain", "submit", *arguments, environment=environment)
        number, log, stop = (
            re.search(pattern, said, re.MULTILINE)
            for pattern in (r"^job (\d+) on ", r"^  tail -F (\S+)$", r"^stop it with a checkpoint, without a restart:\n  (.+)$")
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
