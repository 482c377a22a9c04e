"""Print evaluations, predictions and comparisons of runs, as text or as JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table

from hpctrain.core.console import PlainConsole, output_console, plain_table
from hpctrain.core.text import counted, echo, echo_block, echo_wrapped, escaped, loss_text, pipe_columns, spans, wrapped
from hpctrain.run.evaluation import Evaluation, PredictedPicture, Predictions
from hpctrain.runs.comparison import ComparedSetting, Comparison
from hpctrain.runs.results import SETTINGS, summary_texts
from hpctrain.storage.atomic_write import write_text
from hpctrain.training.evaluation import ClassScore, ConfusionMatrix

_COLUMNS = 80  # width without a terminal
_MOST_CONFUSIONS = 20
#: maximum number of runs in a table of a comparison, for 80 columns
_MOST_COLUMNS = 4
_MOST_OF_A_NAME = 30
_NARROW_HEADING = 20  # maximum width of headings, if a table does not fit otherwise
_NO_CLASS = "(not finite)"


def print_text(evaluation: Evaluation, *, per_class: bool, confusion: bool) -> None:
    """Print the means, and the requested parts of the confusion matrix."""
    for note in evaluation.notes:
        echo(note)
    echo(f"evaluated on the {evaluation.split} set")
    sums, means = evaluation.sums, evaluation.sums.means()
    weights = " (averaged weights)" if evaluation.averaged else ""
    flip = ", with mirror images" if evaluation.flip else ""
    echo_wrapped(
        f"{evaluation.path}{weights}: {sums.count:,} samples, loss {loss_text(means['loss'])}, top1 {means['top1']:.2%}, "
        f"top5 {means['top5']:.2%}{flip}"
    )
    console = output_console(_COLUMNS)
    for asked, table in ((per_class, _class_table), (confusion, _confusion_table)):
        if asked:
            assert evaluation.confusion is not None, "it was counted"
            echo()
            console.print(table(evaluation.confusion, evaluation.class_names, console.width))
    sys.stdout.flush()


def _class_table(matrix: ConfusionMatrix, names: tuple[str, ...], width: int) -> Table:
    """Return the accuracy of each class, the lowest first."""
    table = plain_table("class", "most often taken for", "times", "samples", "top1", left=2, widest=_MOST_OF_A_NAME)
    for score in matrix.worst_first():
        rival = ("-", "-") if score.rival is None else (names[score.rival], f"{score.rival_count:,}")
        accuracy = "-" if score.top1 is None else f"{score.top1:.2%}"
        table.add_row(names[score.label], *rival, f"{score.samples:,}", accuracy)
    return table


def _confusion_table(matrix: ConfusionMatrix, names: tuple[str, ...], width: int) -> Table:
    """Return the whole matrix if it fits, with the numbers of the classes as titles; else the most frequent confusions."""
    whole = _whole_table(matrix, names)
    if whole is not None and _width(whole) <= width:
        return whole
    table = plain_table("class", "taken for", "times", left=2, widest=_MOST_OF_A_NAME)
    for label, prediction, count in matrix.largest_confusions(_MOST_CONFUSIONS):
        table.add_row(names[label], _NO_CLASS if prediction == len(names) else names[prediction], f"{count:,}")
    return table


def _whole_table(matrix: ConfusionMatrix, names: tuple[str, ...]) -> Table | None:
    if 3 * matrix.classes > _COLUMNS:  # each class takes at least a digit and a gap
        return None
    shown = matrix.classes + bool(matrix.undecided)
    numbers = [_NO_CLASS if prediction == matrix.classes else f"{prediction}" for prediction in range(shown)]
    table = plain_table("class", "", *numbers, widest=_MOST_OF_A_NAME)
    for label, name in enumerate(names):
        table.add_row(name, f"{label}", *(f"{count:,}" for count in matrix.of_label(label)[:shown]))
    return table


def print_json(evaluation: Evaluation, *, per_class: bool, confusion: bool) -> None:
    """Print an evaluation as one JSON object; numbers that are not finite become null."""
    sums = evaluation.sums
    means = {name: value if math.isfinite(value) else None for name, value in sums.means().items()}
    content: dict[str, Any] = {
        "checkpoint": str(evaluation.path),
        "set": evaluation.split,
        "samples": sums.count,
        **means,
        "hits1": sums.top1,
        "hits5": sums.top5,
        "averaged": evaluation.averaged,
        "flip": evaluation.flip,
        "notes": list(evaluation.notes),
    }
    if per_class:
        assert evaluation.confusion is not None, "it was counted"
        content["classes"] = [_plain(score, evaluation.class_names) for score in evaluation.confusion.worst_first()]
    if confusion:
        content["confusion"] = _matrix(evaluation)
    echo_block(json.dumps(content, indent=1))


def _plain(score: ClassScore, names: tuple[str, ...]) -> dict[str, Any]:
    rival = None if score.rival is None else {"class": names[score.rival], "label": score.rival, "times": score.rival_count}
    return {
        "class": names[score.label],
        "label": score.label,
        "samples": score.samples,
        "hits": score.hits,
        "top1": score.top1,
        "predictions": score.predictions,
        "most_often_taken_for": rival,
    }


def _matrix(evaluation: Evaluation) -> dict[str, Any]:
    """Return the confusion matrix as plain data.

    `matrix[label][prediction]` is the number of samples with this label and prediction, and `no_class[label]` the number of
    samples without a finite output.
    """
    matrix = evaluation.confusion
    assert matrix is not None, "it was counted"
    counts = [matrix.of_label(label).tolist() for label in range(matrix.classes)]
    return {
        "class_names": list(evaluation.class_names),
        "matrix": [of_label[: matrix.classes] for of_label in counts],
        "no_class": [of_label[matrix.classes] for of_label in counts],
    }


_WIDEST_NAME, _NARROWEST_FILE, _PROBABILITY, _GAP = 30, 10, 11, 2
_AT_ONCE = 16  # number of pictures printed together


def print_lines(predictions: Predictions, *, visible: bool) -> list[Path]:
    """Print a JSON object for each picture once it is predicted, if `visible`; return those without a prediction. Collective."""
    broken = []
    for picture in predictions.answers:
        if picture.error is not None:
            broken.append(picture.file)
        if visible:
            echo(json.dumps(_plain_picture(picture)))
    return broken


def _plain_picture(picture: PredictedPicture) -> dict[str, object]:
    if picture.error is not None:
        return {"image": str(picture.file), "error": picture.error}
    classes = [{"class": one.name, "label": one.label, "probability": one.probability} for one in picture.classes]
    return {"image": str(picture.file), "predictions": classes}


def write_predictions(predictions: Predictions, *, path: Path, visible: bool) -> list[Path]:
    """Write a CSV file with a row per picture, if `visible`; return the pictures without a prediction. Collective.

    The file is written once all pictures are predicted. A row has the path of the picture, its classes by decreasing probability,
    and an error, which is empty for predicted pictures.
    """
    text, broken, most = io.StringIO(newline=""), [], 1
    rows: list[tuple[str, list[str], str]] = []
    for picture in predictions.answers:
        if picture.error is not None:
            broken.append(picture.file)
        values = [value for one in picture.classes for value in (one.name, f"{one.probability:.6g}")]
        rows.append((os.fsencode(picture.file).decode(errors="replace"), values, picture.error or ""))
        most = max(most, len(picture.classes))
    if visible:
        further = [title for number in range(2, most + 1) for title in (f"class_{number}", f"probability_{number}")]
        writer = csv.writer(text)
        writer.writerow(["image", "class", "probability", *further, "error"])
        writer.writerows([file, *values, *[""] * (2 * most - len(values)), error] for file, values, error in rows)
        write_text(path, text.getvalue())
        echo(f"{predictions.checkpoint}: {counted(len(rows), 'image')} in {path}")
    return broken


def print_table(predictions: Predictions, *, visible: bool) -> list[Path]:
    """Print each picture's most probable classes, one per line, if `visible`; return those without a prediction. Collective."""
    broken = []
    form = _Form(predictions.class_names)
    if visible:
        weights = " (averaged weights)" if predictions.averaged else ""
        echo(f"{predictions.checkpoint}{weights}: {counted(len(predictions.files), 'image')}")
        form.print_titles()
    while pictures := list(islice(predictions.answers, _AT_ONCE)):
        broken += [picture.file for picture in pictures if picture.error is not None]
        if visible:
            form.print_pictures(pictures)
    return broken


