"""Parts that all converters share: class names, chunks, images decoded in parallel but in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from hpctrain.data.files import require_file, system_errors_as
from hpctrain.errors import DataError
from hpctrain.launch.cpu_quota import whole_quota

Item = TypeVar("Item")
Result = TypeVar("Result")
#: called with the number of samples that were just done
Advance = Callable[[int], None]

_CHUNK_BYTES = 16 << 20
_MOST_CLASSES = 1 << 20


def no_progress(count: int) -> None:
    """An `Advance` that shows nothing."""


def default_threads() -> int:
    """The cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, whole_quota() or cores)


def numbered_names(labels: np.ndarray) -> list[str]:
    """Class names "0", "1", ... for labels that come without names.

    Raises:
        DataError: a label that no data set has, so that there would be names without end.
    """
    largest = max(0, int(labels.max())) if labels.size else 0
    if largest >= _MOST_CLASSES:
        raise DataError(f"The largest label is {largest}, which is no class; labels without names are below {_MOST_CLASSES}.")
    return [str(label) for label in range(largest + 1)]


def in_order(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Results in the order of the items, at most 4 * threads of them in the works; an error ends the whole."""
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(max(1, threads), thread_name_prefix="hpctrain-decode") as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) >= 4 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def slices(images: np.ndarray, labels: np.ndarray, advance: Advance = no_progress) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Images that are one array (N, H, W, C), and their labels, in chunks (images, labels) of about 16 MiB."""
    step = max(1, _CHUNK_BYTES // max(1, images[:1].nbytes))
    for start in range(0, len(images), step):
        yield images[start : start + step], labels[start : start + step]
        advance(len(images[start : start + step]))


def listed(noun: str, names: Sequence[str], limit: int = 20) -> str:
    """ "2 files (a.jpg, b.jpg)" for messages; long lists are cut."""
    shown = ", ".join(names[:limit]) + (f", and {len(names) - limit} more" if len(names) > limit else "")
    return f"{len(names)} {noun}{'' if len(names) == 1 else 's'} ({shown})"


def read_names(path: Path) -> list[str]:
    """Class names from a text file, one per line.

    Raises:
        DataError: missing, not text, empty, or with a name twice.
    """
    require_file(path, "file of class names", "it holds one name a line")
    try:
        with system_errors_as(f"The file of class names {path} cannot be read"):
            names = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError(f"The file of class names {path} is no UTF-8 text; it holds one name a line.") from error
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice:
        reason = f"holds {', '.join(twice)} twice" if twice else "is empty"
        raise DataError(f"The file of class names {path} {reason}; it holds one name a line, each once.")
    return names
