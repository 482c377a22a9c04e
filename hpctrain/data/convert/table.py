"""CSV files that name the label of each picture file next to them: a header, then a line for each picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.core.files import read_bytes
from hpctrain.core.text import choices, counted
from hpctrain.data.convert.common import listed, named_labels
from hpctrain.data.convert.folder import Tree
from hpctrain.data.files import require_file, system_errors_as
from hpctrain.data.image_file import normal_name

_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class TableColumns:
    """Header of the column of files, header of the column of labels, and suffix that files lack in their column."""

    file: str = "file"
    label: str = "label"
    suffix: str = ""


def scan(
    table: Path, directory: Path | None = None, class_names: Sequence[str] | None = None, columns: TableColumns | None = None
) -> Tree:
    """Return the classes and the picture files of a table, in the order of its lines.

    Args:
        table: CSV file, with tabs instead of commas if its name ends in .tsv.
        directory: directory of the pictures; None: that of the table.
        class_names: names of the labels. None: the labels in the table, sorted, or numbers if all labels are integers.
        columns: None: the default columns.

    Raises:
        DataError: the table cannot be read or lacks a column; or a line has too few or too many values, or names no file, a file
            of an earlier line, or an unknown label. The message names all such lines.
    """
    require_file(table, "CSV file", "it must have a header and a line with file and label for each picture")
    columns, top = columns or TableColumns(), table.parent if directory is None else directory
    files, labels, faults = _lines(table, top, columns)
    if not faults and not files:
        raise DataError(f"{table} has a header, but no line with a picture; add one for each picture.")
    numbers = _numbers(labels)
    names: Sequence[str] = [normal_name(name) for name in (sorted(set(labels)) if class_names is None else class_names)]
    if numbers is not None and (class_names is None or not set(labels) <= set(names)):
        meant, names = named_labels(np.array(numbers), None if class_names is None else names, table)
        chosen = meant.tolist()
    else:
        label_of = {name: number for number, name in enumerate(names)}
        chosen = [label_of.get(label, -1) for label in labels]
    for (line, _), label, number in zip(files, labels, chosen, strict=True):
        if not 0 <= number < len(names):
            faults.append((line, f"there is no class {label!r}"))
    if faults:
        lines = [f"line {line}: {fault}" for line, fault in sorted(faults)]
        raise DataError(f"{table} has {listed('wrong line', lines)}; correct them.")
    labelled = tuple((path, label) for (_, path), label in zip(files, chosen, strict=True))
    return Tree(tuple(names), labelled, class_names is not None)


def _lines(
    table: Path, directory: Path, columns: TableColumns
) -> tuple[list[tuple[int, Path]], list[str], list[tuple[int, str]]]:
    """Return (line, file) and the label of each line without a fault, and (line, fault) of the other lines."""
    with system_errors_as(f"The CSV file {table} cannot be read"):
        content = read_bytes(table, _MOST_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"The CSV file {table} is not UTF-8 text, first in line {line}; save it as UTF-8.") from error
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if table.suffix.lower() == ".tsv" else ",", strict=True)
    files: list[tuple[int, Path]] = []
    labels: list[str] = []
    faults: list[tuple[int, str]] = []
    line_of: dict[Path, int] = {}
    try:
        header = [name.strip() for name in next(reader, [])]
        for name in (columns.file, columns.label):
            if name not in header:
                raise DataError(f"{table} has no column {name!r}; {choices(name, header)}, or name the columns in --columns.")
        places = header.index(columns.file), header.index(columns.label)
        for row in reader:
            if not row:
                continue
            line = reader.line_num
            if len(row) != len(header):
                faults.append((line, f"{counted(len(row), 'value')} instead of {len(header)}"))
                continue
            name, label = (row[place].strip() for place in places)
            path = directory / f"{name}{columns.suffix}"
            fault = _fault(name, label, path, line_of.setdefault(path, line), line)
            if fault is not None:
                faults.append((line, fault))
                continue
            files.append((line, path))
            labels.append(normal_name(label))
    except csv.Error as error:
        raise DataError(f"The CSV file {table} is damaged in line {reader.line_num} ({error}); correct it.") from error
    return files, labels, faults


def _fault(name: str, label: str, path: Path, first_line: int, line: int) -> str | None:
    """Return the fault of a line, in words; None if it has none."""
    if not name or not label:
        return "no file" if not name else "no label"
    if first_line != line:
        return f"{name} is also in line {first_line}"
    try:
        return None if path.is_file() else f"there is no file {path}"
    except (OSError, ValueError) as error:
        return f"{path} cannot be read ({getattr(error, 'strerror', None) or error})"


def _numbers(labels: Sequence[str]) -> list[int] | None:
    """Return the labels as integers; None unless all are integers of at most 9 characters, including a minus sign."""
    if all(label.removeprefix("-").isdecimal() and len(label) <= 9 for label in labels):
        return [int(label) for label in labels]
    return None
