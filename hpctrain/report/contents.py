"""The parts of a report on runs, and what stands in each."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpctrain.core.errors import DataError
from hpctrain.runs.state import Record
from hpctrain.report.curves import panels
from hpctrain.report.differences import side_by_side
from hpctrain.report.judged_set import JudgedSet
from hpctrain.report.page import Line, Page, PagePart, Table
from hpctrain.report.panel_figures import panel_drawing
from hpctrain.report.record import RunRecord
from hpctrain.report.run_record import UNKNOWN, summary, texts
from hpctrain.report.trace_figures import layer_drawing, read_steps, timeline_drawing
from hpctrain.train.progress_text import loss_text


def report_page(records: Sequence[RunRecord], results: Sequence[JudgedSet] = ()) -> Page:
    """The report on runs.

    Args:
        results: of test sets, where they were computed.
    """
    names = tuple(record.name for record in records)
    title = f"{names[0]}" if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    parts = (
        _summary(records),
        _curves(records, names),
        _time(records),
        PagePart("test", "Test images", results=tuple(results)),
        _events(records),
        _checkpoints(records),
        _settings(records),
    )
    return Page(title, names, tuple(part for part in parts if not part.is_empty))


def _summary(records: Sequence[RunRecord]) -> PagePart:
    """A line for each figure, beside it the values of the runs."""
    lines = tuple(Line((heading, *values)) for heading, values in texts([summary(record) for record in records]))
    return PagePart("summary", "Summary", tables=(Table("", ("", *(record.name for record in records)), lines),))


def _curves(records: Sequence[RunRecord], names: Sequence[str]) -> PagePart:
    """Figures, and the values of evaluations for those who do not see them, or have no pointer."""
    tables = []
    for record in records:
        evaluations = [entry for entry in record.state.records if entry.get("kind") == "evaluation"]
        lines = tuple(Line((str(entry.get("epoch")), *_means(entry))) for entry in evaluations)
        if lines:
            title = "Evaluations" if len(records) == 1 else f"Evaluations of {record.name}"
            headings = ("epoch", "loss", "top-1", "top-5")
            tables.append(Table(title, headings, lines, frozenset({1, 2, 3}), folded=True))
    drawings = tuple(panel_drawing(panel, names) for panel in panels(records))
    return PagePart("curves", "Curves", drawings=drawings, tables=tuple(tables))


def _means(entry: Record) -> tuple[str, ...]:
    loss, accuracies = entry.get("loss"), (entry.get("top1"), entry.get("top5"))
    return (UNKNOWN if loss is None else loss_text(loss), *(UNKNOWN if one is None else f"{one:.2%}" for one in accuracies))


def _time(records: Sequence[RunRecord]) -> PagePart:
    """Figures of the runs that were traced."""
    drawings, sentences = [], []
    for number, record in enumerate(records):
        key = str(number)
        if record.tables:
            drawings.append(layer_drawing(record.tables[0], key, record.name))
        if record.trace is not None:
            try:
                steps = read_steps(record.trace)
            except DataError as error:
                sentences.append(str(error))
                continue
            if steps:
                drawings.append(timeline_drawing(steps, key, record.name))
    if not drawings and not sentences:
        sentences.append("No run was traced; train with trace=true to see where the time of a step goes.")
    return PagePart("time", "Time of a step", drawings=tuple(drawings), sentences=tuple(sentences))


def _events(records: Sequence[RunRecord]) -> PagePart:
    lines = []
    for record in records:
        for event in record.state.events:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time)) if event.time else UNKNOWN
            lines.append(Line((when, event.text) if len(records) == 1 else (when, record.name, event.text)))
    headings = ("time", "event") if len(records) == 1 else ("time", "run", "event")
    tables = (Table("", headings, tuple(lines)),) if lines else ()
    return PagePart("events", "Events", tables=tables, sentences=() if lines else ("Nothing out of the ordinary was recorded.",))


def _checkpoints(records: Sequence[RunRecord]) -> PagePart:
    tables = []
    for record in records:
        lines = tuple(
            Line(
                (
                    f"{stored.step:,}",
                    f"{stored.megabytes:,.1f}",
                    time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored.written)),
                    f"{stored.name}{', the best: ' if stored.best else ''}{stored.best}",
                )
            )
            for stored in record.checkpoints
        )
        if lines:
            title = record.name if len(records) > 1 else ""
            tables.append(Table(title, ("step", "MB", "written", "file"), lines, frozenset({1})))
    return PagePart("checkpoints", "Checkpoints", tables=tuple(tables))


def _settings(records: Sequence[RunRecord]) -> PagePart:
    """Configuration and versions: the differences of several runs first, then all."""
    headings = ("key", *(record.name for record in records))
    tables = []
    for title, of_runs in (
        ("configuration", [record.settings for record in records]),
        ("versions", [record.versions for record in records]),
    ):
        settings = side_by_side(of_runs)
        different = tuple(Line((setting.key, *setting.values)) for setting in settings if setting.differs)
        if different:
            tables.append(Table(f"Differences of {title}", headings, different))
        every = tuple(Line((setting.key, *setting.values), setting.differs) for setting in settings)
        if every:
            tables.append(Table(f"All of {title}", headings, every, folded=True))
    same = len(records) > 1 and not any(table.title.startswith("Differences") for table in tables)
    return PagePart("settings", "Configuration", tables=tuple(tables), sentences=("All runs have the same.",) if same else ())
