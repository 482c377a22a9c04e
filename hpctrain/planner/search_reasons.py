"""Why a candidate loses to another one, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.planner.machine import Machine
from hpctrain.planner.prediction import Prediction
from hpctrain.trace.time_table import TimeTable

_GIBIBYTE = 1 << 30
# Predictions that differ by less are not told apart.
_EQUAL_SHARE = 0.005
#: of a step: predictions of other layers' parallelism may be wrong by so much, one against the other
UNCERTAIN_SHARE = 0.05


def reason(better: Prediction, worse: Prediction, machine: Machine) -> str:
    """The largest part of the time that `worse` takes longer, or that it does not fit into a rank's memory."""
    if worse.memory_bytes > machine.memory_bytes:
        return f"does not fit: {gibibytes(worse.memory_bytes)} of {gibibytes(machine.memory_bytes)}"
    longer = worse.step.seconds - better.step.seconds
    if longer < -_EQUAL_SHARE * better.step.seconds:
        return f"{seconds(-longer)} shorter, which is less than predictions of split layers may be wrong by"
    if longer <= _EQUAL_SHARE * better.step.seconds:
        return "takes as long, as far as predictions tell"
    waits = _rise(_exposed(better.step.table), _exposed(worse.step.table))
    work = _rise(_compute(better.step.table), _compute(worse.step.table))
    most_waits, most_work = (max(rises.items(), key=lambda item: item[1], default=("", 0.0)) for rises in (waits, work))
    if sum(waits.values()) >= sum(work.values()):
        return f"{seconds(longer)} longer: {seconds(sum(waits.values()))} more exposed, most of it in {most_waits[0]}"
    return f"{seconds(longer)} longer: {seconds(sum(work.values()))} more computed, most of it in {most_work[0]}"


def seconds(value: float) -> str:
    """Three significant digits, in seconds or milliseconds."""
    return f"{value:.3g} s" if abs(value) >= 0.1 else f"{1e3 * value:.3g} ms"


def gibibytes(n_bytes: float) -> str:
    """Three significant digits."""
    return f"{n_bytes / _GIBIBYTE:.3g} GiB"


def _exposed(table: TimeTable) -> dict[str, float]:
    return {row.name: row.exposed_seconds for row in table.rows}


def _compute(table: TimeTable) -> dict[str, float]:
    by_row = {row.name: row.compute_seconds + row.messages_seconds for row in table.rows}
    return {**by_row, "the rest of the step": table.left_over_seconds}


def _rise(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By name, how much more there is after; less counts as a negative rise."""
    return {name: after.get(name, 0.0) - before.get(name, 0.0) for name in {**before, **after}}
