"""Figures of curves: runs by colour, training as a thin line, evaluations as a strong one with a mark for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpctrain.report import theme
from hpctrain.report.curves import AVERAGED, TEST, TRAINING, Curve, Panel
from hpctrain.report.figures import Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLES: Mapping[str, Mapping[str, Any]] = {
    TRAINING: {"linewidth": 0.9, "alpha": 0.75},
    TEST: {"linewidth": 1.8, "marker": "o", "markersize": 3.2},
    AVERAGED: {"linewidth": 1.4, "linestyle": "--", "marker": "s", "markersize": 2.6},
}
#: more evaluations than that have no marks
_MOST_MARKS = 40
_DIGITS = 5


def panel_drawing(panel: Panel, names: Sequence[str]) -> Drawing:
    """The figure of a panel. names: of the runs."""
    return Drawing(panel.key, panel.title, _words(panel, names), lambda figure, colour: _draw(panel, figure, colour))


def _draw(panel: Panel, figure: Figure, colour: Callable[[str], str]) -> Mapping[str, Any]:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes = figure.add_subplot()
    for curve in panel.curves:
        style = dict(_STYLES[curve.part])
        if len(curve.xs) > _MOST_MARKS:
            style.pop("marker", None)
        elif len(curve.xs) == 1:
            style.setdefault("marker", ".")
        (line,) = axes.plot(curve.xs, curve.ys, color=colour(theme.of_run(curve.run)), **style)
        line.set_gid(f"run{curve.run}-{curve.part.replace(' ', '-').replace(',', '')}")
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=True, linewidth=0.6)
    _explain_styles(figure, panel, colour)
    return {"curves": [_values(curve) for curve in panel.curves], "percent": panel.percent}


def _explain_styles(figure: Figure, panel: Panel, colour: Callable[[str], str]) -> None:
    """A legend of lines, above the axes, where there is more than one kind of them."""
    from matplotlib.lines import Line2D

    parts = [part for part in _STYLES if any(curve.part == part for curve in panel.curves)]
    if len(parts) > 1:
        lines = [Line2D([], [], color=colour("ink"), label=part, **_STYLES[part]) for part in parts]
        figure.legend(handles=lines, loc="outside upper left", ncols=len(parts))


def _values(curve: Curve) -> dict[str, Any]:
    return {
        "run": curve.run,
        "part": curve.part,
        "xs": [float(f"{x:.{_DIGITS}g}") for x in curve.xs],
        "ys": [float(f"{y:.{_DIGITS}g}") for y in curve.ys],
    }


def _words(panel: Panel, names: Sequence[str]) -> str:
    """The last value of each curve."""
    ends = []
    for curve in panel.curves:
        value = f"{curve.ys[-1]:.2%}" if panel.percent else f"{curve.ys[-1]:.4g}"
        ends.append(f"{names[curve.run]}, {curve.part}: {value} at epoch {curve.xs[-1]:.4g}")
    return f"{panel.title} over epochs. At the end: {'; '.join(ends)}."
