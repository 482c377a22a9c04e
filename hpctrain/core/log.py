"""A file with all that one rank logs and says, which a job of many ranks keeps for the ranks that are asked for.

A thread writes it, so that a disk that hangs, is full or gone holds up nothing: lines wait, and the run goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path

from hpctrain.core.text import escaped

#: lines that wait for the file, or for a disk that takes them; the oldest ones go first
MOST_WAITING = 10_000

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"
# From one attempt to the next, where a disk refuses lines.
_AGAIN_SECONDS = 5.0
# What an end of the process waits for the disk.
_LAST_SECONDS = 1.0
_LOOK_SECONDS = 1e-3

_log = logging.getLogger(__name__)


class RankLog(logging.Handler):
    """Takes records of the log and other lines from any thread, without waiting for a disk.

    Lines wait until `keep_in` names the file. What cannot be written is told once, and tried again.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter(_FORMAT, _TIME))
        self._waiting: deque[str] = deque(maxlen=MOST_WAITING)
        self._wake = threading.Event()
        self._closed = self._refused = False
        self._dropped = 0
        self._path: Path | None = None
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.add(self.format(record))

    def add(self, line: str) -> None:
        """Write a formatted line, or several."""
        self._dropped += len(self._waiting) == MOST_WAITING
        self._waiting.append(escaped(line, keep="\n\t"))
        self._wake.set()

    def keep_in(self, path: Path) -> None:
        """From now on lines go to the end of this file, whose directory is made; those that wait come first."""
        self._path = path
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hpctrain-log", daemon=True)
            self._thread.start()
        self._wake.set()

    def flush(self) -> None:
        """Wait until all lines are written, for a second at most."""
        if self._thread is not None and self._thread is not threading.current_thread():
            end = time.monotonic() + _LAST_SECONDS
            while self._waiting and not self._refused and time.monotonic() < end:
                time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Write what waits, where the disk takes it; say how much it did not. May be called twice."""
        if not self._closed:
            self.flush()
            self._closed = True
            self._wake.set()
            lost = len(self._waiting) + self._dropped
            if self._path is not None and lost:
                _log.warning("%d %s of %s could not be written and are lost.", lost, "line" if lost == 1 else "lines", self._path)
        super().close()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(_AGAIN_SECONDS if self._refused else None)
            self._wake.clear()
            if self._refused:
                time.sleep(0.0 if self._closed else _AGAIN_SECONDS / 10)  # lines come faster than a disk is mended
            try:
                self._write()
            except OSError as error:
                if not self._refused:
                    _log.warning("The log %s cannot be written (%s); the run goes on without it.", self._path, error.strerror)
                self._refused = True
            else:
                self._refused = False

    def _write(self) -> None:
        """Append all lines that wait, in writes of whole lines.

        Raises:
            OSError: the disk refuses one; it and those behind it wait.
        """
        assert self._path is not None
        if not self._waiting:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            while self._waiting:
                line = self._waiting[0]
                os.write(descriptor, f"{line}\n".encode(errors="backslashreplace"))
                with contextlib.suppress(IndexError, ValueError):
                    self._waiting.remove(line)  # not the first one any more, where there were too many meanwhile
        finally:
            os.close(descriptor)


_OF_PROCESS: list[RankLog] = []


def begin() -> RankLog:
    """The log file of this process; it is made at the first call."""
    if not _OF_PROCESS:
        _OF_PROCESS.append(RankLog())
    return _OF_PROCESS[-1]


def own() -> RankLog | None:
    """The log file of this process; None where it keeps none."""
    return _OF_PROCESS[-1] if _OF_PROCESS else None


def end() -> None:
    """Close the log file of this process, where there is one."""
    if _OF_PROCESS:
        _OF_PROCESS.pop().close()


def also(text: str, level: int = logging.ERROR, *, last: bool = False) -> None:
    """Keep what was said past the log in this process's log file, too, where there is one. From any thread.

    last: the process is about to end; wait for the disk, for a second at most.
    """
    log = own()
    if log is None:
        return
    record = logging.LogRecord("hpctrain", level, "", 0, "%s", (text.rstrip("\n"),), None)
    log.add(log.format(record))
    if last:
        log.flush()
