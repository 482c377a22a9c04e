"""Errors that a user can cause and mend.

Each message is one full sentence with the value, the rule and the nearest legal value. They are raised alike on every
rank before any communication, so that no rank is left waiting for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class HpctrainError(Exception):
    """Base of all errors that are the user's to mend; the command line prints the sentence and no traceback.

    Attributes:
        ranks: those of the world at which the cause lies, where the ranks know them; empty: it is nobody's in particular.
        said_by: the rank of the world that says it for all those that raise it alike; None: not known to be raised alike.
    """

    def __init__(self, *arguments: object, ranks: Sequence[int] = ()) -> None:
        super().__init__(*arguments)
        self.ranks = tuple(ranks)
        self.said_by: int | None = None

    def of_all_ranks(self, said_by: int = 0) -> Self:
        """Return this error, which all ranks of a group raise alike, so that one of them says it."""
        self.said_by = said_by
        return self


class ConfigError(HpctrainError):
    """A configuration that cannot be used: unknown key, wrong type, value outside its range."""


class OptionError(ConfigError):
    """An option that is unknown, missing, reserved, of the wrong type or outside its range.

    `option` is its name; empty if the error was raised on another rank.
    """

    def __init__(self, sentence: str, option: str = "", *, ranks: Sequence[int] = ()) -> None:
        super().__init__(sentence, ranks=ranks)
        self.option = option


class DataError(HpctrainError):
    """A data file that is missing, truncated, or does not hold what the configuration says."""


class ShapeError(HpctrainError):
    """Layers, images or a process grid whose sizes do not fit together."""


class LaunchError(HpctrainError):
    """A job that was not started as asked for: wrong world size, oversubscribed cores. The first rank of each node says so."""


class MissingLibraryError(LaunchError):
    """A library that a node lacks: each of its ranks finds that out by itself, and its first rank says so for all of them."""


class CheckpointError(HpctrainError):
    """A checkpoint that is missing, damaged, or belongs to another model."""


class CheckpointRemovedError(CheckpointError):
    """Another process removed a checkpoint's files while it was written. The disk works; the next checkpoint may succeed."""


class DivergedError(HpctrainError):
    """The loss or a gradient is no longer finite."""


class CorruptedStateError(HpctrainError):
    """Parameters or other state that ranks must hold alike and do not, or that has changed while nothing wrote to it."""


class BackendError(HpctrainError):
    """A backend or kernel set that is absent, or cannot compute what was asked for."""


class CommunicationTimeoutError(HpctrainError):
    """An operation among ranks that did not complete before its deadline."""


class DeadlockError(CommunicationTimeoutError):
    """Ranks that wait for each other without end, found before any deadline; the message names who waits where for whom."""


class RankLostError(HpctrainError):
    """A rank that is gone, as its process has died or its node: its operations, and those that wait for it, cannot complete."""


class CollectiveMismatchError(CommunicationTimeoutError):
    """Ranks that posted different operations where they must post the same; the message names both and their lines."""


class RunOwnedError(HpctrainError):
    """Another job owns the run directory, or has taken it over."""