class _Form:
    """Table that is printed in pieces with equal column widths."""

    def __init__(self, class_names: tuple[str, ...]) -> None:
        self._text = io.StringIO()
        width = None if sys.stdout.isatty() else pipe_columns()
        self._name = min(_WIDEST_NAME, max(map(cell_len, map(escaped, (*class_names, "class")))))
        others = self._name + _PROBABILITY + 2 * _GAP
        width = max(PlainConsole(file=self._text, width=width).width, others + _NARROWEST_FILE)
        self._console, self._file = PlainConsole(file=self._text, width=width), width - others

    def print_titles(self) -> None:
        """Print the titles of the columns."""
        self._print([("image", "class", "probability")])

    def print_pictures(self, pictures: Sequence[PredictedPicture]) -> None:
        """Print the rows of some pictures. The error of a picture without a prediction takes the full width."""
        for is_broken, group in groupby(pictures, lambda picture: picture.error is not None):
            if is_broken:
                for picture in group:
                    self._write(f"{_printable(picture.file)}: {picture.error}")
            else:
                self._print(line for picture in group for line in _lines(picture))

    def _print(self, lines: Iterable[tuple[str, str, str]]) -> None:
        table = plain_table(gap=_GAP)
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
    """Return a printable form of the path, even if its name is not Unicode."""
    return escaped(os.fsencode(file).decode(errors="replace"))


