"""The log: one line per event on stderr, from rank 0 unless a message concerns one rank alone, and files of single ranks.

A job of many ranks keeps a file with all that a rank logs and prints, for the ranks that are asked for. A thread writes it, so
that
a disk that hangs, is full or gone holds up nothing: lines wait, and the run continues.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
from collections import deque
from pathlib import Path

from hpctrain.core.text import beginning_with, colours, escaped, place

#: lines that wait for the file, or for a disk that takes them; the oldest ones go first
MOST_WAITING = 10_000

_FILE_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"
# From one attempt to the next, where a disk refuses lines.
_AGAIN_SECONDS = 5.0
# What an end of the process waits for the disk.
_LAST_SECONDS = 1.0
_LOOK_SECONDS = 1e-3

_log = logging.getLogger(__name__)


class RankLog(logging.Handler):
    """Takes records of the log and other lines from any thread, without waiting for a disk.

    Lines wait until `keep_in` names the file. What cannot be written is reported once, and tried again.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter(_FILE_FORMAT, _TIME))
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
        """Append lines to this file from now on, and make its directory; those that wait come first."""
        self._path = path
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hpctrain-log", daemon=True)
            self._thread.start()
        self._wake.set()

    def flush(self) -> None:
        """Wait until all lines are written, for a second at most."""
        if self._thread is not None and self._thread is not threading.current_thread():
            deadline = time.monotonic() + _LAST_SECONDS
            while self._waiting and not self._refused and time.monotonic() < deadline:
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
                if not (self._refused or self._closed):  # after `close`, the log's own handlers may be gone
                    _log.warning("The log %s cannot be written (%s); the run continues without it.", self._path, error.strerror)
                self._refused = True
            else:
                self._refused = False

    def _write(self) -> None:
        """Append all lines that wait, in writes of whole lines.

        Raises:
            OSError: the disk refuses one; it and those after it wait.
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


def begin_rank_log() -> RankLog:
    """Return the log file of this process; it is made at the first call."""
    if not _OF_PROCESS:
        _OF_PROCESS.append(RankLog())
    return _OF_PROCESS[-1]


def current_rank_log() -> RankLog | None:
    """Return the log file of this process; None if it keeps none."""
    return _OF_PROCESS[-1] if _OF_PROCESS else None


def end_rank_log() -> None:
    """Close the log file of this process, if there is one."""
    if _OF_PROCESS:
        _OF_PROCESS.pop().close()


def tee(text: str, level: int = logging.ERROR, *, last: bool = False) -> None:
    """Keep what was said past the log in this process's log file, too, if there is one. From any thread.

    last: the process is about to end; wait for the disk, for a second at most.
    """
    log = current_rank_log()
    if log is None:
        return
    record = logging.LogRecord("hpctrain", level, "", 0, "%s", (text.rstrip("\n"),), None)
    log.add(log.format(record))
    if last:
        log.flush()


_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_YELLOW, _RED, _PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[0m"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one module; `name` is the module's `__name__`."""
    return logging.getLogger(name)


def configure(rank: int, size: int | None = None, *, level: int = logging.INFO) -> None:
    """Send the package's log to stderr: everything from rank 0, warnings and worse from the others, which give their place.

    A rank that keeps a log file (`begin_rank_log`) writes everything there, too.

    Args:
        size: ranks of the job; None: unknown.
    """
    root = logging.getLogger("hpctrain")
    for old in list(root.handlers):
        root.removeHandler(old)
    handler = _WholeLines("" if rank == 0 else place(rank, size))
    handler.setLevel(level if rank == 0 else max(level, logging.WARNING))
    root.addHandler(handler)
    kept = current_rank_log()
    if kept is not None:
        root.addHandler(kept)
    root.setLevel(handler.level if kept is None else logging.DEBUG)
    root.propagate = False


def leave_warnings_to_rank_0(rank: int) -> None:
    """Keep Python's own warnings, which all ranks meet alike, off the terminal on other ranks than 0, which log them to files."""
    if rank == 0 or sys.warnoptions:
        return
    warnings_log, kept = logging.getLogger("py.warnings"), current_rank_log()
    warnings_log.addHandler(logging.NullHandler() if kept is None else kept)
    warnings_log.propagate = False
    if "error" not in {action for action, *_ in warnings.filters}:
        logging.captureWarnings(True)


class _WholeLines(logging.StreamHandler):
    """Writes each record at once, with the rank's place before every line; on a terminal warnings and errors have colours."""

    def __init__(self, beginning: str) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
        self._beginning = beginning
        try:
            self._colours = colours(self.stream.fileno(), os.environ)
        except (OSError, ValueError):  # a stream of a test or a notebook
            self._colours = False

    def format(self, record: logging.LogRecord) -> str:
        lines = beginning_with(self._beginning, super().format(record)).removesuffix("\n")
        if not self._colours or record.levelno < logging.WARNING:
            return lines
        return f"{_RED if record.levelno >= logging.ERROR else _YELLOW}{lines}{_PLAIN}"
