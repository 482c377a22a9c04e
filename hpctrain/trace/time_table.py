"""Tabulate the time of a step from its trace: layer | compute | communication | hidden | exposed | rank that came late.

All numbers are means over the counted steps of one rank, in seconds. Each instant of the program counts once: as computation of a
row, as posting and testing of messages, as a wait of a row (exposed), or as time in no recorded event (left over). The compute,
message and exposed times of all rows and the left-over time therefore add up to the step.

Communication overlaps with the program. The communication time of a row is the time in which at least one of its operations was
in flight: posted and not yet noticed as complete. Its hidden time is the part in which the program did not wait. Exposed time is
measured: it is the time of the waits, without the updates computed during them.

A set of intervals is a pair of int64 arrays (start, stop). `union` makes it sorted and disjoint, as the other functions require.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import numpy as np

from hpctrain.trace.tracer import CONCURRENT, Category, Events

Intervals: TypeAlias = tuple[np.ndarray, np.ndarray]


def union(start: np.ndarray, stop: np.ndarray) -> Intervals:
    """Return the union of intervals as sorted, disjoint intervals."""
    order = np.argsort(start, kind="stable")
    start, stop = start[order], stop[order]
    if not len(start):
        return start, stop
    reach = np.maximum.accumulate(stop)
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return start[first], reach[last]


def total_length(intervals: Intervals) -> int:
    """Return the total length of disjoint intervals."""
    return int((intervals[1] - intervals[0]).sum())


def common_length(a: Intervals, b: Intervals) -> int:
    """Return the length of the intersection of two disjoint sets."""
    return int((_covered(b, a[1]) - _covered(b, a[0])).sum()) if len(a[0]) and len(b[0]) else 0


def clip(a: Intervals, window: Intervals) -> Intervals:
    """Return the part of the disjoint set `a` inside the disjoint set `window`."""
    starts, stops = [], []
    first = np.searchsorted(window[1], a[0], side="right")
    beyond = np.searchsorted(window[0], a[1], side="left")
    for k in range(len(a[0])):
        for w in range(first[k], beyond[k]):
            starts.append(max(a[0][k], window[0][w]))
            stops.append(min(a[1][k], window[1][w]))
    return np.array(starts, np.int64), np.array(stops, np.int64)


def own_time(start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sorted segments (start, stop, index) of nested intervals, each with the index of the innermost interval there.

    Intervals must be nested, as function calls are. An inner interval that ends after its outer one, because of rounded clocks,
    is clipped.
    """
    order = np.lexsort((-stop, start))
    segments: list[tuple[int, int, int]] = []
    stack: list[tuple[int, int]] = []  # (stop, index)
    now = 0

    def emit(until: int) -> None:
        nonlocal now
        if stack and until > now:
            segments.append((now, until, stack[-1][1]))
        now = max(now, until)

    for begin, end, index in zip(start[order].tolist(), stop[order].tolist(), order.tolist(), strict=True):
        while stack and stack[-1][0] <= begin:
            emit(stack[-1][0])
            stack.pop()
        emit(begin)
        stack.append((min(end, stack[-1][0]) if stack else end, index))
    while stack:
        emit(stack[-1][0])
        stack.pop()
    table = np.array(segments, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _covered(intervals: Intervals, at: np.ndarray) -> np.ndarray:
    """Return the length of the part of a disjoint set before each of the times `at`."""
    start, stop = intervals
    before = np.concatenate([[0], np.cumsum(stop - start)])
    k = np.searchsorted(start, at, side="right")
    inside = np.where(k > 0, np.minimum(at - start[np.maximum(k - 1, 0)], (stop - start)[np.maximum(k - 1, 0)]), 0)
    return before[np.maximum(k - 1, 0)] + inside


UPDATE_ROW = "optimizer update"
_OPERATORS = (Category.FORWARD, Category.PARAMETERS, Category.INPUT)
_MESSAGES = (Category.AVERAGING, Category.MESSAGES)
_WORD = re.compile(r"[\w.]+")
_SECONDS = 1e-9


@dataclass(frozen=True)
class Late:
    """Lateness of ranks in a row's collectives.

    Attributes:
        rank: rank that most often posted last.
        share: share of the collectives in which it posted last.
        after_first_seconds: mean delay after the first rank, over the collectives in which it posted last.
    """

    rank: int
    share: float
    after_first_seconds: float


@dataclass(frozen=True)
class Row:
    """One line of the table, in seconds per step.

    Attributes:
        kind: "layer", "communication" (if it belongs to no single layer) or "work".
        compute_seconds: time of computation; for a layer, the sum of the phases (forward, parameters, input).
        forward_seconds, parameters_seconds, input_seconds: time of each phase of a layer.
        communication_seconds: time in which operations were in flight.
        hidden_seconds: part of the communication time in which the program did not wait.
        exposed_seconds: time of waits.
        operations: number of operations that were posted.
        late: lateness of the ranks; None: unknown, or nothing was posted by several ranks.
        messages_seconds: time in which the program posted and tested messages.
        delay_seconds: upper bound of the total time by which operations were posted later than possible.
    """

    name: str
    kind: str
    compute_seconds: float = 0.0
    forward_seconds: float = 0.0
    parameters_seconds: float = 0.0
    input_seconds: float = 0.0
    communication_seconds: float = 0.0
    hidden_seconds: float = 0.0
    exposed_seconds: float = 0.0
    operations: float = 0.0
    late: Late | None = None
    messages_seconds: float = 0.0
    delay_seconds: float = 0.0


@dataclass(frozen=True)
class TimeTable:
    """Table of the time of a step: all rows, and their total.

    Attributes:
        left_over_seconds: time in no recorded event.
        step_seconds: mean duration of the counted steps.
        events, tracing_seconds: number of events of a step, and the estimated time of recording them.
    """

    rows: tuple[Row, ...]
    total: Row
    left_over_seconds: float
    step_seconds: float
    median_step_seconds: float
    steps: int
    events: float
    tracing_seconds: float = field(default=0.0)


def from_json(content: Mapping[str, Any]) -> TimeTable:
    """Return the table from the result of `dataclasses.asdict`.

    Raises:
        ValidationError: the content does not describe a table.
    """
    from pydantic import TypeAdapter  # here: a run writes tables without it

    return TypeAdapter(TimeTable).validate_python(content)


class RowNames:
    """Assignment of events to rows of the table.

    An event that names exactly one layer, or parameters of one layer, belongs to the row of that layer. Any other event belongs
    to the row of its own name.
    """

    def __init__(self, layers: Iterable[str]) -> None:
        self.layers = tuple(dict.fromkeys(layers))
        self._known = set(self.layers)
        self._cache: dict[str, str] = {}

    def of(self, operation: str) -> str:
        """Return the row of an operation that is posted or waited for."""
        if operation not in self._cache:
            found = {layer for word in _WORD.findall(operation) if (layer := self._layer(word)) is not None}
            self._cache[operation] = found.pop() if len(found) == 1 else operation
        return self._cache[operation]

    def _layer(self, word: str) -> str | None:
        owner = word.strip(".").rpartition(".")[0]
        if owner in self._known:
            return owner
        return word if word in self._known else None


def layer_names(events: Events) -> tuple[str, ...]:
    """Return the names of all operators, in forward order."""
    forward = events.of(Category.FORWARD)
    return tuple(dict.fromkeys(events.names[index] for index in forward.name.tolist()))


def counted_steps(events: Events, skip: int = 1) -> Intervals:
    """Return the recorded steps, sorted, without the first `skip`, in which buffers are made; all if there are no others."""
    steps = events.of(Category.STEP)
    order = np.argsort(steps.start_ns)
    if len(order) > skip:
        order = order[skip:]
    return steps.start_ns[order], steps.stop_ns[order]


def tabulate(events: Events, skip: int = 1) -> TimeTable | None:
    """Return the table of one rank, without `late`; None if no whole step was recorded. `skip` is that of `counted_steps`."""
    window = counted_steps(events, skip)
    steps = len(window[0])
    if steps == 0:
        return None
    names = RowNames(layer_names(events))
    lengths = window[1] - window[0]
    inside = events.select(_starts_in(events.start_ns, window))
    rows: dict[str, dict[str, float]] = {name: {"kind": 0} for name in names.layers}
    waits, left_over = _program_time(inside, names, rows)
    _communication(events, names, rows, window, waits)
    delays = inside.of(Category.DELAY)
    for name, nanoseconds in zip(delays.name.tolist(), (delays.stop_ns - delays.start_ns).tolist(), strict=True):
        _add(rows, names.of(delays.names[name]), "communication", "delay", nanoseconds)
    operations = events.of(Category.COMMUNICATION)
    flying = clip(union(operations.start_ns, operations.stop_ns), window)  # while any operation is in flight
    per_step = _SECONDS / steps
    made = _ordered(_row(name, values, per_step) for name, values in rows.items())
    compute = sum(row.compute_seconds for row in made)
    exposed = sum(row.exposed_seconds for row in made)
    total = Row(
        "total",
        "total",
        compute_seconds=compute,
        communication_seconds=total_length(flying) * per_step,
        hidden_seconds=(total_length(flying) - common_length(flying, waits)) * per_step,
        exposed_seconds=exposed,
        operations=sum(row.operations for row in made),
        messages_seconds=sum(row.messages_seconds for row in made),
        delay_seconds=sum(row.delay_seconds for row in made),
    )
    return TimeTable(
        tuple(made),
        total,
        left_over * per_step,
        float(lengths.mean()) * _SECONDS,
        float(np.median(lengths)) * _SECONDS,
        steps,
        len(inside) / steps,
    )


def _starts_in(start_ns: np.ndarray, window: Intervals) -> np.ndarray:
    position = np.searchsorted(window[0], start_ns, side="right") - 1
    found: np.ndarray = (position >= 0) & (start_ns < window[1][np.maximum(position, 0)])
    return found


def _program_time(inside: Events, names: RowNames, rows: dict[str, dict[str, float]]) -> tuple[Intervals, int]:
    """Assign every instant of the program to its row. Return the waits as intervals, and the left-over time in ns."""
    program = inside.select(~np.isin(inside.category, CONCURRENT))
    start, stop, owner = own_time(program.start_ns, program.stop_ns)
    lengths = np.bincount(owner, weights=stop - start, minlength=len(program))
    category = program.category
    keys, inverse = np.unique(np.stack([category, program.name]), axis=1, return_inverse=True)
    sums = np.bincount(inverse.reshape(-1), weights=lengths, minlength=keys.shape[1])
    left_over = 0
    for (kind, name_index), nanoseconds in zip(keys.T.tolist(), sums.tolist(), strict=True):
        name = program.names[name_index]
        if kind == Category.STEP:
            left_over += int(nanoseconds)
        elif kind == Category.WAIT:
            _add(rows, names.of(name), "communication", "exposed", nanoseconds)
        elif kind in _OPERATORS:
            _add(rows, name, "layer", Category(kind).name.lower(), nanoseconds)
        elif kind in _MESSAGES:
            _add(rows, name, "communication", "messages", nanoseconds)
        else:
            _add(rows, UPDATE_ROW if kind == Category.UPDATE else name, "work", "compute", nanoseconds)
    waiting = category[owner] == Category.WAIT
    return union(start[waiting], stop[waiting]), left_over


def _communication(
    events: Events, names: RowNames, rows: dict[str, dict[str, float]], window: Intervals, waits: Intervals
) -> None:
    """Add each row's communication and hidden time in ns."""
    operations = events.of(Category.COMMUNICATION)
    begun = _starts_in(operations.start_ns, window)
    members: dict[str, list[int]] = {}
    for index, name in enumerate(operations.name.tolist()):
        members.setdefault(names.of(operations.names[name]), []).append(index)
    for row, indices in members.items():
        own = union(operations.start_ns[indices], operations.stop_ns[indices])
        flying = clip(own, window)
        whole = total_length(flying)
        if whole or begun[indices].any():
            _add(rows, row, "communication", "communication", whole)
            _add(rows, row, "communication", "hidden", whole - common_length(flying, waits))
            _add(rows, row, "communication", "operations", int(begun[indices].sum()) / _SECONDS)


_KINDS = ("layer", "communication", "work")
_PHASES = ("forward", "parameters", "input")
_MEASURED = (*_PHASES, "communication", "hidden", "exposed", "messages", "delay")


def _add(rows: dict[str, dict[str, float]], name: str, kind: str, column: str, value: float) -> None:
    row = rows.setdefault(name, {"kind": float(_KINDS.index(kind))})
    row[column] = row.get(column, 0.0) + value


def _ordered(rows: Iterable[Row]) -> list[Row]:
    """Return layers in forward order, then communication, then other work."""
    return sorted(rows, key=lambda row: _KINDS.index(row.kind))


def _row(name: str, values: Mapping[str, float], per_step: float) -> Row:
    seconds = {f"{column}_seconds": values.get(column, 0.0) * per_step for column in _MEASURED}
    return Row(
        name,
        _KINDS[int(values["kind"])],
        compute_seconds=values.get("compute", 0.0) * per_step + sum(seconds[f"{phase}_seconds"] for phase in _PHASES),
        operations=values.get("operations", 0.0) * per_step,
        late=None,
        **seconds,
    )


#: numeric columns of a row
_COLUMNS = tuple(column.name for column in fields(Row) if column.type == "float")


def merge(tables: Sequence[TimeTable], late: Mapping[str, Late], ranks: Sequence[int] | None = None) -> TimeTable:
    """Return the mean of the tables of all ranks, row by row, with the ranks that posted late. A missing row counts as zero.

    Args:
        ranks: number of ranks that each table represents; None: one.
    """
    weights = [1] * len(tables) if ranks is None else ranks
    rows: dict[str, list[tuple[Row, int]]] = {}
    for table, weight in zip(tables, weights, strict=True):
        for row in table.rows:
            rows.setdefault(row.name, []).append((row, weight))
    count = sum(weights)
    merged = tuple(_ordered(replace(_mean(same, count), late=late.get(name)) for name, same in rows.items()))

    def mean(values: Iterable[float]) -> float:
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / count

    return TimeTable(
        merged,
        _mean([(table.total, weight) for table, weight in zip(tables, weights, strict=True)], count),
        mean(table.left_over_seconds for table in tables),
        mean(table.step_seconds for table in tables),
        mean(table.median_step_seconds for table in tables),
        min(table.steps for table in tables),
        mean(table.events for table in tables),
        mean(table.tracing_seconds for table in tables),
    )


def _mean(rows: Sequence[tuple[Row, int]], count: int) -> Row:
    first, _ = rows[0]
    means = {column: sum(getattr(row, column) * weight for row, weight in rows) / count for column in _COLUMNS}
    return Row(first.name, first.kind, **means)


@dataclass(frozen=True)
class Postings:
    """Operations that one rank posted, with times of rank 0's clock.

    Attributes:
        groups: world rank of the first member of each queue's group.
    """

    rank: int
    operations: Events
    groups: Mapping[str, int]


def latest(postings: Sequence[Postings], names: RowNames, window: Intervals) -> dict[str, Late]:
    """Return the lateness of each row's collectives, by name of the row.

    Operations with the same group, queue and sequence number are one collective. A collective counts if several ranks posted it
    and its first post is inside `window` (on rank 0's clock).
    """
    arrivals: dict[tuple[int, str, int], list[tuple[int, int, str]]] = {}
    for each in postings:
        operations = each.operations
        for track, number, start, name in zip(
            operations.track.tolist(),
            operations.number.tolist(),
            operations.start_ns.tolist(),
            operations.name.tolist(),
            strict=True,
        ):
            queue = operations.tracks[track]
            key = (each.groups.get(queue, -1), queue, number)
            arrivals.setdefault(key, []).append((start, each.rank, operations.names[name]))
    lateness: dict[str, list[tuple[int, int]]] = {}
    for found in arrivals.values():
        first, last = min(found), max(found)
        if len(found) > 1 and _starts_in(np.array([first[0]]), window)[0]:
            lateness.setdefault(names.of(first[2]), []).append((last[1], last[0] - first[0]))
    return {row: _late(found) for row, found in lateness.items()}


def _late(found: Sequence[tuple[int, int]]) -> Late:
    ranks = [rank for rank, _ in found]
    rank = max(sorted(set(ranks)), key=ranks.count)
    delays = [delay for other, delay in found if other == rank]
    return Late(rank, len(delays) / len(found), sum(delays) / len(delays) * _SECONDS)
