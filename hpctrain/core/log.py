"""The log: one line per event on stderr, from rank 0 unless a message concerns a single rank, and log files of single ranks.

On request, a rank writes a file with everything that it logs and prints. A thread writes the file, so that a disk that hangs, is
full or is gone does not block the run; lines are buffered meanwhile.
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
from collections.abc import Iterator
from pathlib import Path

from hpctrain.core.files import open_regular
from hpctrain.core.text import beginning_with, colours, counted, escaped, place

#: maximum number of lines that wait for the file or the disk; beyond it the oldest ones are dropped
MOST_WAITING = 10_000

_FILE_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s"
_TIME = "%Y-%m-%d %H:%M:%S"
# Interval between attempts to write after a failure.
_AGAIN_SECONDS = 5.0
# Maximum time that the end of the process waits for the disk.
_LAST_SECONDS = 1.0
_LOOK_SECONDS = 1e-3

_log = logging.getLogger(__name__)


class RankLog(logging.Handler):
    """Log file of a rank. It accepts log records and other lines from any thread, without waiting for a disk.

    Lines are buffered until `keep_in` sets the file. A failed write is logged once, and retried until it succeeds.
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
        """Queue one or more formatted lines for the file."""
        self._dropped += len(self._waiting) == MOST_WAITING
        self._waiting.append(escaped(line, keep="\n\t"))
        self._wake.set()

    def keep_in(self, path: Path) -> None:
        """Append lines to this file, beginning with the buffered ones, and create its directory if it is missing."""
        self._path = path
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hpctrain-log", daemon=True)
            self._thread.start()
        self._wake.set()

    def flush(self) -> None:
        """Wait until all lines are written or a write has failed, for at most a second."""
        if self._thread is not None and self._thread is not threading.current_thread():
            deadline = time.monotonic() + _LAST_SECONDS
            while self._waiting and not self._refused and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Write the buffered lines, wait for the thread to end, and log the number of lost lines. A second call is harmless."""
        if not self._closed:
            self.flush()
            self._closed = True
            self._wake.set()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(_LAST_SECONDS)
            lost = len(self._waiting) + self._dropped
            if self._path is not None and lost:
                _log.warning("%s of %s could not be written and are lost.", counted(lost, "line"), self._path)
        super().close()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(_AGAIN_SECONDS if self._refused else None)
            self._wake.clear()
            if self._refused:
                # Each line wakes this thread, but the disk recovers slowly.
                time.sleep(0.0 if self._closed else _AGAIN_SECONDS / 10)
            try:
                self._write()
            except OSError as error:
                if not (self._refused or self._closed):  # after `close`, the log's own handlers may be gone
                    _log.warning("The log %s cannot be written (%s); the run continues and retries.", self._path, error.strerror)
                self._refused = True
            else:
                self._refused = False

    def _write(self) -> None:
        """Append all buffered lines, in writes of whole lines.

        Raises:
            OSError: a write failed; its line and all later ones stay in the buffer.
        """
        assert self._path is not None
        if not self._waiting:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            while self._waiting:
                line = self._waiting[0]
                os.write(descriptor, f"{line}\n".encode(errors="backslashreplace"))
                with contextlib.suppress(IndexError, ValueError):
                    self._waiting.remove(line)  # it may be gone: too many new lines have replaced it
        finally:
            os.close(descriptor)


_OF_PROCESS: list[RankLog] = []


def begin_rank_log() -> RankLog:
    """Return the log file of this process; the first call creates it."""
    if not _OF_PROCESS:
        _OF_PROCESS.append(RankLog())
    return _OF_PROCESS[-1]


def current_rank_log() -> RankLog | None:
    """Return the log file of this process; None if it has none."""
    return _OF_PROCESS[-1] if _OF_PROCESS else None


def end_rank_log() -> None:
    """Close the log file of this process if it has one."""
    if _OF_PROCESS:
        _OF_PROCESS.pop().close()


def tee(text: str, level: int = logging.ERROR, *, last: bool = False) -> None:
    """Also write text that was printed without the log to this process's log file, if it has one. Any thread may call it.

    Args:
        last: whether the process is about to end; if so, wait for the disk, for at most a second.
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


def configure(rank: int, size: int | None = None, *, level: int = logging.INFO) -> None:
    """Send the package's log to stderr: records of rank 0 from `level` on, and marked warnings and errors of the others.

    A rank that keeps a log file (`begin_rank_log`) also writes all records to it.

    Args:
        size: number of ranks of the job; None if unknown.
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


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """At the end, restore the handlers, levels and propagation that `configure` and `leave_warnings_to_rank_0` change."""
    loggers = [logging.getLogger(name) for name in ("hpctrain", "py.warnings")]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)


def leave_warnings_to_rank_0(rank: int) -> None:
    """Suppress Python's own warnings, which all ranks raise alike, on stderr of ranks other than 0, unless -W is set."""
    if rank == 0 or sys.warnoptions:
        return
    warnings_log, kept = logging.getLogger("py.warnings"), current_rank_log()
    warnings_log.addHandler(logging.NullHandler() if kept is None else kept)
    warnings_log.propagate = False
    if "error" not in {action for action, *_ in warnings.filters}:
        logging.captureWarnings(True)


class _WholeLines(logging.StreamHandler):
    """Handler that writes a record at once, with rank and host before each line; a terminal shows warnings in colour."""

    def __init__(self, beginning: str) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
        self._beginning = beginning
        try:
            self._colours = colours(self.stream.fileno(), os.environ)
        except (OSError, ValueError):  # streams of tests and notebooks have no descriptor
            self._colours = False

    def format(self, record: logging.LogRecord) -> str:
        lines = beginning_with(self._beginning, super().format(record)).removesuffix("\n")
        if not self._colours or record.levelno < logging.WARNING:
            return lines
        return f"{_RED if record.levelno >= logging.ERROR else _YELLOW}{lines}{_PLAIN}"
