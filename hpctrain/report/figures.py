"""Figures drawn with matplotlib, as SVG.

Figures of curves distinguish runs by colour; training is a thin line, and evaluations are a thick line with marks that differ
between sets. Figures of traced runs show the time of a step by layer, and the last step of every rank on one time line.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.errors import ConfigError, DataError, errors_as
from hpctrain.core.files import json_object, read_bytes
from hpctrain.core.text import size_text
from hpctrain.runs.results import AVERAGED, TEST, TRAINING, VALIDATION, Panel
from hpctrain.trace.chrome import MESSAGES, PROGRAM, StepLanes, last_steps
from hpctrain.trace.time_table import TimeTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: colours of parts of figures, on a light background
COLOURS = {
    "ink": "#1f2933",
    "faint": "#c6ced6",
    "forward": "#3f7fbf",
    "backward": "#17406d",
    "update": "#8a63b8",
    "waiting": "#d8432f",
    "messages": "#e0962a",
}
#: colours of runs, which repeat
RUN_COLOURS = ("#1f6fb4", "#c8501e", "#2c8a57", "#8a4fb0", "#b03a5b", "#5b6b1f", "#1d8a99", "#7a5230")

#: width of figures, in inches: their text is readable on a page of 400 pixels
WIDTH_INCHES = 4.8
_NAME_INCHES = 0.17  # of a run's name in a legend


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn.

    Attributes:
        key: word that identifies the figure on the page.
        words: description for readers who cannot see the figure.
        draw: callback that draws it onto an empty figure.
        inches: width and height.
    """

    key: str
    title: str
    words: str
    draw: Callable[[Figure], None] = field(repr=False)
    inches: tuple[float, float] = (WIDTH_INCHES, 2.5)


def check_matplotlib() -> None:
    """Raise ConfigError unless matplotlib is installed, with which figures are drawn."""
    if importlib.util.find_spec("matplotlib") is None:  # no import: it would load NumPy before the threads are set
        raise ConfigError('Reports need matplotlib, which is not installed; run pip install "hpctrain[export]".')


def svg(drawing: Drawing) -> bytes:
    """Return the figure as an SVG file without a background."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ink, faint = COLOURS["ink"], COLOURS["faint"]
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
    file = io.BytesIO()
    with rc_context(settings):
        figure = Figure(figsize=drawing.inches, layout="constrained")
        drawing.draw(figure)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()


_STYLES: Mapping[str, Mapping[str, Any]] = {
    TRAINING: {"linewidth": 0.9, "alpha": 0.75},
    VALIDATION: {"linewidth": 1.8, "marker": "o", "markersize": 3.2},
    f"{VALIDATION}{AVERAGED}": {"linewidth": 1.4, "linestyle": "--", "marker": "s", "markersize": 2.6},
    TEST: {"linewidth": 1.8, "linestyle": ":", "marker": "D", "markersize": 3.6},
    f"{TEST}{AVERAGED}": {"linewidth": 1.4, "linestyle": "-.", "marker": "^", "markersize": 3.2},
}
#: maximum number of evaluations for which curves have marks
_MOST_MARKS = 40


def panel_drawing(panel: Panel, names: Sequence[str]) -> Drawing:
    """Return the figure of a panel; `names` are those of the runs."""
    inches = WIDTH_INCHES, 2.5 + (_NAME_INCHES * len(names) if len(names) > 1 else 0.0)
    return Drawing(panel.key, panel.title, _words(panel, names), partial(_draw, panel, names), inches)


def _draw(panel: Panel, names: Sequence[str], figure: Figure) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes = figure.add_subplot()
    for curve in panel.curves:
        line_style = dict(_STYLES[curve.part])
        if len(curve.xs) > _MOST_MARKS:
            line_style.pop("marker", None)
        elif len(curve.xs) == 1:
            line_style.setdefault("marker", ".")
        axes.plot(curve.xs, curve.ys, color=_run_colour(curve.run), **line_style)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=True, linewidth=0.6)
    _add_legends(figure, panel, names)


def _run_colour(run: int) -> str:
    return RUN_COLOURS[run % len(RUN_COLOURS)]


def _add_legends(figure: Figure, panel: Panel, names: Sequence[str]) -> None:
    """Add a legend of line styles above the axes, and one of the runs' colours below, each if there are several."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    parts = [part for part in _STYLES if any(curve.part == part for curve in panel.curves)]
    if len(parts) > 1:
        lines = [Line2D([], [], color=COLOURS["ink"], label=part, **_STYLES[part]) for part in parts]
        figure.legend(handles=lines, loc="outside upper left", ncols=len(parts))
    if len(names) > 1:
        patches = [Patch(color=_run_colour(run), label=name) for run, name in enumerate(names)]
        figure.legend(handles=patches, loc="outside lower left", ncols=1, fontsize="small")


