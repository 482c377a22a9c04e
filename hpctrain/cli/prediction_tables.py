"""How predictions are printed: a table of 80 columns that grows while they are computed, or a line of JSON for each picture."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path

from rich.cells import cell_len
from rich.table import Table

from hpctrain.core.console import PlainConsole
from hpctrain.run.prediction import PredictedPicture, Predictions
from hpctrain.core.text import echo, escaped

_COLUMNS = 80  # where there is no terminal
_MOST_OF_A_NAME, _PROBABILITY, _GAP = 30, 11, 2
_AT_ONCE = 16  # pictures that become visible together


def print_lines(predictions: Predictions, *, visible: bool) -> list[Path]:
    """Print a JSON object for each picture as soon as it is known; give the files that have no prediction. Collective.

    visible: False on ranks that print nothing.
    """
    broken = []
    for picture in predictions.answers:
        if picture.error is not None:
            broken.append(picture.file)
        if visible:
            echo(json.dumps(_plain(picture)))
    return broken


def _plain(picture: PredictedPicture) -> dict[str, object]:
    if picture.error is not None:
        return {"image": str(picture.file), "error": picture.error}
    classes = [{"class": one.name, "label": one.label, "probability": one.probability} for one in picture.classes]
    return {"image": str(picture.file), "predictions": classes}


def print_table(predictions: Predictions, *, visible: bool) -> list[Path]:
    """Print the most probable classes of each picture, one below the other; the rest as `print_lines`. Collective."""
    broken = []
    form = _Form(predictions.class_names)
    if visible:
        weights = " (averaged weights)" if predictions.averaged else ""
        count = f"{len(predictions.files):,} {'image' if len(predictions.files) == 1 else 'images'}"
        echo(f"{predictions.checkpoint}{weights}: {count}")
        form.print_titles()
    while pictures := list(islice(predictions.answers, _AT_ONCE)):
        broken += [picture.file for picture in pictures if picture.error is not None]
        if visible:
            form.print_pictures(pictures)
    return broken


class _Form:
    """A table whose columns are as wide in each of its pieces."""

    def __init__(self, class_names: tuple[str, ...]) -> None:
        self._text = io.StringIO()
        width = None if sys.stdout.isatty() else _COLUMNS
        self._console = PlainConsole(file=self._text, width=width)
        self._name = min(_MOST_OF_A_NAME, max(map(cell_len, map(escaped, (*class_names, "class")))))
        self._file = self._console.width - self._name - _PROBABILITY - 2 * _GAP

    def print_titles(self) -> None:
        """The titles of the columns."""
        self._print([("image", "class", "probability")])

    def print_pictures(self, pictures: Sequence[PredictedPicture]) -> None:
        """The lines of some pictures; those of a picture without a prediction are as wide as the table."""
        for is_broken, group in groupby(pictures, lambda picture: picture.error is not None):
            if is_broken:
                for picture in group:
                    self._write(f"{_printable(picture.file)}: {picture.error}")
            else:
                self._print(line for picture in group for line in _lines(picture))

    def _print(self, lines: Iterable[tuple[str, str, str]]) -> None:
        table = Table(box=None, show_header=False, padding=(0, _GAP, 0, 0), pad_edge=False)
        table.add_column(width=self._file, overflow="fold")
        table.add_column(width=self._name, overflow="fold")
        table.add_column(width=_PROBABILITY, justify="right")
        for line in lines:
            table.add_row(*line)
        self._write(table)

    def _write(self, content: Table | str) -> None:
        self._console.print(content)
        sys.stdout.write("".join(f"{line.rstrip()}\n" for line in self._text.getvalue().split("\n")[:-1]))
        sys.stdout.flush()
        self._text.seek(0)
        self._text.truncate()


def _lines(picture: PredictedPicture) -> Iterator[tuple[str, str, str]]:
    for number, one in enumerate(picture.classes):
        yield _printable(picture.file) if number == 0 else "", one.name, f"{one.probability:.2%}"


def _printable(file: Path) -> str:
    """The path; a name that is not Unicode cannot be printed as it is."""
    return escaped(os.fsencode(file).decode(errors="replace"))
