"""The report on the planner's predictions: all points, the ones that were named before, picks, and traces. Pure.

Other tenants of a shared machine slow a core by half and more for seconds at a time. Predictions are of an undisturbed step, so
each turn is compared with the prediction at the speed that the cores had in it, by the ranks' yardsticks. The median of predicted
over measured seconds, over the half of the turns in which the cores were slowed least, is what a prediction is judged by. An
undisturbed step is the prediction over that.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.planner_points import POINTS, Point

GOOD_ACCURACY, WORST_ACCURACY = 0.95, 0.80
PICK_LIMIT = 1.05  # a pick may take this many times as long as the best candidate


@dataclass(frozen=True)
class Compared:
    """A point with seconds a step, predicted and measured, and waits.

    predicted_seconds, predicted_exposed_seconds: of an undisturbed step. ratio: of predicted to measured seconds, the median over
    the less disturbed turns. least_seconds, median_seconds: of the steps as they were. measured_waited_seconds: in the least one.
    slowed: how many times the slowest rank's core was slowed, the median over turns; 1 where it was not measured.
    """

    point: Point
    predicted_seconds: float
    ratio: float
    predicted_exposed_seconds: float
    measured_waited_seconds: float
    least_seconds: float
    median_seconds: float
    slowed: float

    @property
    def measured_seconds(self) -> float:
        """The seconds of an undisturbed step: the measured ones without what the cores were slowed by."""
        return self.predicted_seconds / self.ratio

    @property
    def accuracy(self) -> float:
        """1 - |predicted - measured| / measured."""
        return 1 - abs(self.ratio - 1)

    @property
    def least_accuracy(self) -> float:
        """Accuracy against the shortest measured step."""
        return 1 - abs(self.predicted_seconds / self.least_seconds - 1)


@dataclass(frozen=True)
class Pick:
    """A job: the candidate with the lowest prediction, and the one that took least time."""

    job: tuple[str, str, int]
    candidates: int
    picked: Compared
    best: Compared

    @property
    def ratio(self) -> float:
        """Measured seconds of the pick over those of the best."""
        return self.picked.measured_seconds / self.best.measured_seconds

    @property
    def good(self) -> bool:
        return self.ratio <= PICK_LIMIT


@dataclass(frozen=True)
class TraceComparison:
    """The exposed seconds of a simulated table next to those of a real one, as shares of the real step.

    rows: (name, simulated seconds, measured seconds) of all rows with any, in order of the real table.
    """

    name: str
    step_seconds: float
    rows: tuple[tuple[str, float, float], ...]

    @property
    def largest(self) -> tuple[str, float]:
        """The row with the largest difference, and this difference as a share of the step."""
        if not self.rows:
            return "", 0.0
        name, simulated, measured = max(self.rows, key=lambda row: abs(row[1] - row[2]))
        return name, abs(simulated - measured) / self.step_seconds

    @property
    def summed(self) -> float:
        """The sum of all rows' differences as a share of the step."""
        return sum(abs(simulated - measured) for _, simulated, measured in self.rows) / self.step_seconds

    @property
    def total(self) -> float:
        """The difference of the sums as a share of the step."""
        return abs(sum(row[1] for row in self.rows) - sum(row[2] for row in self.rows)) / self.step_seconds


def compared(result: Mapping[str, Any]) -> list[Compared]:
    """All points with a prediction and a measurement, in the list's order."""
    by_name = {point.name: point for point in POINTS}
    rows: dict[str, Compared] = {}
    for run in result["runs"]:
        for name, turns in run["rounds"].items():
            if name not in run["predictions"]:
                continue
            prediction, seconds = run["predictions"][name], [turn["step_seconds"] for turn in turns]
            speed = run.get("at_speed", {}).get(name) or _undisturbed(prediction["step_seconds"], len(turns))
            slowed = [max(ranks) for ranks in speed["slowed"]]
            rows[name] = Compared(
                by_name[name],
                prediction["step_seconds"],
                _ratio(speed["step_seconds"], seconds, slowed),
                prediction["exposed_seconds"],
                min(turns, key=lambda turn: turn["step_seconds"])["waited_seconds"],
                min(seconds),
                statistics.median(seconds),
                statistics.median(slowed),
            )
    return [rows[name] for name in by_name if name in rows]


