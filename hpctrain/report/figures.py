"""Figures drawn with matplotlib: as SVG with the colours of a page, or as PNG files on white.

Colours are names, for which a page defines values in light and dark. Figures of curves distinguish runs by colour; training is a
thin line, and evaluations are a thick line with marks that differ between sets. Figures of traced runs show the time of a step by
layer, and the last step of every rank on one time line.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.errors import ConfigError, DataError, errors_as
from hpctrain.core.files import json_object, read_bytes
from hpctrain.core.text import size_text
from hpctrain.runs.results import AVERAGED, TEST, TRAINING, VALIDATION, Curve, Panel
from hpctrain.storage.atomic_write import write_bytes
from hpctrain.trace.chrome import MESSAGES, PROGRAM, StepLanes, last_steps
from hpctrain.trace.time_table import TimeTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: colours on a light background, by the name of the page's CSS variable
LIGHT = {
    "ink": "#1f2933",
    "faint": "#d5dbe1",
    "paper": "#ffffff",
    "forward": "#3f7fbf",
    "backward": "#17406d",
    "update": "#8a63b8",
    "waiting": "#d8432f",
    "messages": "#e0962a",
    "run0": "#1f6fb4",
    "run1": "#c8501e",
    "run2": "#2c8a57",
    "run3": "#8a4fb0",
    "run4": "#b03a5b",
    "run5": "#5b6b1f",
    "run6": "#1d8a99",
    "run7": "#7a5230",
}
#: colours on a dark background
DARK = LIGHT | {
    "ink": "#e4e9ee",
    "faint": "#3a444e",
    "paper": "#14191f",
    "forward": "#6fa8dc",
    "backward": "#3a73ad",
    "update": "#b597dd",
    "waiting": "#f0705d",
    "messages": "#eeb45c",
    "run0": "#62aeea",
    "run1": "#f08a56",
    "run2": "#5fc48d",
    "run3": "#c391e8",
    "run4": "#ea7795",
    "run5": "#b3c45a",
    "run6": "#58c7d6",
    "run7": "#c99a70",
}
RUN_COLOURS = 8
#: unique placeholder colours, one per name, in a figure until it is written
_MARKERS = {name: f"#0f{number:02x}f0" for number, name in enumerate(LIGHT)}
_HEX = re.compile(r"#0f[0-9a-f]{2}f0")


def colour_marker(name: str) -> str:
    """Return the placeholder colour of a name."""
    return _MARKERS[name]


def run_colour(run: int) -> str:
    """Return the name of a run's colour; the eight colours repeat."""
    return f"run{run % RUN_COLOURS}"


def with_variables(svg: str) -> str:
    """Return an SVG in which placeholder colours are replaced by the page's CSS variables."""
    names = {colour: name for name, colour in _MARKERS.items()}
    return _HEX.sub(lambda match: f"var(--{names[match[0]]})", svg)


def css_variables(values: dict[str, str]) -> str:
    """Return the CSS declarations of variables."""
    return " ".join(f"--{name}: {value};" for name, value in values.items())


#: width of figures, in inches: their text is readable on a page of 400 pixels
WIDTH_INCHES = 4.8
_DOTS_PER_INCH = 200
_POINTS_PER_INCH = 72
_ID = re.compile(r'\bid="([^"]+)"')
_REFERENCE = re.compile(r'(url\(#|href="#)([^)"]+)')