def _settings(settings: Sequence[ComparedSetting], width: int) -> Iterator[str]:
    """Yield each key with its values, each value after the numbers of the runs that have it."""
    for setting in settings:
        values = {value: [run for run, of_run in enumerate(setting.values, 1) if of_run == value] for value in setting.values}
        texts = "; ".join(f"{spans(runs)}: {value}" for value, runs in values.items())
        yield wrapped(f"  {setting.key}  {texts}", width)


def _width(table: Table) -> int:
    """Return the width of a table that breaks no line."""
    return PlainConsole(width=10_000).measure(table).maximum


def _results(figures: Sequence[tuple[str, Sequence[str]]], numbers: Sequence[str], width: int) -> Table:
    """Return a table with a column per run. Only headings are broken, at spaces.

    The table has no settings if they do not fit; the settings that differ are listed below it.
    """
    for widest_heading, left_out in ((None, ()), (_NARROW_HEADING, ()), (_NARROW_HEADING, SETTINGS)):
        table = plain_table("", *numbers, left=1 + len(numbers))
        table.columns[0].max_width = widest_heading
        for heading, values in figures:
            if heading not in left_out:
                table.add_row(heading, *values)
        if _width(table) <= width:
            break
    return table


def comparison_lines(comparison: Comparison, width: int = _COLUMNS) -> Iterator[RenderableType]:
    """Yield the tables and sentences of a comparison in order. Tables number the runs, as their names are long.

    Each run is a column. A table has a few runs; tables of the others follow below it.
    """
    numbers = [str(number) for number, _ in enumerate(comparison.names, 1)]
    for number, name in zip(numbers, comparison.names, strict=True):
        yield f"{number}: {name}"
    yield ""
    figures = summary_texts(comparison.summaries)
    for first in range(0, len(numbers), _MOST_COLUMNS):
        shown = slice(first, first + _MOST_COLUMNS)
        yield _results([(heading, values[shown]) for heading, values in figures], numbers[shown], width)
        yield ""
    for title, settings in (("configuration", comparison.configuration), ("versions", comparison.versions)):
        yield f"Differences in {title}:" if settings else f"No differences in {title}."
        yield from _settings(settings, width)
        yield ""
    for bits in comparison.bits:
        yield wrapped(bits.sentence([f"run {number}" for number in numbers]), width)