def _ratio(predicted: Sequence[float], measured: Sequence[float], slowed: Sequence[float]) -> float:
    """Predicted over measured seconds, the median over the half of the turns in which the cores were slowed least."""
    order = sorted(range(len(slowed)), key=lambda turn: slowed[turn])
    return statistics.median(predicted[turn] / measured[turn] for turn in order[: (len(order) + 1) // 2])


def _undisturbed(seconds: float, turns: int) -> dict[str, Any]:
    """The speed in turns without yardsticks."""
    return {"slowed": [[1.0]] * turns, "step_seconds": [seconds] * turns}


def picks(rows: Sequence[Compared]) -> list[Pick]:
    """The picks of all jobs with two candidates and more."""
    jobs: dict[tuple[str, str, int], list[Compared]] = {}
    for row in rows:
        jobs.setdefault(row.point.job, []).append(row)
    return [
        Pick(
            job,
            len(candidates),
            min(candidates, key=lambda row: row.predicted_seconds),
            min(candidates, key=lambda row: row.measured_seconds),
        )
        for job, candidates in jobs.items()
        if len(candidates) > 1
    ]


def traces(result: Mapping[str, Any]) -> list[TraceComparison]:
    """Simulated and real tables of the points that have both."""
    comparisons = []
    for run in result["runs"]:
        for name, table in run.get("traces", {}).items():
            if name in run["predictions"]:
                simulated = _exposed(run["predictions"][name]["table"])
                measured = _exposed(table)
                names = list(dict.fromkeys([*measured, *simulated]))
                rows = tuple((row, simulated.get(row, 0.0), measured.get(row, 0.0)) for row in names)
                comparisons.append(TraceComparison(name, table["step_seconds"], rows))
    return comparisons


def _exposed(table: Mapping[str, Any]) -> dict[str, float]:
    return {row["name"]: row["exposed_seconds"] for row in table["rows"] if row["exposed_seconds"]}


def report(result: Mapping[str, Any]) -> str:
    """Everything, in Markdown."""
    rows = compared(result)
    if not rows:
        return "\n".join(measured_alone(result))
    lines = [*summary(rows), "", *table(rows), "", "Named before anything was measured:", ""]
    lines += [*summary([row for row in rows if row.point.named]), "", *pick_table(picks(rows))]
    for comparison in traces(result):
        lines += ["", *trace_table(comparison)]
    return "\n".join(lines)


def measured_alone(result: Mapping[str, Any]) -> Iterator[str]:
    """The medians of a run without predictions."""
    yield from ("| point | measured s | waited s | CPU s |", "|---|---|---|---|")
    for run in result["runs"]:
        for name, turns in run["rounds"].items():
            columns = ([turn[key] for turn in turns] for key in ("step_seconds", "waited_seconds", "cpu_seconds"))
            medians = [statistics.median(column) for column in columns]
            yield f"| {name} | " + " | ".join(f"{median:.3f}" for median in medians) + " |"


def summary(rows: Sequence[Compared]) -> list[str]:
    """Mean, least and count of accuracies."""
    if not rows:
        return ["no points"]
    accuracies = [row.accuracy for row in rows]
    worst = min(rows, key=lambda row: row.accuracy)
    below = sum(accuracy < WORST_ACCURACY for accuracy in accuracies)
    within = sum(accuracy >= GOOD_ACCURACY for accuracy in accuracies)
    return [
        f"{len(rows)} points: accuracy {statistics.fmean(accuracies):.1%} on average, {statistics.median(accuracies):.1%} in the "
        f"median, {worst.accuracy:.1%} at worst ({worst.point.name}); {within} at {GOOD_ACCURACY:.0%} and above, {below} below "
        f"{WORST_ACCURACY:.0%}. Against the shortest measured step of each point: "
        f"{statistics.fmean(row.least_accuracy for row in rows):.1%} on average."
    ]


def table(rows: Sequence[Compared]) -> list[str]:
    """One line for each point; named ones in bold."""
    lines = [
        "| point | predicted s | measured s | accuracy | exposed s | waited s | least s | median s | slowed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = f"**{row.point.name}**" if row.point.named else row.point.name
        lines.append(
            f"| {name} | {row.predicted_seconds:.3f} | {row.measured_seconds:.3f} | {row.accuracy:.1%} | "
            f"{row.predicted_exposed_seconds:.3f} | {row.measured_waited_seconds:.3f} | {row.least_seconds:.3f} | "
            f"{row.median_seconds:.3f} | {row.slowed:.2f} |"
        )
    return lines


def pick_table(all_picks: Sequence[Pick]) -> list[str]:
    """One line for each job."""
    good = sum(pick.good for pick in all_picks)
    lines = [
        f"Picks: {good} of {len(all_picks)} within {PICK_LIMIT - 1:.0%} of the best measured candidate.",
        "",
        "| job | candidates | picked | measured s | best | measured s | over the best |",
        "|---|---|---|---|---|---|---|",
    ]
    for pick in all_picks:
        network, link, ranks = pick.job
        lines.append(
            f"| {network}, {link}, {ranks} ranks | {pick.candidates} | {_short(pick.picked.point)} | "
            f"{pick.picked.measured_seconds:.3f} | {_short(pick.best.point)} | {pick.best.measured_seconds:.3f} | "
            f"{pick.ratio - 1:.1%} |"
        )
    return lines


def _short(point: Point) -> str:
    return ", ".join(point.name.split(", ")[2:])


def trace_table(comparison: TraceComparison) -> list[str]:
    """The rows of a trace in which anybody waits for more than 1 % of the step."""
    row, largest = comparison.largest
    lines = [
        f"Trace of {comparison.name}: a step of {comparison.step_seconds:.3f} s; exposed seconds by row differ by "
        f"{largest:.1%} of the step at most ({row}), {comparison.summed:.1%} summed over rows; their totals by "
        f"{comparison.total:.1%}.",
        "",
        "| row | simulated exposed s | measured exposed s |",
        "|---|---|---|",
    ]
    for name, simulated, measured in comparison.rows:
        if max(simulated, measured) > 0.01 * comparison.step_seconds:
            lines.append(f"| {name} | {simulated:.4f} | {measured:.4f} |")
    return lines
