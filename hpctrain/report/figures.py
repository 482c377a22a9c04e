"""Figures, drawn by matplotlib: as SVG for a page, whose colours are the page's, or as PNG files on white."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.errors import ConfigError
from hpctrain.report import theme
from hpctrain.storage.atomic_write import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: so wide that letters are read where a page is 400 pixels wide
WIDTH_INCHES = 4.8
_DOTS_PER_INCH = 200
_POINTS_PER_INCH = 72
_ID = re.compile(r'\bid="([^"]+)"')
_REFERENCE = re.compile(r'(url\(#|href="#)([^)"]+)')


@dataclass(frozen=True)
class Style:
    """The way in which a figure is drawn. colour: of a name of the theme. alone: no page beside it tells which run is which."""

    colour: Callable[[str], str]
    alone: bool


@dataclass(frozen=True)
class Drawing:
    """A figure.

    Args:
        key: a word that no other figure of the page has. title, words: above it, and for those who cannot see it.
        draw: draws it onto an empty figure; gives what a page needs to show values, or nothing.
        inches: width and height.
    """

    key: str
    title: str
    words: str
    draw: Callable[[Figure, Style], Mapping[str, Any] | None] = field(repr=False)
    inches: tuple[float, float] = (WIDTH_INCHES, 2.5)


@dataclass(frozen=True)
class PageFigure:
    """A figure as a page has it. svg: with the page's variables as colours. values: for the page's program; None: none."""

    key: str
    title: str
    words: str
    svg: str
    values: Mapping[str, Any] | None


def check_matplotlib() -> None:
    """Nothing, where figures can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:  # not imported yet: it loads NumPy, before which threads are set
        raise ConfigError('Reports are drawn by matplotlib, which is not installed; pip install "hpctrain[export]".')


def for_page(drawing: Drawing) -> PageFigure:
    """The figure, its names prefixed by its key, so that a page may have many."""
    buffer = io.StringIO()
    with _drawn(drawing, Style(theme.marker, alone=False)) as (figure, values):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = _ID.sub(lambda match: f'id="{drawing.key}-{match[1]}" class="{_class(match[1])}"', svg)
    svg = _REFERENCE.sub(lambda match: f"{match[1]}{drawing.key}-{match[2]}", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" ?|height="[^"]*pt" ?', lambda match: f"<svg {match[1]}" if match[1] else "", svg)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(drawing.words)}" focusable="false" ', 1)
    return PageFigure(drawing.key, drawing.title, drawing.words, theme.with_variables(svg), values)


def _class(name: str) -> str:
    """The class of a part, by which a page hides it: a run's, or that of all that matplotlib has named."""
    match = re.match(r"run\d+", name)
    return match[0] if match else "part"


def write_png(drawing: Drawing, path: Path) -> None:
    """Write the figure on white.

    Raises:
        OSError: it cannot be written.
    """
    with _drawn(drawing, Style(theme.LIGHT.__getitem__, alone=True)) as (figure, _):
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=_DOTS_PER_INCH, facecolor=theme.LIGHT["paper"])
    write_bytes(path, picture.getvalue())


@contextmanager
def _drawn(drawing: Drawing, style: Style) -> Iterator[tuple[Figure, Mapping[str, Any] | None]]:
    """The figure, and what a page needs of it; matplotlib's settings hold while it is written, too."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink, faint = style.colour("ink"), style.colour("faint")
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": drawing.key,
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.edgecolor": faint,
        "axes.labelcolor": ink,
        "text.color": ink,
        "text.parse_math": False,  # else matplotlib would read a $ in a name as a formula
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": faint,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "path.simplify": True,
    }
    with rc_context(settings):
        figure = Figure(figsize=drawing.inches, layout="constrained")
        values = drawing.draw(figure, style)
        figure.draw_without_rendering()  # which lays it out
        if values is not None:
            values = {**values, **_place(figure.axes[0])}
        figure.set_layout_engine("none")  # the place of the axes is told, and stays
        yield figure, values


def _place(axes: Axes) -> dict[str, Any]:
    """The rectangle of the axes in the units of the SVG, and the values at its borders."""
    figure = axes.figure
    scale = _POINTS_PER_INCH / figure.dpi
    box = axes.get_window_extent()
    top = figure.bbox.height
    return {
        "box": [round(float(value) * scale, 2) for value in (box.x0, top - box.y1, box.x1, top - box.y0)],
        "xlim": [float(value) for value in axes.get_xlim()],
        "ylim": [float(value) for value in axes.get_ylim()],
    }
