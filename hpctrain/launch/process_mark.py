"""Unique names of processes. The system reuses process numbers, so a mark also has the start time and the namespace."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpctrain.launch.processes import status_of

# Longest part of a host's name in a mark: file names have at most 255 bytes.
_MOST_OF_HOST = 40
_MARK = re.compile(r"(\d+)-(\d*)@([A-Za-z0-9._-]+)")


@dataclass(frozen=True)
class ProcessMark:
    """The unique name of a process.

    Args:
        number: of the process. begun: its start, in ticks since the machine's start; "" if unknown.
        place: the host and the namespace of process numbers. Processes with the same place can see each other.
    """

    number: int
    begun: str
    place: str

    def __str__(self) -> str:
        return f"{self.number}-{self.begun}@{self.place}"

    @classmethod
    def parse(cls, text: str) -> ProcessMark | None:
        """Return the mark from its text form (`str`); None for any other text."""
        match = _MARK.fullmatch(text)
        return None if match is None else cls(int(match[1]), match[2], match[3])

    @property
    def lives(self) -> bool | None:
        """Whether the process is alive; None if that cannot be seen from this machine or namespace."""
        if self.place != place() or not self.begun:
            return None
        if started := begun(self.number):
            return started == self.begun
        try:
            os.kill(self.number, 0)
        except PermissionError:  # a process of another user, which the system hides
            return None
        except OSError:
            return False
        return False  # a zombie


def own() -> ProcessMark:
    """Return the mark of this process."""
    return ProcessMark(os.getpid(), begun(os.getpid()), place())


def begun(process: int) -> str:
    """Return the start of a process, in ticks since the machine's start; "" if it has ended, even as a zombie."""
    status = status_of(process)
    return "" if status is None or status.dead else str(status.begun)


def namespace() -> str:
    """Return the identity of the machine's boot and of the namespace of process numbers.

    Raises:
        OSError: the system does not provide them.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


@cache
def place() -> str:
    """Return the host's name with a digest of `namespace`: process numbers start again in a container and after a reboot."""
    try:
        numbered = namespace()
    except OSError:
        numbered = os.urandom(16).hex()  # matches no other process, as none can be compared
    host = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node())[:_MOST_OF_HOST] or "host"
    return f"{host}-{hashlib.sha256(numbered.encode()).hexdigest()[:8]}"
