"""Other processes on this machine: state, parents and unique IDs, and the launcher processes on which a rank depends.

The system reuses process IDs, so a `ProcessMark` includes the start time and the PID namespace.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_DEAD, _STOPPED = "ZX", "Tt"
# On the first node the launcher's process is a child of the command that users start; its name begins with one of these.
_COMMANDS = ("mpiexec", "mpirun", "prterun", "srun")


@dataclass(frozen=True)
class ProcessStatus:
    """State of a process.

    Attributes:
        state: one letter, see proc(5).
        parent, group: IDs of the parent process and of the process group.
        terminal: controlling terminal; 0: none.
        foreground: foreground process group of the terminal.
        begun: start time in clock ticks since the machine started.
    """

    state: str
    parent: int
    group: int
    terminal: int
    foreground: int
    begun: int

    @property
    def dead(self) -> bool:
        """Whether the process has ended; it may still be a zombie."""
        return self.state in _DEAD

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return self.state in _STOPPED


def status_of(process: int) -> ProcessStatus | None:
    """Return the status of a process; None if there is no such process, or if the system hides it."""
    try:
        # "pid (name) state parent ...", where the name may hold blanks and brackets
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return ProcessStatus(fields[0], *(int(fields[place]) for place in (1, 2, 4, 5, 19)))
    except (OSError, ValueError, IndexError):
        return None


def launcher_process(rank_variable: str | None) -> int:
    """Return the ID of the launcher's process on this node, the nearest ancestor without `rank_variable`; 0 if unknown."""
    process = os.getppid() if rank_variable is not None else 0
    while process > 1 and _has_variable(process, rank_variable or ""):
        status = status_of(process)
        process = 0 if status is None else status.parent
    return process


def _has_variable(process: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        return any(variable.startswith(f"{name}=".encode()) for variable in variables)
    return False


class WatchedProcess:
    """The process with the ID `number`, on which this one depends. Time is counted in checks, as in `Pulse`.

    Attributes:
        gone: whether it has ended.
        stopped_seconds: time for which it has been stopped.
    """

    def __init__(self, number: int) -> None:
        self.number, self.name = number, _name(number)
        self._first = status_of(number)
        self.gone, self.stopped_seconds = False, 0.0

    def look(self, seconds: float) -> None:
        """Update the state; call every `seconds`. A process that was not visible at the start never counts as gone."""
        if self._first is None:
            return
        status = status_of(self.number)
        self.gone = status is None or status.dead or status.begun != self._first.begun
        stopped = status is not None and status.stopped and not _is_suspended_at_terminal(status)
        self.stopped_seconds = self.stopped_seconds + seconds if stopped else 0.0


def launchers(rank_variable: str | None) -> Sequence[WatchedProcess]:
    """Return the launcher's process on this node, and its parent if that is the launcher's command."""
    process = launcher_process(rank_variable)
    status = status_of(process) if process > 1 else None
    if status is None:
        return ()
    watched = [WatchedProcess(process)]
    if status.parent > 1 and _name(status.parent).startswith(_COMMANDS):
        watched.append(WatchedProcess(status.parent))
    return watched


def _name(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text(errors="replace").strip()
    return ""


def _is_suspended_at_terminal(status: ProcessStatus) -> bool:
    """Return whether a stopped process was suspended by Ctrl-Z: its group's leader is stopped and not in the foreground."""
    leader = status_of(status.group)
    return status.terminal != 0 and status.foreground != status.group and leader is not None and leader.stopped


# Longest part of a host's name in a mark: file names have at most 255 bytes.
_MOST_OF_HOST = 40
_MARK = re.compile(r"(\d+)-(\d*)@([A-Za-z0-9._-]+)")


@dataclass(frozen=True)
class ProcessMark:
    """Unique ID of a process.

    Attributes:
        number: process ID.
        begun: start time in clock ticks since the machine started; "" if unknown.
        place: host and PID namespace. Processes with the same place can see each other.
    """

    number: int
    begun: str
    place: str

    def __str__(self) -> str:
        return f"{self.number}-{self.begun}@{self.place}"

    @classmethod
    def parse(cls, text: str) -> ProcessMark | None:
        """Return the mark with this text form; None for any other text."""
        match = _MARK.fullmatch(text)
        return None if match is None else cls(int(match[1]), match[2], match[3])

    @property
    def lives(self) -> bool | None:
        """Whether the process is alive; None if that cannot be determined from this machine or PID namespace."""
        if self.place != process_place() or not self.begun:
            return None
        if started := start_ticks(self.number):
            return started == self.begun
        try:
            os.kill(self.number, 0)
        except PermissionError:  # a process of another user, which the system hides
            return None
        except OSError:
            return False
        return False  # a zombie


def own_mark() -> ProcessMark:
    """Return the mark of this process."""
    return ProcessMark(os.getpid(), start_ticks(os.getpid()), process_place())


def start_ticks(process: int) -> str:
    """Return the start time of a process in clock ticks since the machine started; "" if it has ended, even as a zombie."""
    status = status_of(process)
    return "" if status is None or status.dead else str(status.begun)


def process_namespace() -> str:
    """Return the identity of the machine's boot and of the PID namespace.

    Raises:
        OSError: the system does not provide them.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


@cache
def process_place() -> str:
    """Return the host's name with a digest of the boot and the PID namespace, since each of them has its own process IDs."""
    try:
        numbered = process_namespace()
    except OSError:
        numbered = os.urandom(16).hex()  # unlike every other mark, as processes cannot be compared
    host = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node())[:_MOST_OF_HOST] or "host"
    return f"{host}-{hashlib.sha256(numbered.encode()).hexdigest()[:8]}"
