"""A report on runs as one self-contained HTML file: tables, figures and styles.

`report_page` builds the content of each part, `result_of` converts the evaluation of a set into a table of confusions and
pictures, and `html` renders the page.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from hpctrain.assembly.recipe import Recipe
from hpctrain.core.errors import DataError, HpctrainError
from hpctrain.report.figures import Drawing, layer_drawing, panel_drawing, read_steps, svg, timeline_drawing
from hpctrain.run.evaluation import JudgedImage, Judgement
from hpctrain.run.stored_run import find_run
from hpctrain.runs.comparison import side_by_side
from hpctrain.runs.results import (
    MOST_POINTS,
    UNKNOWN,
    Curve,
    RunRecord,
    panels,
    samples_per_epoch,
    summary,
    summary_texts,
)
from hpctrain.runs.state import evaluated_set, means_text
from hpctrain.version import __version__

#: maximum number of classes of a readable confusion matrix; for more, the largest confusions are listed
MOST_CLASSES = 40
_MOST_CONFUSIONS = 30
_STRONGEST_PERCENT = 70
#: maximum relative difference between a recorded learning rate and its schedule, for rounding
_CLOSE = 1e-6
#: maximum side of a picture on the page, in pixels; larger images are reduced
_PIXELS = 160
#: maximum side of a picture that is stored losslessly; larger ones are JPEG files (half a megabyte per hundred)
_MOST_EXACT = 64


@dataclass(frozen=True)
class Cell:
    """A cell of the confusion matrix.

    Attributes:
        percent: strength of the background colour in percent, proportional to the share of the class's samples.
        right: whether the cell is on the diagonal.
    """

    count: int
    percent: int
    right: bool


@dataclass(frozen=True)
class Picture:
    """An image with its prediction.

    Attributes:
        number, label: index of the image, and the name of its class.
        words: predicted class with its probability.
        data: image as a data URL.
    """

    number: int
    label: str
    words: str
    data: str


@dataclass(frozen=True)
class JudgedSet:
    """The result of one run on its test or validation set.

    Attributes:
        words: sentences on the accuracy and, without `confusion`, on the most frequent mistakes.
        headings: titles of the columns of `confusion`.
        confusion: (class, number of its samples predicted as each class) by row; empty for too many classes.
        classes: (class, images, top-1, class that it was most often taken for) as texts.
        groups: (title, images).
    """

    name: str
    split: str
    words: str
    headings: tuple[str, ...]
    confusion: tuple[tuple[str, tuple[Cell, ...]], ...]
    classes: tuple[tuple[str, str, str, str], ...]
    groups: tuple[tuple[str, tuple[Picture, ...]], ...]


def result_of(name: str, judgement: Judgement) -> JudgedSet:
    """Return an evaluation of the run `name` as a confusion matrix, a table of classes, and pictures."""
    names = judgement.class_names
    whole = len(names) <= MOST_CLASSES
    groups = (
        ("Most confident mistakes", tuple(_picture(image, names) for image in judgement.wrong)),
        ("Most confident correct predictions, by class", tuple(_picture(image, names) for image in judgement.right)),
    )
    lines = tuple(_lines(judgement)) if whole else ()
    return JudgedSet(name, judgement.split, _words(judgement, whole=whole), names, lines, tuple(_classes(judgement)), groups)


def _words(judgement: Judgement, *, whole: bool) -> str:
    confusion, names = judgement.confusion, judgement.class_names
    scores = confusion.scores()
    samples, hits = sum(score.samples for score in scores), sum(score.hits for score in scores)
    accuracy = f"{hits / samples:.2%}" if samples else "-"
    words = f"{judgement.checkpoint.name}: {samples:,} {judgement.split} images, top-1 {accuracy}."
    if confusion.undecided:
        words += f" The outputs for {confusion.undecided:,} images are not finite."
    if whole:
        return words
    mistakes = confusion.largest_confusions(_MOST_CONFUSIONS)
    frequent = "; ".join(
        f"{names[label]} for {names[rival] if rival < len(names) else 'no class'} {count:,} times"
        for label, rival, count in mistakes
    )
    return f"{words} Most frequent mistakes: {frequent}." if frequent else words


def _lines(judgement: Judgement) -> Iterator[tuple[str, tuple[Cell, ...]]]:
    for label, name in enumerate(judgement.class_names):
        counts = judgement.confusion.of_label(label)[: len(judgement.class_names)].tolist()
        samples = max(1, sum(counts))
        cells = (
            Cell(count, -(-_STRONGEST_PERCENT * count // samples), prediction == label) for prediction, count in enumerate(counts)
        )
        yield f"{label} {name}", tuple(cells)


def _classes(judgement: Judgement) -> Iterator[tuple[str, str, str, str]]:
    """Yield all classes in order of accuracy, the lowest first, and classes without images last."""
    names = judgement.class_names
    for score in judgement.confusion.worst_first():
        rival = "-" if score.rival is None else f"{names[score.rival]}, {score.rival_count:,} times"
        yield names[score.label], f"{score.samples:,}", "-" if score.top1 is None else f"{score.top1:.2%}", rival


def _picture(image: JudgedImage, names: tuple[str, ...]) -> Picture:
    words = f"{image.probability:.1%} {names[image.prediction]}"
    return Picture(image.number, names[image.label], words, _url(image.pixels))


def _url(pixels: np.ndarray) -> str:
    """Return a picture (H, W, C) uint8 as a data URL; if C is neither 1 nor 3, only the first channel is shown."""
    from PIL import Image

    picture = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
    form, options = ("PNG", {"optimize": True}) if max(picture.size) <= _MOST_EXACT else ("JPEG", {"quality": 85})
    picture.thumbnail((_PIXELS, _PIXELS))
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return _data_url(f"image/{form.lower()}", buffer.getvalue())


@dataclass(frozen=True)
class Line:
    """A row of a table: its heading, then its cells.

    Attributes:
        differs: whether the row differs between runs.
    """

    cells: tuple[str, ...]
    differs: bool = False


@dataclass(frozen=True)
class Table:
    """Table of a page.

    Attributes:
        numbers: indices of the columns of numbers.
        folded: whether the table is collapsed at first.
        of_runs: whether each column after the first belongs to a run. If so, equal values of a row are merged into one cell.
    """

    title: str
    headings: tuple[str, ...]
    lines: tuple[Line, ...]
    numbers: frozenset[int] = frozenset()
    folded: bool = False
    of_runs: bool = False


@dataclass(frozen=True)
class PagePart:
    """Part of a page: figures, tables and sentences.

    Attributes:
        key: word that identifies the part.
        sentences: sentences at the end of the part.
    """

    key: str
    title: str
    drawings: tuple[Drawing, ...] = ()
    tables: tuple[Table, ...] = ()
    results: tuple[JudgedSet, ...] = ()
    sentences: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the part has nothing to show."""
        return not (self.drawings or self.tables or self.results or self.sentences)


