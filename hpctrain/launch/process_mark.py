"""Processes by more than their number, which comes again: with their start, and the place in which they are numbered."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpctrain.launch.processes import status_of

# Of a host's name in a mark: file names have 255 bytes.
_MOST_OF_HOST = 40
_MARK = re.compile(r"(\d+)-(\d*)@([A-Za-z0-9._-]+)")


@dataclass(frozen=True)
class ProcessMark:
    """A process as others can name it.

    Args:
        number: in its place. begun: ticks from the machine's start to that of the process; "" where the system does not say.
        place: the host and the namespace of process numbers. Two processes of one place can see each other.
    """

    number: int
    begun: str
    place: str

    def __str__(self) -> str:
        return f"{self.number}-{self.begun}@{self.place}"

    @classmethod
    def parse(cls, text: str) -> ProcessMark | None:
        """Return the mark that `str` has written; None for any other text."""
        match = _MARK.fullmatch(text)
        return None if match is None else cls(int(match[1]), match[2], match[3])

    @property
    def lives(self) -> bool | None:
        """Whether the process lives; None where nobody can see that from here."""
        if self.place != place() or not self.begun:
            return None
        if started := begun(self.number):
            return started == self.begun
        try:
            os.kill(self.number, 0)
        except PermissionError:  # of another user, whose processes the system hides
            return None
        except OSError:
            return False
        return False  # a zombie


def own() -> ProcessMark:
    """Return the mark of this process."""
    return ProcessMark(os.getpid(), begun(os.getpid()), place())


def begun(process: int) -> str:
    """Return the start of a process in ticks since the machine's; "" where it has ended, even if its parent has not asked yet."""
    status = status_of(process)
    return "" if status is None or status.dead else str(status.begun)


def namespace() -> str:
    """Return the machine's start and the namespace of process numbers.

    Raises:
        OSError: the system does not say.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


@cache
def place() -> str:
    """Return the host's name with a digest of `namespace`: containers and reboots number processes anew."""
    try:
        numbered = namespace()
    except OSError:
        numbered = os.urandom(16).hex()  # no other process can be seen from here
    host = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node())[:_MOST_OF_HOST] or "host"
    return f"{host}-{hashlib.sha256(numbered.encode()).hexdigest()[:8]}"
