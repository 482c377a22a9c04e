"""A report as one HTML file that needs nothing else: tables, figures, styles and a small program."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from hpctrain.report import theme
from hpctrain.report.figures import Drawing, PageFigure, for_page
from hpctrain.report.judged_set import JudgedSet
from hpctrain.version import __version__


@dataclass(frozen=True)
class Line:
    """A line of a table: its heading, then its cells. differs: runs are not alike in it."""

    cells: tuple[str, ...]
    differs: bool = False


@dataclass(frozen=True)
class Table:
    """A table. numbers: the places in a line that are figures. folded: it is seen by those who open it."""

    title: str
    headings: tuple[str, ...]
    lines: tuple[Line, ...]
    numbers: frozenset[int] = frozenset()
    folded: bool = False


@dataclass(frozen=True)
class PagePart:
    """A part of a page. key: a word that no other part has. sentences: what there is to say of it, at its end."""

    key: str
    title: str
    drawings: tuple[Drawing, ...] = ()
    tables: tuple[Table, ...] = ()
    results: tuple[JudgedSet, ...] = ()
    sentences: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.drawings or self.tables or self.results or self.sentences)


@dataclass(frozen=True)
class _ShownPart:
    """A part with its figures drawn."""

    key: str
    title: str
    figures: tuple[PageFigure, ...]
    tables: tuple[Table, ...]
    results: tuple[JudgedSet, ...]
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Page:
    """A report. names: of its runs, in the order of their numbers."""

    title: str
    names: tuple[str, ...]
    parts: tuple[PagePart, ...] = field(repr=False)

    @property
    def drawings(self) -> tuple[Drawing, ...]:
        """All figures."""
        return tuple(drawing for part in self.parts for drawing in part.drawings)


def html(page: Page) -> str:
    """The text of the file."""
    templates = files("hpctrain.report") / "templates"
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    names = page.names

    def plain(values: dict[str, object]) -> Markup:
        """JSON that ends no element of the page."""
        return Markup(json.dumps({**values, "names": names}, separators=(",", ":")).replace("<", "\\u003c"))

    style = (templates / "report.css").read_text(encoding="utf-8")
    style = style.replace("{{ light }}", theme.css(theme.LIGHT)).replace("{{ dark }}", theme.css(theme.DARK))
    return environment.from_string((templates / "report.html.j2").read_text(encoding="utf-8")).render(
        title=page.title,
        names=names,
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        css=Markup(style),
        js=Markup((templates / "report.js").read_text(encoding="utf-8")),
        colours=theme.RUN_COLOURS,
        json=plain,
        parts=_shown(page.parts),
    )


def _shown(parts: Sequence[PagePart]) -> list[_ShownPart]:
    return [
        _ShownPart(
            part.key,
            part.title,
            tuple(_safe(for_page(drawing)) for drawing in part.drawings),
            part.tables,
            part.results,
            part.sentences,
        )
        for part in parts
        if not part.is_empty
    ]


def _safe(figure: PageFigure) -> PageFigure:
    """The figure, whose SVG is written as it is: matplotlib has escaped all text in it."""
    return PageFigure(figure.key, figure.title, figure.words, Markup(figure.svg), figure.values)
