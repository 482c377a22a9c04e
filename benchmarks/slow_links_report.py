"""The measurements of `slow_links.py` in Markdown: steps, gains, and the density from which on sparse messages gain nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.pairs import Interval, interval, paired, ratio
from benchmarks.slow_links_cases import ALONE, CASES, DENSE, DENSITIES, TOP_ONE_PERCENT, WIRE, Case

_CASES: Mapping[str, Case] = {case.name: case for case in CASES}
#: printed next to what was measured
_RULE_DENSE = "sharded"  # the rule compares with a reduce-scatter and an allgather of everything
SPARSE_BAR, WIRE_BAR, CROSSOVER_BAR = 1.25, 1.4, 0.20


class CaseFigures:
    """The figures of one measured case. Ratios are of turns of the same round: of variants that left early, the first ones."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        self.case = _CASES[run["case"]]
        self._rounds: Mapping[str, list[dict[str, float]]] = run["rounds"]
        self.names = [name for name, turns in self._rounds.items() if turns]
        dense = [name for name in DENSE if name in self.names]
        self.best_dense = min(dense, key=lambda name: self._median_of_first(name, self._least(dense))) if dense else None

    def column(self, name: str, key: str = "step_seconds") -> list[float]:
        """One figure of all rounds of a variant."""
        return [turn[key] for turn in self._rounds[name]]

    def step(self, name: str) -> Interval:
        """Seconds."""
        return interval(self.column(name))

    def gain(self, name: str, over: str) -> Interval | None:
        """How many times as many steps as another variant; None where one of them was not measured."""
        if name not in self.names or over not in self.names:
            return None
        count = self._least([name, over])
        return ratio(self.column(over)[:count], self.column(name)[:count])

    def crossover(self, dense: str) -> tuple[float, Interval | None]:
        """(the largest density measured, the density at which a sparse step takes as long as a dense one, with its interval
        over rounds); None where sparse steps are shorter at all of them, or longer."""
        densities = sorted((density, name) for name, density in DENSITIES.items() if name in self.names)
        if dense not in self.names or len(densities) < 2:
            return 0.0, None
        names = [name for _, name in densities] + [dense]
        count = self._least(names)
        columns = [self.column(name)[:count] for name in names]
        values = [density for density, _ in densities]
        medians = [interval(column).median for column in columns]
        if crossing(values, medians[:-1], medians[-1]) is None:
            return values[-1], None
        # Rounds in which they do not cross count as the end at which they would.
        return values[-1], paired(lambda *seconds: _within(values, seconds[:-1], seconds[-1]), *columns)

    def _least(self, names: Sequence[str]) -> int:
        return min(len(self._rounds[name]) for name in names)

    def _median_of_first(self, name: str, count: int) -> float:
        return interval(self.column(name)[:count]).median


def crossing(densities: Sequence[float], seconds: Sequence[float], dense_seconds: float) -> float | None:
    """The density at which steps take as long as dense ones; None where they do at none of those between the given ones.

    A step that messages bound takes longer by the same for each percent more, so between two densities the line is straight.

    Args:
        densities: rising. seconds: of the sparse steps.
    """
    pairs = list(zip(densities, seconds, strict=True))
    for (low, before), (high, after) in pairwise(pairs):
        if before < dense_seconds <= after:
            return low + (high - low) * (dense_seconds - before) / (after - before)
    return None


def _within(densities: Sequence[float], seconds: Sequence[float], dense_seconds: float) -> float:
    at = crossing(densities, seconds, dense_seconds)
    if at is not None:
        return at
    return densities[-1] if seconds[-1] < dense_seconds else densities[0]


def markdown(results: Mapping[str, Any], predicted: Mapping[str, Any], rules: Mapping[str, float]) -> str:
    """Everything as Markdown: the bars first, then a table of each case.

    Args:
        results: by case, in order. predicted: by case and variant, seconds of a step, made before it was measured.
        rules: by case, the density at which sparse and dense averaging are equal by the rule that the averager chooses by.
    """
    figures = [CaseFigures(run) for run in results.values()]
    blocks = [
        _sparse_table([one for one in figures if one.case.kind == "slow"], predicted, rules),
        _wire_table([one for one in figures if one.case.wire_bound]),
        _priority_table([one for one in figures if one.case.kind == "priority"]),
        *(_case_table(one, run, predicted.get(one.case.name, {})) for one, run in zip(figures, results.values(), strict=True)),
    ]
    return "\n\n".join(block for block in blocks if block)


