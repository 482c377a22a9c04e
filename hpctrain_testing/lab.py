"""Several hosts with shaped links on one machine: network namespaces joined by a bridge in a namespace of its own.

It needs root, iproute2 (`ip`, `tc`) and util-linux (`unshare`, `taskset`). Host i has the address 10.77.0.(i + 1), a hostname, a
/dev/shm and one core of its own, and resolves the names of the others. A token bucket shapes each link in both directions, at the
host and at the switch. The machine's own network namespace does not change, and names have a prefix, so several laboratories can
run at the same time.

    python -m hpctrain_testing.lab up 2 1gbit                     # and then: rate 500mbit | bytes | down
    python -m hpctrain_testing.lab run 2 1gbit -- python -m mpi4py program.py     # up, one rank per host, down
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from hpctrain_testing.run import clean_environment, find_mpiexec

_TOOLS = ("ip", "tc", "unshare", "taskset", "hostname", "mount")
_COMMAND_SECONDS = 20
_NAMESPACES = Path("/var/run/netns")
_SWITCH = "switch"

# The things that containers often may not make, and kernels may not know; all of it is gone with the process.
_LINKS = "ip link add veth0 type veth peer name veth1 && ip link add bridge0 type bridge"
_PROBE = ("unshare", "--net", "--uts", "--ipc", "--mount", "sh", "-c", _LINKS)

# A packet of a link with segmentation offload has up to 64 KiB; the bucket holds some of them, and 4 ms at 1 Gb/s.
_BURST, _LIMIT = "512kb", "4mb"

# Hydra calls it as a remote shell, [options] HOST COMMAND..., and joins the command as ssh would.
_AGENT = """#!/bin/sh
while :; do case $1 in -l|-p|-o) shift 2;; -*) shift;; *) break;; esac; done
host=$1; shift
core=$(( ${{host#h}} % {cores} ))
export LAB_COMMAND="$*"
exec ip netns exec {prefix}$host unshare --uts --ipc --mount sh -c '
  hostname '"$host"' && mount -t tmpfs -o size=4g tmpfs /dev/shm && mount --bind {names} /etc/hosts &&
  exec taskset -c '"$core"' sh -c "$LAB_COMMAND"'
"""


class LabError(RuntimeError):
    """The laboratory could not be built or changed."""


def missing() -> str | None:
    """Return the reason why this machine cannot run a laboratory; None if it can."""
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        return f"The programs {', '.join(absent)} are not installed (Debian: iproute2, util-linux)."
    if os.geteuid() != 0:
        return "Network namespaces need root."
    done = subprocess.run(_PROBE, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    return f"Hosts need namespaces and links of their own: {done.stderr.strip()}." if done.returncode else None


class Lab:
    """Several hosts, for a `with` block or until `down`.

    Args:
        hosts: number of hosts.
        rate: rate of each link and direction in tc's notation ("1gbit"); None: links are not shaped.
        prefix: prefix of the names of all namespaces; default: one with the number of this process.
    """

    def __init__(self, hosts: int, rate: str | None, prefix: str | None = None) -> None:
        self.hosts = hosts
        self.rate = rate
        self.prefix = prefix if prefix is not None else f"hpctrain{os.getpid()}-"
        self.directory = Path(tempfile.gettempdir()) / f"lab-{self.prefix.rstrip('-')}"

    def __enter__(self) -> Lab:
        self.up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.down()

    @staticmethod
    def address(host: int) -> str:
        """Return the IPv4 address of a host's eth0."""
        return f"10.77.0.{host + 1}"

    def up(self) -> None:
        """Make the namespaces and links, and remove them again if this fails.

        Raises:
            LabError: the machine cannot run a laboratory, or namespaces of these names exist.
        """
        reason = missing()
        if reason is not None:
            raise LabError(reason)
        if self._standing():
            raise LabError(f"Namespaces {', '.join(self._standing())} exist already; take them down or choose another prefix.")
        try:
            self._make()
        except BaseException:
            self.down()
            raise

    def _make(self) -> None:
        self.directory.mkdir(mode=0o700, exist_ok=True)
        agent = self.directory / "agent"
        names = self.directory / "hosts"
        agent.write_text(_AGENT.format(prefix=self.prefix, cores=os.cpu_count() or 1, names=names))
        names.write_text("".join(f"{self.address(host)} h{host}\n" for host in range(self.hosts)) + "127.0.0.1 localhost\n")
        agent.chmod(0o700)
        switch = self.prefix + _SWITCH
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in range(self.hosts):
            name = self._name(host)
            _run("ip", "netns", "add", name)
            _run("ip", "-n", switch, "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-n", switch, "link", "set", f"port{host}", "master", "bridge", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
        self.set_rate(self.rate)

    def set_rate(self, rate: str | None) -> None:
        """Shape all links again, also while messages use them."""
        self.rate = rate
        for host in range(self.hosts):
            for name, device in ((self._name(host), "eth0"), (self.prefix + _SWITCH, f"port{host}")):
                _run("tc", "-n", name, "qdisc", "del", "dev", device, "root", check=False)
                if rate is not None:
                    shape = ("tbf", "rate", rate, "burst", _BURST, "limit", _LIMIT)
                    _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", *shape)

    def cut(self, host: int) -> None:
        """Cut the link of a host. Processes are not notified."""
        _run("ip", "-n", self._name(host), "link", "set", "eth0", "down")

    def mend(self, host: int) -> None:
        """Restore the link of a host after `cut`."""
        _run("ip", "-n", self._name(host), "link", "set", "eth0", "up")

    def processes(self, host: int) -> list[int]:
        """Return the numbers of the processes that run on a host."""
        return [int(word) for word in _run("ip", "netns", "pids", self._name(host)).split()]

    def bytes_sent(self) -> list[int]:
        """Return the number of bytes that each host has sent over its link since `up`."""
        found = []
        for host in range(self.hosts):
            link = json.loads(_run("ip", "-n", self._name(host), "-s", "-j", "link", "show", "eth0"))[0]
            found.append(int(link["stats64"]["tx"]["bytes"]))
        return found

    def on_host(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on the core of a host."""
        return [str(self.directory / "agent"), f"h{host}", shlex.join(command)]

    def mpiexec(self, command: Sequence[str], ranks_per_host: int = 1) -> list[str]:
        """Return the command line that runs `command` as an MPICH job on all hosts, with the mpiexec of this environment.

        Raises:
            LabError: there is no mpiexec.
        """
        launcher = find_mpiexec()
        if launcher is None:
            raise LabError("There is no mpiexec; install the package mpich into this environment.")
        hosts = ",".join(f"h{host}:{ranks_per_host}" for host in range(self.hosts))
        agent = str(self.directory / "agent")
        options = ["-launcher", "ssh", "-launcher-exec", agent, "-hosts", hosts, "-iface", "eth0"]
        return self.on_host(0, [launcher, *options, "-n", str(self.hosts * ranks_per_host), *command])

    def down(self) -> None:
        """Kill the processes on the hosts and remove everything. Further calls do nothing."""
        standing = self._standing()
        for name in standing:
            _end_processes(name)
        for name in standing:
            _run("ip", "netns", "del", name, check=False)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _name(self, host: int) -> str:
        return f"{self.prefix}h{host}"

    def _standing(self) -> list[str]:
        wanted = [self.prefix + _SWITCH, *(self._name(host) for host in range(self.hosts))]
        return [name for name in wanted if (_NAMESPACES / name).exists()]


def _end_processes(namespace: str) -> None:
    """Kill the processes in a namespace until none is left, as a launcher may start more meanwhile."""
    for _ in range(20):
        processes = [int(word) for word in _run("ip", "netns", "pids", namespace, check=False).split()]
        if not processes:
            return
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    if check and done.returncode:
        raise LabError(f"{shlex.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _interrupt(number: int, frame: object) -> None:
    """Raise SystemExit at a signal, so that `with` blocks take the laboratory down."""
    sys.exit(128 + number)


def take_down_at_termination() -> None:
    """Let SIGTERM and SIGHUP unwind `with` blocks from now on, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status; for `run`, that of the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", default="hpctrain-", help="prefix of the namespaces' names")
    parser.add_argument("action", choices=["up", "rate", "bytes", "down", "run"])
    parser.add_argument("values", nargs="*", help="up, run: HOSTS RATE; rate: RATE; run: -- COMMAND...")
    words = sys.argv[1:] if arguments is None else arguments
    split = words.index("--") if "--" in words else len(words)
    chosen = parser.parse_args(words[:split])
    command = words[split + 1 :]
    if chosen.action in ("up", "run"):
        lab = Lab(int(chosen.values[0]), chosen.values[1], chosen.prefix)
    else:
        hosts = len(list(_NAMESPACES.glob(f"{chosen.prefix}h[0-9]*")))
        lab = Lab(hosts, None, chosen.prefix)
    if chosen.action == "up":
        lab.up()
    elif chosen.action == "rate":
        lab.set_rate(chosen.values[0])
    elif chosen.action == "bytes":
        print(" ".join(str(count) for count in lab.bytes_sent()))
    elif chosen.action == "down":
        lab.down()
    else:
        take_down_at_termination()
        with lab:
            return subprocess.run(lab.mpiexec(command), env=clean_environment()).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
