"""The line of the program that posts an operation, found in a fraction of a microsecond."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

_PACKAGE = Path(__file__).parents[1]  # as code objects name it: links are not followed
# These post on behalf of others.
_INSIDE = (_PACKAGE / "comm", _PACKAGE / "flight")
# A program that makes its code while it runs has new places without end, for which the record has no room.
_MOST_PLACES = 4096


class SourceLines:
    """Remembers the line of each place in the program that it is asked about: looking one up decodes tables, and makes a text.

    Args:
        name: gives the number that stands for a text.
    """

    def __init__(self, name: Callable[[str], int]) -> None:
        self._name = name
        #: by code object and instruction; None: a place inside of the packages that post for others
        self._known: dict[tuple[int, int], int | None] = {}
        self._codes: dict[int, CodeType] = {}  # kept, so that no other one gets its number

    def place(self, frame: FrameType | None) -> int:
        """The number of "file:line" of the first frame, from this one outwards, that posts for itself; 0 where there is none."""
        known = self._known
        while frame is not None:
            key = (id(frame.f_code), frame.f_lasti)
            try:
                place = known[key]
            except KeyError:
                place = self._look_up(frame, key)
            if place is not None:
                return place
            frame = frame.f_back
        return 0

    def _look_up(self, frame: FrameType, key: tuple[int, int]) -> int | None:
        if len(self._known) >= _MOST_PLACES:
            return 0
        path = Path(frame.f_code.co_filename)
        place = None if any(folder in path.parents for folder in _INSIDE) else self._name(_text(path, frame.f_lineno))
        self._codes[key[0]] = frame.f_code
        self._known[key] = place
        return place


def _text(path: Path, line: int) -> str:
    """A line, in a file of the package as seen from there."""
    within = path.relative_to(_PACKAGE) if _PACKAGE in path.parents else path
    return f"{within}:{line}"