def _rows(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [title, "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _sparse_table(figures: Sequence[CaseFigures], predicted: Mapping[str, Any], rules: Mapping[str, float]) -> str:
    rows = []
    for one in figures:
        if one.best_dense is None or TOP_ONE_PERCENT not in one.names:
            continue
        of_case = predicted.get(one.case.name, {})
        rule = rules.get(one.case.name)
        rows.append(
            (
                one.case.name,
                one.best_dense,
                _text(one.gain(TOP_ONE_PERCENT, one.best_dense)),
                _predicted_gain(of_case, TOP_ONE_PERCENT, one.best_dense),
                _crossover_text(one, one.best_dense),
                _predicted_crossover(of_case, one.best_dense),
                _crossover_text(one, _RULE_DENSE),
                f"{rule:.3f}" if rule is not None else "",
            )
        )
    title = (
        f"Sparse at 1 % over the best dense averager (bar: {SPARSE_BAR} at 200 Mb/s), and the density at which both are equal:"
    )
    return _rows(
        title, ("case", "best dense", "measured", "predicted", "equal at", f"predicted (within {CROSSOVER_BAR:.0%})"), rows
    )


def _crossover_text(one: CaseFigures, dense: str) -> str:
    largest, at = one.crossover(dense)
    if at is not None:
        return str(at)
    gain = one.gain(TOP_ONE_PERCENT, dense)
    if gain is None or not largest:
        return ""
    return f"above {largest:g}" if gain.median > 1 else "nowhere"


def _predicted_gain(of_case: Mapping[str, Any], name: str, over: str) -> str:
    mine, theirs = of_case.get(name), of_case.get(over)
    return f"{theirs / mine:.2f}" if mine and theirs else ""


def _predicted_crossover(of_case: Mapping[str, Any], best_dense: str) -> str:
    known = sorted((density, of_case[name]) for name, density in DENSITIES.items() if of_case.get(name))
    dense = of_case.get(best_dense)
    if dense is None or len(known) < 2:
        return ""
    densities, seconds = zip(*known, strict=True)
    at = crossing(densities, seconds, dense)
    return f"{at:.3f}" if at is not None else f"above {densities[-1]:g}" if seconds[-1] < dense else "nowhere"


def _wire_table(figures: Sequence[CaseFigures]) -> str:
    rows = []
    for one in figures:
        for name, (base, _) in WIRE.items():
            gain = one.gain(name, base)
            if gain is not None:
                rows.append((one.case.name, name, str(gain), _megabytes(one, name), _megabytes(one, base)))
    title = f"Messages of 16 bits over those of 32 (bar: {WIRE_BAR} where the wire limits):"
    return _rows(title, ("case", "variant", "gain", "MB on a link", "MB with 32 bits"), rows)


def _priority_table(figures: Sequence[CaseFigures]) -> str:
    rows = []
    for one in figures:
        pairs = [(name, name.replace("priority", "sharded")) for name in ("priority", "priority-exchange")]
        for name, base in pairs:
            over_base, over_blocking = one.gain(name, base), one.gain(name, "blocking")
            if over_base is not None:
                rows.append((one.case.name, name, str(over_base), _text(over_blocking), _text(one.gain(base, "blocking"))))
    title = "Priority over sharded, and both over blocking:"
    return _rows(title, ("case", "variant", "over sharded", "over blocking", "sharded over blocking"), rows)


def _case_table(one: CaseFigures, run: Mapping[str, Any], predicted: Mapping[str, Any]) -> str:
    facts = run["facts"]
    rows = []
    for name in one.names:
        over = one.gain(name, one.best_dense) if one.best_dense is not None and name != ALONE else None
        expected = predicted.get(name)
        rows.append(
            (
                name,
                str(one.step(name)),
                f"{expected:.3f}" if expected else "",
                _text(over),
                _megabytes(one, name),
                f"{interval(one.column(name, 'payload_bytes')).median / 1e6:.2f}",
                f"{interval(one.column(name, 'cpu_seconds')).median:.3f}",
                str(len(one.column(name))),
            )
        )
    title = (
        f"{one.case.name}: {facts['ranks']} ranks, {8 * facts['link_bytes_per_second'] / 1e6:.0f} Mb/s measured, "
        f"{facts['parameters']:,} parameters, {run['machine']['date']}"
    )
    head = ("variant", "step, s", "predicted, s", "over the best dense", "MB on a link", "MB of a rank", "CPU, s", "rounds")
    left_out = [f"Left out: {name} ({sentence})" for name, sentence in run["refused"].items()]
    return "\n\n".join([_rows(title, head, rows), *left_out])


def _megabytes(one: CaseFigures, name: str) -> str:
    value = interval(one.column(name, "link_bytes")).median
    return "" if math.isclose(value, 0.0) else f"{value / 1e6:.2f}"


def _text(value: Interval | None) -> str:
    return "" if value is None else str(value)
