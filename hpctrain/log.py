"""One line of log per event, from rank 0 unless a message concerns one rank alone."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from hpctrain.core import log
from hpctrain.speaker import beginning_with, colours, place

_FORMAT = "%(asctime)s %(levelname).1s %(message)s"
_YELLOW, _RED, _PLAIN = "\x1b[33m", "\x1b[31m", "\x1b[0m"


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; `name` is the module's `__name__`."""
    return logging.getLogger(name)


def configure(rank: int, size: int | None = None, *, level: int = logging.INFO) -> None:
    """Send the package's log to stderr: everything from rank 0, warnings and worse from the others, which give their place.

    A rank that keeps a log file (`rank_log.begin`) writes everything there, too.

    Args:
        size: ranks of the job; None: unknown.
    """
    root = logging.getLogger("hpctrain")
    for old in list(root.handlers):
        root.removeHandler(old)
    handler = _WholeLines("" if rank == 0 else place(rank, size))
    handler.setLevel(level if rank == 0 else max(level, logging.WARNING))
    root.addHandler(handler)
    kept = log.own()
    if kept is not None:
        root.addHandler(kept)
    root.setLevel(handler.level if kept is None else logging.DEBUG)
    root.propagate = False


def leave_warnings_to_rank_0(rank: int) -> None:
    """Keep Python's own warnings, which all ranks meet alike, off the terminal on other ranks than 0, which log them to files."""
    if rank == 0 or sys.warnoptions:
        return
    warnings_log, kept = logging.getLogger("py.warnings"), log.own()
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