@dataclass(frozen=True)
class Style:
    """Style of a figure.

    Attributes:
        colour: callback that returns the colour of a name.
        alone: whether the figure is not on a page, so that it needs a legend of the runs.
    """

    colour: Callable[[str], str]
    alone: bool


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn.

    Attributes:
        key: word that identifies the figure on the page.
        title: title above the figure.
        words: description for readers who cannot see the figure.
        draw: callback that draws it onto an empty figure and returns the values that a page shows on hovering, or None.
        inches: width and height.
    """

    key: str
    title: str
    words: str
    draw: Callable[[Figure, Style], Mapping[str, Any] | None] = field(repr=False)
    inches: tuple[float, float] = (WIDTH_INCHES, 2.5)


@dataclass(frozen=True)
class PageFigure:
    """A figure on a page.

    Attributes:
        key: word that identifies the figure on the page.
        title: title above the figure.
        words: description for readers who cannot see the figure.
        svg: SVG text with the page's CSS variables as colours.
        values: values for the page's script; None if there are none.
    """

    key: str
    title: str
    words: str
    svg: str
    values: Mapping[str, Any] | None


def check_matplotlib() -> None:
    """Raise unless figures can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:  # no import: it would load NumPy before the threads are set
        raise ConfigError('Reports need matplotlib, which is not installed; run pip install "hpctrain[export]".')


def for_page(drawing: Drawing) -> PageFigure:
    """Return the figure for a page. All its SVG names begin with its key, so that a page may have many figures."""
    buffer = io.StringIO()
    with _drawn(drawing, Style(colour_marker, alone=False)) as (figure, values):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = _ID.sub(lambda match: f'id="{drawing.key}-{match[1]}" class="{_class(match[1])}"', svg)
    svg = _REFERENCE.sub(lambda match: f"{match[1]}{drawing.key}-{match[2]}", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" ?|height="[^"]*pt" ?', lambda match: f"<svg {match[1]}" if match[1] else "", svg)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(drawing.words)}" focusable="false" ', 1)
    return PageFigure(drawing.key, drawing.title, drawing.words, with_variables(svg), values)


def _class(name: str) -> str:
    """Return the CSS class by which a page hides a part: the class of a run, or "part" for parts named by matplotlib."""
    match = re.match(r"run\d+", name)
    return match[0] if match else "part"


def write_png(drawing: Drawing, path: Path) -> None:
    """Write the figure on white as a PNG file.

    Raises:
        OSError: the file cannot be written.
    """
    with _drawn(drawing, Style(LIGHT.__getitem__, alone=True)) as (figure, _):
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=_DOTS_PER_INCH, facecolor=LIGHT["paper"])
    write_bytes(path, picture.getvalue())


@contextmanager
def _drawn(drawing: Drawing, style: Style) -> Iterator[tuple[Figure, Mapping[str, Any] | None]]:
    """Yield the figure and its values for a page. matplotlib's settings remain in effect during the block."""
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
        "text.parse_math": False,  # a $ in a name is not a formula
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
        figure.draw_without_rendering()  # computes the layout
        if values is not None:
            values = {**values, **_place(figure.axes[0])}
        figure.set_layout_engine("none")  # the page uses the position of the axes, so it must not change
        yield figure, values


def _place(axes: Axes) -> dict[str, Any]:
    """Return the rectangle of the axes in the units of the SVG, and the values at its borders."""
    figure = axes.figure
    scale = _POINTS_PER_INCH / figure.dpi
    box = axes.get_window_extent()
    top = figure.bbox.height
    return {
        "box": [round(float(value) * scale, 2) for value in (box.x0, top - box.y1, box.x1, top - box.y0)],
        "xlim": [float(value) for value in axes.get_xlim()],
        "ylim": [float(value) for value in axes.get_ylim()],
    }


_STYLES: Mapping[str, Mapping[str, Any]] = {
    TRAINING: {"linewidth": 0.9, "alpha": 0.75},
    VALIDATION: {"linewidth": 1.8, "marker": "o", "markersize": 3.2},
    f"{VALIDATION}{AVERAGED}": {"linewidth": 1.4, "linestyle": "--", "marker": "s", "markersize": 2.6},
    TEST: {"linewidth": 1.8, "linestyle": ":", "marker": "D", "markersize": 3.6},
    f"{TEST}{AVERAGED}": {"linewidth": 1.4, "linestyle": "-.", "marker": "^", "markersize": 3.2},
}
#: maximum number of evaluations for which curves have marks
_MOST_MARKS = 40
_DIGITS = 5


