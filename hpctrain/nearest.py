"""The end of a sentence about a name that is unknown: the known one that was probably meant, or all that there are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_CUTOFF = 0.5  # of difflib's similarity: one wrong letter in three still finds a word
_MOST_LISTED = 30
_MOST_COMPARED = 200


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The most similar of `names`; None where none is similar."""
    if len(name) > _MOST_COMPARED:  # no name is similar to it, and the comparison would be slow
        return None
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=_CUTOFF)), None)


def choices(name: str, names: Iterable[str]) -> str:
    """The end of a sentence, without its full stop: the nearest of `names`, and the others where they are not too many."""
    quoted = {known: f'"{known}"' for known in names}
    if len(quoted) < 2:
        return f"there is only {next(iter(quoted.values()))}" if quoted else "there are none"
    listed = ", ".join(quoted.values())
    few = len(quoted) <= _MOST_LISTED
    near = nearest(name, quoted)
    if near is None:
        return f"there are {listed}" if few else f"there are {len(quoted)}, such as {next(iter(quoted.values()))}"
    return f"the nearest is {quoted[near]} (of {listed})" if few else f"the nearest is {quoted[near]}"
