"""Figures of curves: runs by colour, training as a thin line, evaluations as a strong one with a mark for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hpctrain.report import theme
from hpctrain.report.curves import AVERAGED, TEST, TRAINING, Curve, Panel
from hpctrain.report.figures import Drawing, Style

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
        (line,) = axes.plot(curve.xs, curve.ys, color=style.colour(theme.of_run(curve.run)), **line_style)
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
    """A legend of lines, above the axes, where there is more than one kind of them."""
    from matplotlib.lines import Line2D

    parts = [part for part in _STYLES if any(curve.part == part for curve in panel.curves)]
    if len(parts) > 1:
        lines = [Line2D([], [], color=style.colour("ink"), label=part, **_STYLES[part]) for part in parts]
        figure.legend(handles=lines, loc="outside upper left", ncols=len(parts))


def _name_runs(figure: Figure, names: Sequence[str], style: Style) -> None:
    """A legend of colours, below the axes."""
    from matplotlib.patches import Patch

    patches = [Patch(color=style.colour(theme.of_run(run)), label=name) for run, name in enumerate(names)]
    figure.legend(handles=patches, loc="outside lower left", ncols=1, fontsize="small")


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