def panel_drawing(panel: Panel, names: Sequence[str]) -> Drawing:
    """Return the figure of a panel.

    Args:
        names: names of the runs.
    """
    return Drawing(panel.key, panel.title, _words(panel, names), partial(_draw, panel, names))


def _draw(panel: Panel, names: Sequence[str], figure: Figure, style: Style) -> Mapping[str, Any]:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes = figure.add_subplot()
    for curve in panel.curves:
        line_style = dict(_STYLES[curve.part])
        if len(curve.xs) > _MOST_MARKS:
            line_style.pop("marker", None)
        elif len(curve.xs) == 1:
            line_style.setdefault("marker", ".")
        (line,) = axes.plot(curve.xs, curve.ys, color=style.colour(run_colour(curve.run)), **line_style)
        line.set_gid(f"run{curve.run}-{curve.part.replace(' ', '-').replace(',', '')}")
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=True, linewidth=0.6)
    _explain_lines(figure, panel, style)
    if style.alone and len(names) > 1:
        _name_runs(figure, names, style)
    return {"curves": [_values(curve) for curve in panel.curves], "percent": panel.percent}


def _explain_lines(figure: Figure, panel: Panel, style: Style) -> None:
    """Add a legend of line styles above the axes if there are several."""
    from matplotlib.lines import Line2D

    parts = [part for part in _STYLES if any(curve.part == part for curve in panel.curves)]
    if len(parts) > 1:
        lines = [Line2D([], [], color=style.colour("ink"), label=part, **_STYLES[part]) for part in parts]
        figure.legend(handles=lines, loc="outside upper left", ncols=len(parts))


def _name_runs(figure: Figure, names: Sequence[str], style: Style) -> None:
    """Add a legend of the runs' colours below the axes."""
    from matplotlib.patches import Patch

    patches = [Patch(color=style.colour(run_colour(run)), label=name) for run, name in enumerate(names)]
    figure.legend(handles=patches, loc="outside lower left", ncols=1, fontsize="small")


def _values(curve: Curve) -> dict[str, Any]:
    return {
        "run": curve.run,
        "part": curve.part,
        "xs": [float(f"{x:.{_DIGITS}g}") for x in curve.xs],
        "ys": [float(f"{y:.{_DIGITS}g}") for y in curve.ys],
    }


def _words(panel: Panel, names: Sequence[str]) -> str:
    """Return a description with the last value of each curve."""
    ends = []
    for curve in panel.curves:
        value = f"{curve.ys[-1]:.2%}" if panel.percent else f"{curve.ys[-1]:.4g}"
        ends.append(f"{names[curve.run]}, {curve.part}: {value} at epoch {curve.xs[-1]:.4g}")
    return f"{panel.title} over epochs. At the end: {'; '.join(ends)}."


_MOST_LAYERS = 20
_MOST_RANKS = 16
_LANE_INCHES = 0.32
#: maximum size of a trace that is read for a figure, in bytes
LARGEST_TRACE_BYTES = 300 << 20
#: share of a step below which pieces are invisible
_SHORTEST = 1 / 1500


