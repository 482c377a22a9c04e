"""The measurements of `paper_overlap.py` as tables and plots: each variant's speed over that of the one without the idea."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.pairs import Interval, interval, ratio
from benchmarks.slow_links_cases import ALONE

#: (network, rate, what one job measured)
Run = tuple[str, str, Mapping[str, Any]]


def step(run: Mapping[str, Any], name: str) -> Interval | None:
    """Seconds of a step of a variant; None where it was not measured."""
    turns = run["rounds"].get(name)
    return interval([turn["step_seconds"] for turn in turns]) if turns else None


def speed(run: Mapping[str, Any], name: str, base: str) -> Interval | None:
    """How many times as many steps as `base`, in pairs of one round; None where one of the two was not measured."""
    rounds = run["rounds"]
    if not rounds.get(name) or not rounds.get(base):
        return None
    columns = [[turn["step_seconds"] for turn in rounds[one]] for one in (base, name)]
    least = min(map(len, columns))
    return ratio(columns[0][:least], columns[1][:least])


def names(runs: Sequence[Run]) -> list[str]:
    """The variants of any of the runs, in order."""
    return list(dict.fromkeys(name for *_, run in runs for name in run["rounds"]))


def models(runs: Sequence[Run]) -> list[str]:
    """The networks, in order."""
    return list(dict.fromkeys(model for model, *_ in runs))


def markdown(base: str, runs: Sequence[Run]) -> str:
    """A table for each network: the step and the speed over `base` of each variant, a pair of columns for each rate."""
    return "\n\n".join(_table(base, model, [run for run in runs if run[0] == model]) for model in models(runs))


def _table(base: str, model: str, runs: Sequence[Run]) -> str:
    facts = "; ".join(
        f"{rate}: {run['facts']['ranks']} ranks, {8 * run['facts']['link_bytes_per_second'] / 1e9:.3f} Gb/s measured, "
        f"{len(run['rounds'][ALONE])} rounds, {run['machine']['date']}"
        for _, rate, run in runs
    )
    head = ["variant", *(title for _, rate, _ in runs for title in (f"{rate}: step, s", f"over {base}"))]
    rows = [[name, *_cells(base, name, runs)] for name in names(runs)]
    table = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *("| " + " | ".join(row) + " |" for row in rows)]
    refused = {f"Left out: {name} ({sentence})" for *_, run in runs for name, sentence in run["refused"].items()}
    return "\n".join([f"{model} ({facts})", "", *table, *(f"\n{line}" for line in sorted(refused))])


def _cells(base: str, name: str, runs: Sequence[Run]) -> list[str]:
    cells = []
    for *_, run in runs:
        values = (step(run, name), None if name == base else speed(run, name, base))
        cells += ["" if value is None else str(value) for value in values]
    return cells


def plot(base: str, runs: Sequence[Run], path: Path) -> None:
    """Speed over that of `base` by the rates of the links, with intervals; a panel for each network.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    networks = models(runs)
    with plots.panels(path, len(networks), 6, 5) as all_axes:
        for axes, model in zip(all_axes, networks, strict=True):
            of_model = [run for run in runs if run[0] == model]
            variants = names(of_model)
            for number, name in enumerate(variants):
                shift = 0.06 * (number - (len(variants) - 1) / 2)  # so that intervals do not cover each other
                points = [(at + shift, speed(run, name, base)) for at, (*_, run) in enumerate(of_model)]
                drawn = [(at, value) for at, value in points if value is not None]
                medians = [value.median for _, value in drawn]
                spread = [[value.median - value.low for _, value in drawn], [value.high - value.median for _, value in drawn]]
                style = ":" if name == ALONE else "-"
                axes.errorbar([at for at, _ in drawn], medians, spread, label=name, linestyle=style, marker="o", capsize=3)
            axes.set(
                xlabel="link of each host",
                ylabel=f"steps over those of {base}",
                title=model,
                ylim=(0, None),
                xlim=(-0.5, len(of_model) - 0.5),
            )
            axes.set_xticks(range(len(of_model)), [rate for _, rate, _ in of_model])
        all_axes[0].legend(fontsize="small", ncols=2, loc="upper left", bbox_to_anchor=(0, -0.12))