@dataclass(frozen=True)
class Page:
    """Contents of a report.

    Attributes:
        names: names of its runs, in the order of their numbers.
        headline: sentence with the main result; "" if there is none yet.
    """

    title: str
    names: tuple[str, ...]
    parts: tuple[PagePart, ...] = field(repr=False)
    headline: str = ""


def html(page: Page) -> str:
    """Return the HTML text of a page."""
    templates = files("hpctrain.report") / "templates"
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string((templates / "report.html.j2").read_text(encoding="utf-8")).render(
        title=page.title,
        headline=page.headline,
        names=page.names,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        css=Markup((templates / "report.css").read_text(encoding="utf-8")),
        url=lambda drawing: _data_url("image/svg+xml", svg(drawing)),
        parts=[part for part in page.parts if not part.is_empty],
    )


def _data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def report_page(records: Sequence[RunRecord], results: Sequence[JudgedSet] = ()) -> Page:
    """Return the contents of the report on runs, with the evaluations of some of them."""
    short = [record.settings.get("name", record.name) for record in records]
    if len(records) > 1 and len(set(short)) == len(short):  # names of directories are longer
        records = [replace(record, name=name) for record, name in zip(records, short, strict=True)]
    names = tuple(record.name for record in records)
    judged = results[0].split if results else "test"
    title = f"{names[0]}" if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    parts = (
        _summary(records),
        _curves(records, names),
        _time(records),
        PagePart("test", f"{judged.capitalize()} images", results=tuple(results)),
        _events(records),
        _checkpoints(records),
        _settings(records),
    )
    return Page(title, names, tuple(part for part in parts if not part.is_empty), _headline(records))


def _headline(records: Sequence[RunRecord]) -> str:
    """Return the best accuracy of all evaluations in training, with its run's model, data, batch and optimiser; "" if none."""
    figures = [(summary(record), record.name) for record in records]
    best, name = max(figures, key=lambda one: -1.0 if one[0].best_top1 is None else one[0].best_top1)
    if best.best_top1 is None:
        return ""
    of_run = f"{name}, " if len(records) > 1 else ""
    setup = ", ".join(filter(None, (best.model, best.data, best.batch and f"batch {best.batch}", best.optimizer)))
    return f"Best {best.evaluated} accuracy {best.best_top1:.2%} ({of_run}epoch {best.best_epoch}){setup and ': '}{setup}"


def _summary(records: Sequence[RunRecord]) -> PagePart:
    """Return a table with a row for each quantity and a column for each run."""
    figures = [summary(record) for record in records]
    lines = tuple(Line((heading, *values)) for heading, values in summary_texts(figures))
    table = Table("", ("", *(record.name for record in records)), lines, of_runs=True)
    return PagePart("summary", "Summary", tables=(table,))