def layer_drawing(table: TimeTable, key: str, name: str) -> Drawing:
    """Return a figure of the layers and operations that take longest, with computing and waiting time in ms per step."""
    rows = sorted(table.rows, key=lambda row: row.compute_seconds + row.messages_seconds + row.exposed_seconds, reverse=True)[
        :_MOST_LAYERS
    ]
    left = len(table.rows) - len(rows)
    more = f", and {left} more that are not shown" if left else ""
    exposed = table.total.exposed_seconds / table.step_seconds if table.step_seconds else 0.0
    words = f"The longest rows of the time table{more}. Waits for messages are {exposed:.1%} of a step."

    def draw(figure: Figure, style: Style) -> None:
        axes = figure.add_subplot()
        places = range(len(rows))
        computed = [1e3 * (row.compute_seconds + row.messages_seconds) for row in rows]
        axes.barh(places, computed, color=style.colour("forward"), label="computed")
        waited = [1e3 * row.exposed_seconds for row in rows]
        axes.barh(places, waited, left=computed, color=style.colour("waiting"), label="waited for messages")
        axes.set_yticks(places, [row.name if len(row.name) <= 24 else f"{row.name[:9]}...{row.name[-12:]}" for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("ms of a step")
        axes.grid(visible=True, axis="x", linewidth=0.6)
        axes.set_axisbelow(True)
        figure.legend(loc="outside upper left", ncols=2)

    return Drawing(f"layers-{key}", f"Time of a step by layer: {name}", words, draw, (WIDTH_INCHES, 1.0 + 0.19 * len(rows)))


def timeline_drawing(steps: Sequence[StepLanes], key: str, name: str) -> Drawing:
    """Return a figure of the last step. Each rank has two lanes: its computation and waits, and its messages."""
    shown = steps[:_MOST_RANKS]
    left = len(steps) - len(shown)
    more = f" The first {len(shown)} of {len(steps)} ranks." if left else ""
    waits = [sum(last - first for first, last in step.lanes["waiting"]) for step in shown]
    words = f"The last step of each rank, {max(step.seconds for step in shown) * 1e3:.4g} ms at most; "
    words += f"waits for messages between {min(waits) * 1e3:.4g} and {max(waits) * 1e3:.4g} ms.{more}"

    def draw(figure: Figure, style: Style) -> None:
        axes = figure.add_subplot()
        whole = max(step.begin_seconds + step.seconds for step in shown)
        for place, step in enumerate(shown):
            for kind, intervals in step.lanes.items():
                top, height = (place + 0.48, 0.22) if kind == MESSAGES else (place, 0.44)
                bars = [(1e3 * first, 1e3 * (last - first)) for first, last in _coarse(intervals, whole * _SHORTEST)]
                axes.broken_barh(bars, (top, height), color=style.colour(kind), linewidth=0, label=kind if not place else None)
        axes.set_yticks([place + 0.35 for place in range(len(shown))], [f"rank {step.rank}" for step in shown])
        axes.set_ylim(len(shown), -0.15)
        axes.set_xlim(0, 1e3 * whole)
        axes.set_xlabel("ms")
        short = {"columnspacing": 0.8, "handlelength": 0.8, "handletextpad": 0.4, "fontsize": 8}
        figure.legend(loc="outside upper left", ncols=len({*PROGRAM.values()}) + 1, **short)

    inches = WIDTH_INCHES, 1.1 + _LANE_INCHES * len(shown)
    return Drawing(f"timeline-{key}", f"One step of every rank: {name}", words, draw, inches)


def read_steps(path: Path) -> tuple[StepLanes, ...]:
    """Return the last step of every rank in a trace file.

    Raises:
        DataError: the file cannot be read, or is too large.
    """
    with errors_as(DataError, lambda why: f"Cannot read the trace {path} ({why}); trace the run again."):
        size = path.stat().st_size
        if size > LARGEST_TRACE_BYTES:
            raise DataError(
                f"{path} has {size_text(size)}, but figures are drawn from at most {size_text(LARGEST_TRACE_BYTES)}; "
                f"trace fewer steps (--steps), or open it with Perfetto."
            )
        content = json_object(read_bytes(path, LARGEST_TRACE_BYTES))
        if content is None:
            raise ValueError("it is not a JSON object")
        return last_steps(content)


def _coarse(intervals: Sequence[tuple[float, float]], shortest: float) -> list[tuple[float, float]]:
    """Return the intervals without details too short to be visible: small gaps are closed, and small pieces are left out."""
    joined: list[tuple[float, float]] = []
    for first, last in intervals:
        if joined and first - joined[-1][1] < shortest:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return [(first, last) for first, last in joined if last - first >= shortest / 2]
