"""Other processes of this machine: their state, their parents, and the launcher's processes, on which a rank depends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_DEAD, _STOPPED = "ZX", "Tt"
# On the first node the launcher's process is a child of the command that users start; its name begins with one of these.
_COMMANDS = ("mpiexec", "mpirun", "prterun", "srun")


@dataclass(frozen=True)
class ProcessStatus:
    """The state of a process.

    Attributes:
        state: a letter, see proc(5). parent, group: numbers of processes. terminal: its controlling terminal; 0: none.
            foreground: the foreground group of the terminal. begun: its start, in ticks since the machine's start.
    """

    state: str
    parent: int
    group: int
    terminal: int
    foreground: int
    begun: int

    @property
    def dead(self) -> bool:
        """Whether it has ended; it may still be a zombie."""
        return self.state in _DEAD

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
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
    """Return the number of the launcher's process on this node, the nearest ancestor without a rank; 0 if it is not visible.

    Args:
        rank_variable: the environment variable with the rank; None: there is no launcher.
    """
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
    """A process without which this one cannot end in good order. Time is counted in looks, as in `Pulse`.

    Attributes:
        number: of the process. name: of its program. gone: whether it has ended. stopped_seconds: how long it has been stopped.
    """

    def __init__(self, number: int) -> None:
        self.number, self.name = number, _name(number)
        self._first = status_of(number)
        self.gone, self.stopped_seconds = False, 0.0

    def look(self, seconds: float) -> None:
        """Update the state; call it every `seconds`. A process that was not visible at the start never counts as gone."""
        if self._first is None:
            return
        status = status_of(self.number)
        self.gone = status is None or status.dead or status.begun != self._first.begun
        stopped = status is not None and status.stopped and not _is_suspended_at_terminal(status)
        self.stopped_seconds = self.stopped_seconds + seconds if stopped else 0.0


def launchers(rank_variable: str | None) -> Sequence[WatchedProcess]:
    """Return the launcher's process on this node and, if its parent is the launcher's command, the parent as well."""
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
