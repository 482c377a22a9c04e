"""Other processes of this machine, as the system shows them: their state, their parents, and those that a rank depends on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_DEAD, _STOPPED = "ZX", "Tt"
# A launcher's process on the first node is a child of the command that people start, whose name begins like one of these.
_COMMANDS = ("mpiexec", "mpirun", "prterun", "srun")


@dataclass(frozen=True)
class ProcessStatus:
    """The state of a process.

    Attributes:
        state: a letter, as of proc(5). parent, group: numbers of processes. terminal: that controls it; 0: none. foreground: the
            group in the foreground of the terminal. begun: when it began, in ticks since the machine did.
    """

    state: str
    parent: int
    group: int
    terminal: int
    foreground: int
    begun: int

    @property
    def dead(self) -> bool:
        """Whether it has ended, though its parent may not have asked yet."""
        return self.state in _DEAD

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.state in _STOPPED


def status_of(process: int) -> ProcessStatus | None:
    """Return the status of a process; None where there is none, or the system hides it."""
    try:
        # "pid (name) state parent ...", where the name may hold blanks and brackets
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return ProcessStatus(fields[0], *(int(fields[place]) for place in (1, 2, 4, 5, 19)))
    except (OSError, ValueError, IndexError):
        return None


def launcher_process(rank_variable: str | None) -> int:
    """Return the launcher's process on this node: the nearest ancestor without a rank; 0 where it is not to be seen.

    Args:
        rank_variable: the environment variable that gives a rank; None: there is no launcher.
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
    """A process without which this one cannot end in good order. Time is counted in looks, as of the pulse.

    Attributes:
        number: of the process. name: of its program. gone: it has ended. stopped_seconds: that it has been stopped for.
    """

    def __init__(self, number: int) -> None:
        self.number, self.name = number, _name(number)
        self._first = status_of(number)
        self.gone, self.stopped_seconds = False, 0.0

    def look(self, seconds: float) -> None:
        """Look at it, every so many seconds. One that could not be seen at the start is never gone."""
        if self._first is None:
            return
        status = status_of(self.number)
        self.gone = status is None or status.dead or status.begun != self._first.begun
        stopped = status is not None and status.stopped and not _is_suspended_at_terminal(status)
        self.stopped_seconds = self.stopped_seconds + seconds if stopped else 0.0


def launchers(rank_variable: str | None) -> Sequence[WatchedProcess]:
    """Return the launcher's process on this node and, where it is a child of the launcher's command, that one."""
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
    """Whether a person has suspended a stopped process by Ctrl-Z: all of its group is stopped, and not in the foreground."""
    leader = status_of(status.group)
    return status.terminal != 0 and status.foreground != status.group and leader is not None and leader.stopped
