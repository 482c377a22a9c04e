"""Files that a training can do without: their disk may be full or gone, and the training goes on.

Metrics, traces, schedules and what other reporters write are for people and for later; a disk that refuses them is told once,
what can be written later is, and what was lost is said at the end. Checkpoints are no such files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpctrain.log import get_logger

#: records that are kept in memory until they can be written; the oldest ones go first
MOST_WAITING = 100_000

_log = get_logger(__name__)


class Bookkeeping:
    """Tries to write, and remembers what it has told. One thread at a time."""

    def __init__(self) -> None:
        self._failing: dict[str, str] = {}

    def attempt(self, what: str, write: Callable[[], object]) -> bool:
        """Call `write`; False where the system refused it, which is told unless the last attempt at the same ended alike.

        Args:
            what: is written, for the sentence: "metrics".

        Raises:
            BrokenPipeError: nobody reads any more.
        """
        try:
            write()
        except BrokenPipeError:
            raise
        except OSError as error:
            why = reason(error)
            if self._failing.get(what) != why:
                _log.warning("The %s cannot be written (%s); the run goes on and will try again.", what, why)
            self._failing[what] = why
            return False
        if self._failing.pop(what, None) is not None:
            _log.warning("The %s can be written again.", what)
        return True

    def lost(self, what: str, extent: str) -> None:
        """Say at the end what is missing. extent: as in "3 lines"."""
        _log.warning("%s of the %s could not be written (%s) and are lost.", extent, what, self._failing.get(what, "no reason"))


class PatientRecords:
    """Records that are written in their order as soon as that is possible.

    Args:
        append: writes one, whole or not at all.
    """

    def __init__(self, bookkeeping: Bookkeeping, what: str, append: Callable[[Mapping[str, Any]], None]) -> None:
        self._bookkeeping, self._what, self._append = bookkeeping, what, append
        self._waiting: list[Mapping[str, Any]] = []
        self._dropped = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Write a record, after those that wait."""
        self._waiting.append(record)
        if len(self._waiting) > MOST_WAITING:
            del self._waiting[0]
            self._dropped += 1
        self._bookkeeping.attempt(self._what, self._write)

    def close(self) -> None:
        """The last attempt; say what is lost. May be called twice."""
        if self._waiting:
            self._bookkeeping.attempt(self._what, self._write)
        lost = len(self._waiting) + self._dropped
        if lost:
            self._bookkeeping.lost(self._what, f"{lost} {'line' if lost == 1 else 'lines'}")
        self._waiting, self._dropped = [], 0

    def _write(self) -> None:
        while self._waiting:
            self._append(self._waiting[0])
            del self._waiting[0]


def reason(error: OSError) -> str:
    """The system's words."""
    return error.strerror or str(error)
