"""One line of log per event, from rank 0 unless a message concerns one rank alone."""

import logging
import sys

_FORMAT = "%(asctime)s %(levelname).1s %(message)s"


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; `name` is the module's `__name__`."""
    return logging.getLogger(name)


def configure(rank: int, *, level: int = logging.INFO) -> None:
    """Send the package's log to stderr: everything from rank 0, warnings and worse from the others."""
    root = logging.getLogger("hpctrain")
    for old in list(root.handlers):
        root.removeHandler(old)
    handler = logging.StreamHandler(sys.stderr)
    prefix = "" if rank == 0 else f"[rank {rank}] "
    handler.setFormatter(logging.Formatter(prefix + _FORMAT, datefmt="%H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(level if rank == 0 else max(level, logging.WARNING))
    root.propagate = False
