"""Errors that a user can cause and fix.

A message is one or more full sentences, with the value and the rule. An error that a single rank detects is raised on all ranks
(`comm.base.raise_on_all_ranks`), so that no rank is left waiting for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self


class HpctrainError(Exception):
    """Base class of all errors that the user can fix. The command line prints the message without a traceback.

    Attributes:
        ranks: ranks of the world that caused the error; empty if unknown or if no particular rank did.
        reported_by: rank of the world that prints the error for all ranks that raise it; None if it is unknown whether other
            ranks raise it.
    """

    def __init__(self, *arguments: object, ranks: Sequence[int] = ()) -> None:
        super().__init__(*arguments)
        self.ranks = tuple(ranks)
        self.reported_by: int | None = None

    def of_all_ranks(self, reported_by: int = 0) -> Self:
        """Mark this error as raised by all ranks of a group, so that only one rank prints it; return the error."""
        self.reported_by = reported_by
        return self


class ConfigError(HpctrainError):
    """Error for a configuration that cannot be used: unknown key, wrong type, value outside its range."""


class OptionError(ConfigError):
    """Error for an option that is unknown, missing, reserved, of the wrong type or outside its range.

    Attributes:
        option: name of the option; empty if the error was raised on another rank.
        known: names of the options that exist, if there is no option of this name.
        fault: first part of the sentence, without advice, so that a caller can add its own; empty if there are no parts.
    """

    def __init__(self, sentence: str, option: str = "", *, known: Sequence[str] = (), ranks: Sequence[int] = ()) -> None:
        super().__init__(sentence, ranks=ranks)
        self.option = option
        self.known = tuple(known)
        self.fault = ""

    @classmethod
    def of_parts(cls, fault: str, advice: str, option: str, known: Sequence[str] = ()) -> Self:
        """Return an error with the sentence "FAULT; ADVICE.". The advice may be empty."""
        error = cls(f"{'; '.join(filter(None, (fault, advice)))}.", option, known=known)
        error.fault = fault
        return error


class DataError(HpctrainError):
    """Error for a data file that is missing, truncated, or does not contain the configured data."""


class ShapeError(HpctrainError):
    """Error for sizes of layers, images or the process grid that do not fit together."""


class LaunchError(HpctrainError):
    """Error for a job that was not started as requested, such as a wrong world size. The first rank of each node prints it."""


class MissingLibraryError(LaunchError):
    """Error for a library that a node lacks. Each of its ranks detects it without communication; the first of them prints it."""


class CheckpointError(HpctrainError):
    """Error for a checkpoint that is missing, damaged, does not fit the model or the run, or cannot be written."""


class CheckpointRemovedError(CheckpointError):
    """Error for a checkpoint whose files another process removed while it was written. The next checkpoint may succeed."""


class DivergedError(HpctrainError):
    """Error for a loss, gradient or parameter that is not finite."""


class CorruptedStateError(HpctrainError):
    """Error for state that differs between ranks that must hold equal copies, or has changed although nothing wrote to it."""


class BackendError(HpctrainError):
    """Error for a backend or kernel set that is not available, or does not support the requested computation."""


class CommunicationTimeoutError(HpctrainError):
    """Error for an operation between ranks that did not complete before its deadline."""


class DeadlockError(CommunicationTimeoutError):
    """Error for ranks that wait for each other forever; the message names all waiting ranks and their partners."""


class CollectiveMismatchError(CommunicationTimeoutError):
    """Error for ranks that post different collective operations at one place; the message names both and their lines of code."""


class RunOwnedError(HpctrainError):
    """Error for a run directory that another job owns or has taken over."""


@contextmanager
def errors_as(
    kind: type[HpctrainError],
    sentence: Callable[[str], str],
    reason: Callable[[Exception], str | None] = lambda error: getattr(error, "strerror", None),
) -> Iterator[None]:
    """Replace every exception of a block that reads a file of another program by an error that the user can fix.

    For a damaged file, libraries and plain code raise exceptions of almost any type.

    Args:
        kind: class of the error.
        sentence: function from the reason to the message.
        reason: function that returns the reason of an exception; None: the first line of its message.

    Raises:
        HpctrainError: the block raised an exception; an HpctrainError is unchanged.
    """
    try:
        yield
    except HpctrainError:
        raise
    except Exception as error:
        why = reason(error) or (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise kind(sentence(why)) from error