def _curves(records: Sequence[RunRecord], names: Sequence[str]) -> PagePart:
    """Return the figures, and the values of evaluations as tables."""
    tables = []
    for record in records:
        evaluations = record.state.of_kind("evaluation")
        evaluations += record.state.of_kind("test")
        lines = tuple(Line((str(entry.get("epoch")), evaluated_set(entry), *means_text(entry, UNKNOWN))) for entry in evaluations)
        if lines:
            title = "Evaluations" if len(records) == 1 else f"Evaluations of {record.name}"
            headings = ("epoch", "set", "loss", "top-1", "top-5")
            tables.append(Table(title, headings, lines, frozenset({2, 3, 4}), folded=True))
    drawings = []
    for panel in panels(records):
        if panel.key == "lr":  # runs of short epochs record too few rates to show a warm-up
            panel = replace(panel, curves=tuple(_scheduled(curve, records[curve.run]) for curve in panel.curves))
        drawings.append(panel_drawing(panel, names))
    return PagePart("curves", "Curves", drawings=tuple(drawings), tables=tuple(tables))


def _scheduled(curve: Curve, record: RunRecord) -> Curve:
    """Return the curve of a run's learning rate, computed from its schedule.

    Return the recorded curve if the schedule is unknown, or if a recorded rate differs from it: after a resume with another
    schedule, or if evaluations changed the rate.
    """
    samples = samples_per_epoch(record.state.records)
    try:
        config = find_run(str(record.state.path), record.state.path.parent).parsed(())[0]
        schedule = Recipe.of(config).schedule(samples)
    except HpctrainError:  # a configuration of another version, or one that names user code
        return curve

    def rate(place: float) -> float:
        epoch, part = divmod(max(place, 0.0), 1.0)
        return schedule.lr(epoch * schedule.steps_per_epoch + part * samples / config.batch)

    step = config.batch / max(samples, 1)
    for place, recorded in zip(curve.xs, curve.ys, strict=True):
        rates = [rate(place - steps * step) for steps in (0, 1, 2)]  # a record has the rate of one of the latest steps
        if not min(rates) * (1 - _CLOSE) <= recorded <= max(rates) * (1 + _CLOSE):
            return curve
    done = next((entry.get("done_samples") for entry in record.state.of_kind("start")), 0)
    begin = done / max(samples, 1) if isinstance(done, int | float) else curve.xs[0]
    places = np.linspace(min(begin, curve.xs[0]), curve.xs[-1], MOST_POINTS)
    return replace(curve, xs=tuple(places.tolist()), ys=tuple(rate(place) for place in places.tolist()))


def _time(records: Sequence[RunRecord]) -> PagePart:
    """Return the figures of traced runs."""
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
    return PagePart("time", "Time of a step", drawings=tuple(drawings), sentences=tuple(sentences))


def _events(records: Sequence[RunRecord]) -> PagePart:
    lines = []
    for record in records:
        for event in record.state.events:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time)) if event.time else UNKNOWN
            lines.append(Line((when, event.text) if len(records) == 1 else (when, record.name, event.text)))
    headings = ("time", "event") if len(records) == 1 else ("time", "run", "event")
    tables = (Table("", headings, tuple(lines)),) if lines else ()
    return PagePart("events", "Events", tables=tables)


def _checkpoints(records: Sequence[RunRecord]) -> PagePart:
    tables = []
    for record in records:
        best, mark = record.best
        lines = []
        for stored in record.checkpoints:
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored.written))
            name = stored.path.name
            shown = f"{name}, the best: {mark}" if name == best else name
            lines.append(Line((f"{stored.step:,}", f"{stored.n_bytes / 1e6:,.1f}", written, shown)))
        if lines:
            title = record.name if len(records) > 1 else ""
            tables.append(Table(title, ("step", "MB", "written", "file"), tuple(lines), frozenset({1})))
    return PagePart("checkpoints", "Checkpoints", tables=tuple(tables))


def _settings(records: Sequence[RunRecord]) -> PagePart:
    """Return the configurations and versions of the runs: first the differences between runs, then all values."""
    headings = ("key", *(record.name for record in records))
    tables = []
    for title, of_runs in (
        ("configuration", [record.settings for record in records]),
        ("versions", [record.versions for record in records]),
    ):
        settings = side_by_side(of_runs)
        different = tuple(Line((setting.key, *setting.values)) for setting in settings if setting.differs)
        if different:
            tables.append(Table(f"Differences in {title}", headings, different, of_runs=True))
        every = tuple(Line((setting.key, *setting.values), setting.differs) for setting in settings)
        if every:
            tables.append(Table(f"All values: {title}", headings, every, folded=True, of_runs=True))
    same = len(records) > 1 and not any(table.title.startswith("Differences") for table in tables)
    return PagePart(
        "settings",
        "Configuration",
        tables=tuple(tables),
        sentences=("All runs have the same configuration and versions.",) if same else (),
    )
