"""Samples that a disk does not give back: how often they are tried, and whether others stand in for them."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hpctrain.core.errors import DataError

#: seconds before a sample is read again, one for each time
PAUSES_SECONDS = (0.1, 0.4, 1.6)
#: of the deadline, that pauses for one sample may take in all
_SHARE_OF_DEADLINE = 0.25
# The text of HDF5 for what a system call has said.
_HDF5_REASON = re.compile(r"error message = '([^']*)'")


class UnreadableError(DataError):
    """Samples that cannot be read; the sentence names the file, the sample and the reason."""


@runtime_checkable
class HasStandIns(Protocol):
    """Images of which some may be others in their places."""

    @property
    def replaced(self) -> Mapping[int, int]:
        """By sample that could not be read, the one that is read in its place; the same object, which grows."""


def stand_ins(images: object) -> Mapping[int, int]:
    """The samples that were read in the places of others, as `HasStandIns.replaced`; none for images that have no such."""
    return images.replaced if isinstance(images, HasStandIns) else {}


@dataclass(frozen=True)
class ReadPolicy:
    """How a rank reads.

    Attributes:
        most: samples of the file that others may stand in for; None: the first that cannot be read is an error.
        place: of the reader, at the end of sentences, as in " (on rank 1 of 4, node7)".
        pauses_seconds: before a sample is read again.
    """

    most: int | None = None
    place: str = ""
    pauses_seconds: tuple[float, ...] = PAUSES_SECONDS


def pauses_within(deadline_seconds: float) -> tuple[float, ...]:
    """The pauses that leave a deadline most of its time."""
    return tuple(_fitting(deadline_seconds * _SHARE_OF_DEADLINE))


def _fitting(seconds: float) -> Iterator[float]:
    for pause in PAUSES_SECONDS:
        seconds -= pause
        if seconds < 0:
            return
        yield pause


def reason(error: BaseException) -> str | None:
    """The words of the operating system for an error of it or of HDF5, as "Input/output error"; None where it is another."""
    if not isinstance(error, OSError):
        return None
    found = _HDF5_REASON.search(str(error))
    if found is not None and found[1] != "Success":
        return found[1]
    # h5py's errors have no number that could be trusted, and long texts.
    known = error.strerror is not None and error.errno is not None and error.errno in errno.errorcode
    return error.strerror if known and "(" not in str(error.strerror) else None