def _words(panel: Panel, names: Sequence[str]) -> str:
    """Return a description with the last value of each curve."""
    ends = []
    for curve in panel.curves:
        value = f"{curve.ys[-1]:.2%}" if panel.percent else f"{curve.ys[-1]:.4g}"
        name = f"{names[curve.run]}, " if len(names) > 1 else ""
        ends.append(f"{name}{curve.part}: {value} at epoch {curve.xs[-1]:.4g}")
    return f"{panel.title} over epochs. At the end: {'; '.join(ends)}."


_MOST_LAYERS = 20
_MOST_RANKS = 16
_LANE_INCHES = 0.32
#: maximum size of a trace that is read for a figure, in bytes
LARGEST_TRACE_BYTES = 300 << 20
#: share of a step below which pieces are invisible
_SHORTEST = 1 / 1500


def layer_drawing(table: TimeTable, key: str, name: str) -> Drawing:
    """Return a figure of the longest layers and operations of the run `name`, with computing and waiting time in ms per step."""
    rows = sorted(table.rows, key=lambda row: row.compute_seconds + row.messages_seconds + row.exposed_seconds, reverse=True)[
        :_MOST_LAYERS
    ]
    left = len(table.rows) - len(rows)
    more = f", and {left} more that are not shown" if left else ""
    exposed = table.total.exposed_seconds / table.step_seconds if table.step_seconds else 0.0
    words = f"The longest rows of the time table{more}. Waits for messages are {exposed:.1%} of a step."

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        places = range(len(rows))
        computed = [1e3 * (row.compute_seconds + row.messages_seconds) for row in rows]
        axes.barh(places, computed, color=COLOURS["forward"], label="computed")
        waited = [1e3 * row.exposed_seconds for row in rows]
        axes.barh(places, waited, left=computed, color=COLOURS["waiting"], label="waited for messages")
        axes.set_yticks(places, [row.name if len(row.name) <= 24 else f"{row.name[:9]}...{row.name[-12:]}" for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("ms of a step")
        axes.grid(visible=True, axis="x", linewidth=0.6)
        axes.set_axisbelow(True)
        figure.legend(loc="outside upper left", ncols=2)

    return Drawing(f"layers-{key}", f"Time of a step by layer: {name}", words, draw, (WIDTH_INCHES, 1.0 + 0.19 * len(rows)))


def timeline_drawing(steps: Sequence[StepLanes], key: str, name: str) -> Drawing:
    """Return a figure of the last step of the run `name`. Each rank has two lanes: computation and waits, and messages."""
    shown = steps[:_MOST_RANKS]
    left = len(steps) - len(shown)
    more = f" The first {len(shown)} of {len(steps)} ranks." if left else ""
    waits = [sum(last - first for first, last in step.lanes["waiting"]) for step in shown]
    words = f"The last step of each rank, {max(step.seconds for step in shown) * 1e3:.4g} ms at most; "
    words += f"waits for messages between {min(waits) * 1e3:.4g} and {max(waits) * 1e3:.4g} ms.{more}"

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        whole = max(step.begin_seconds + step.seconds for step in shown)
        for place, step in enumerate(shown):
            for kind, intervals in step.lanes.items():
                top, height = (place + 0.48, 0.22) if kind == MESSAGES else (place, 0.44)
                bars = [(1e3 * first, 1e3 * (last - first)) for first, last in _coarse(intervals, whole * _SHORTEST)]
                axes.broken_barh(bars, (top, height), color=COLOURS[kind], linewidth=0, label=kind if not place else None)
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
    with errors_as(DataError, lambda why: f"Cannot read the trace {path} ({why})."):
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
