"""Tables and curves of the simulated scaling study. Pure, but for the image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import plots

#: Lee et al. 2018, on up to 8192 cores of Cori Phase I: their figures, measured there by them
PUBLISHED: Mapping[str, tuple[int, float]] = {"VGG-16": (8192, 2516.36), "ResNet-50": (8192, 2734.25)}


def speedups(curve: Mapping[str, Any]) -> dict[int, float]:
    """By cores: samples a second over those of the curve's first point, times the cores of that one."""
    points = curve["points"]
    first = points[0]
    base = first["batch"] / first["step_seconds"] / first["cores"]
    return {one["cores"]: one["batch"] / one["step_seconds"] / base for one in points}


def panels(result: Mapping[str, Any]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """The curves by (network, scaling), in order."""
    by_panel: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for curve in result["curves"]:
        by_panel.setdefault((curve["network"], curve["scaling"]), []).append(curve)
    return by_panel


def markdown(result: Mapping[str, Any]) -> str:
    """All tables; each says that it is simulated."""
    lines: list[str] = []
    for (network, scaling), curves in panels(result).items():
        lines += [*_curve_table(network, scaling, curves), ""]
    for sensitivity in result["sensitivity"]:
        lines += [*_sensitivity_table(sensitivity), ""]
    return "\n".join(lines).rstrip()


def _curve_table(network: str, scaling: str, curves: list[Mapping[str, Any]]) -> list[str]:
    names = [curve["series"] for curve in curves]
    by_cores = [speedups(curve) for curve in curves]
    lines = [
        f"Simulated speed-up over one core, {network}, {scaling} scaling:",
        "",
        "| cores | batch | " + " | ".join(names) + " |",
        "|---" * (2 + len(names)) + "|",
    ]
    for one in curves[0]["points"]:
        cells = [f"{speedup[one['cores']]:.4g}" for speedup in by_cores]
        lines.append(f"| {one['cores']} | {one['batch']} | " + " | ".join(cells) + " |")
    if network in PUBLISHED:
        cores, published = PUBLISHED[network]
        theirs = f"Lee et al. 2018 measured {published:.0f}x on {cores} cores, of a batch and a baseline that are not public."
        lines += ["", theirs]
    return lines


def _sensitivity_table(sensitivity: Mapping[str, Any]) -> list[str]:
    base = sensitivity["speedup"]
    lines = [
        f"Simulated speed-up of {sensitivity['network']}, {sensitivity['series']}, on {sensitivity['cores']} cores (strong "
        f"scaling): {base:.4g}. With one number of the machine changed:",
        "",
        "| number | 25 % smaller | 25 % larger |",
        "|---|---|---|",
    ]
    for number, (smaller, larger) in sensitivity["numbers"].items():
        lines.append(f"| {number} | {smaller:.4g} ({smaller / base - 1:+.1%}) | {larger:.4g} ({larger / base - 1:+.1%}) |")
    return lines


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Speed-up over cores, one panel for each network and scaling, with the published figure as a star.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    by_panel = panels(result)
    with plots.panels(path, len(by_panel), 5, 5) as all_axes:
        for axes, ((network, scaling), curves) in zip(all_axes, by_panel.items(), strict=True):
            for curve in curves:
                values = speedups(curve)
                axes.plot(list(values), list(values.values()), marker=".", label=curve["series"])
            cores = list(speedups(curves[0]))
            axes.plot(cores, cores, "k:", label="one core times cores")
            if network in PUBLISHED:
                at, published = PUBLISHED[network]
                axes.plot([at], [published], "k*", markersize=12, label="Lee et al. 2018, measured")
            title = f"{network}, {scaling} scaling (simulated)"
            axes.set(xlabel="cores", ylabel="speed-up over one core", title=title, xscale="log", yscale="log")
        all_axes[0].legend(fontsize="small")
