"""Figures of traced runs: where the time of a step goes by layer, and the last step of every rank on one line of time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.core.errors import DataError
from hpctrain.core.files import json_object, read_bytes
from hpctrain.report.figures import WIDTH_INCHES, Drawing, Style
from hpctrain.trace.step_lanes import MESSAGES, PROGRAM, StepLanes, last_steps
from hpctrain.trace.time_table import Row, TimeTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LAYERS = 20
_MOST_RANKS = 16
_LANE_INCHES = 0.32
#: a longer trace is not read: a program of a page is none for it
LARGEST_TRACE_BYTES = 300 << 20
#: shares of a step; shorter pieces are not seen
_SHORTEST = 1 / 1500


def layer_drawing(table: TimeTable, key: str, name: str) -> Drawing:
    """Time computed and waited, in milliseconds of a step, of the layers and works that took most."""
    rows = sorted(table.rows, key=_weight, reverse=True)[:_MOST_LAYERS]
    left = len(table.rows) - len(rows)
    more = f", and {left} more that are not shown" if left else ""
    exposed = table.total.exposed_seconds / table.step_seconds if table.step_seconds else 0.0
    words = f"Lines of the time table that took most{more}. Waits for messages are {exposed:.1%} of a step."

    def draw(figure: Figure, style: Style) -> None:
        axes = figure.add_subplot()
        places = range(len(rows))
        computed = [1e3 * (row.compute_seconds + row.messages_seconds) for row in rows]
        axes.barh(places, computed, color=style.colour("forward"), label="computed")
        waited = [1e3 * row.exposed_seconds for row in rows]
        axes.barh(places, waited, left=computed, color=style.colour("waiting"), label="waited for messages")
        axes.set_yticks(places, [_short(row.name) for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("ms of a step")
        axes.grid(visible=True, axis="x", linewidth=0.6)
        axes.set_axisbelow(True)
        figure.legend(loc="outside upper left", ncols=2)

    return Drawing(f"layers-{key}", f"Time of a step by layer: {name}", words, draw, (WIDTH_INCHES, 1.0 + 0.19 * len(rows)))


def timeline_drawing(steps: Sequence[StepLanes], key: str, name: str) -> Drawing:
    """The last step: for each rank a lane of its program, and under it one of its messages."""
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
    """The last step of every rank in a trace file.

    Raises:
        DataError: it cannot be read, or is too long for it.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_TRACE_BYTES:
            raise DataError(
                f"{path} has {size / 1e6:,.0f} MB, of which at most {LARGEST_TRACE_BYTES / 1e6:,.0f} are read for a picture; "
                f"trace fewer steps (--steps), or look at it with Perfetto."
            )
        content = json_object(read_bytes(path, LARGEST_TRACE_BYTES))
        if content is None:
            raise ValueError("it is no JSON object")
        return last_steps(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no trace that can be read ({error}); trace the run again.") from error


def _coarse(intervals: Sequence[tuple[float, float]], shortest: float) -> list[tuple[float, float]]:
    """The same where gaps and pieces that nobody sees are joined to what is before them, or left out."""
    joined: list[tuple[float, float]] = []
    for first, last in intervals:
        if joined and first - joined[-1][1] < shortest:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return [(first, last) for first, last in joined if last - first >= shortest / 2]


def _weight(row: Row) -> float:
    return row.compute_seconds + row.messages_seconds + row.exposed_seconds


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:9]}...{name[-12:]}"
