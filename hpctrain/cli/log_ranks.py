"""The option `--log-ranks`: the ranks of a job that keep a log file, and the begin of this rank's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from hpctrain import log
from hpctrain.core import log as rank_log
from hpctrain.core.errors import ConfigError
from hpctrain.launch.launcher import Launcher
from hpctrain.nearest import nearest

ALL, NONE = "all", "none"
_SPANS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def log_ranks_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the option; the argument is `log_ranks`."""
    return click.option(
        "--log-ranks",
        default=NONE,
        metavar="all|none|0,3,8-15",
        help="Write all that these ranks log to logs/rank-NNNN.log in the run directory, with the time, errors and stacks.",
    )(command)


def begin_log(text: str, launcher: Launcher) -> None:
    """Log as this rank is to, where `text` is what the option was given; lines wait for their file from now on.

    Raises:
        ConfigError: it names no ranks, or one that the job does not have; the message gives the nearest that is right.
    """
    rank, size = launcher.rank or 0, launcher.expected_size or 1
    if names(text, size, rank):
        rank_log.begin()
    log.configure(rank, size)
    log.leave_warnings_to_rank_0(rank)


def names(text: str, size: int, rank: int) -> bool:
    """Whether a list of ranks has this rank of so many.

    Raises:
        ConfigError: as `begin_log`.
    """
    if text in (ALL, NONE):
        return text == ALL
    words = text.replace(" ", "")
    if not _SPANS.fullmatch(words):
        near = nearest(text, (ALL, NONE)) or ALL
        raise ConfigError(f"--log-ranks is {text!r}, but must be all, none, or ranks such as 0,3,8-15; the nearest is {near}.")
    is_named = False
    for span in words.split(","):
        first, _, end = span.partition("-")
        last = end or first
        if int(first) > int(last):
            raise ConfigError(f"--log-ranks has {span}, which begins behind its end; the nearest is {last}-{first}.")
        if int(last) >= size:
            ranks = "1 rank" if size == 1 else f"{size} ranks"
            raise ConfigError(f"--log-ranks names rank {int(last)}, but the job has {ranks}; the largest number is {size - 1}.")
        is_named = is_named or int(first) <= rank <= int(last)
    return is_named
