"""The ranks at the end of the waits: a rank that waits points to those that have not posted what it waits for.

Followed from rank to rank this ends at one that waits for nobody, which held all others up, or runs in a circle. Where all have
posted, one that does not move any more is to blame: a message also needs the processor of those that have posted it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpctrain.flight.findings import Autopsy, latest_seconds, named, place, posted_at, silence, silent_seconds
from hpctrain.flight.ring import FlightRecord, RecordedOperation
from hpctrain.rank_spans import ranks_of

_OF_RANKS = re.compile(r" of ranks ([0-9, -]+)\)$")
# A heartbeat looks for moves every second or every twentieth of a deadline, and other nodes see its record late.
_STILL_SHARE = 0.75


def held_up(records: Sequence[FlightRecord]) -> Autopsy | None:
    """The ranks at the end of the waits."""
    by_rank = {record.rank: record for record in records}
    edges = {rank: _absence(record, by_rank) for rank, record in by_rank.items() if record.wait}
    if not edges:
        return None
    path = [min(edges, key=lambda rank: by_rank[rank].wall_seconds(by_rank[rank].wait_since_ns))]
    while absent := edges[path[-1]].ranks:
        free = [rank for rank in absent if rank not in edges]
        if free:
            return _never_posted(path[-1], free, edges[path[-1]], by_rank)
        if absent[0] in path:
            return _circle([*path[path.index(absent[0]) :], absent[0]], edges, by_rank)
        path.append(absent[0])
    return _nobody_absent(path[-1], edges[path[-1]], by_rank)


@dataclass(frozen=True)
class _Absence:
    """The operation that holds a waiting rank up, where it is one of a queue, and the ranks that have not posted it."""

    operation: RecordedOperation | None
    ranks: tuple[int, ...]


def _absence(record: FlightRecord, by_rank: Mapping[int, FlightRecord]) -> _Absence:
    """Those that a waiting rank waits for; ranks without a record count as such.

    An operation whose own turn has not come waits for those in flight on this rank: the first of them that others lack counts.
    Where others lack none, the transport holds up the first of them.
    """
    awaited = awaited_operation(record)
    if awaited is None:  # outside the queues: those that do not wait for the same
        named = _OF_RANKS.search(record.wait)
        ranks = _ranks(named[1] if named else "", record, by_rank)
        return _Absence(None, tuple(rank for rank in ranks if rank not in by_rank or by_rank[rank].wait != record.wait))
    flying = [recorded for recorded in record.operations if recorded.started_ns and not recorded.done_ns]
    flying = [] if awaited.started_ns else sorted(flying, key=lambda recorded: recorded.started_ns)
    for operation in flying or [awaited]:
        absent = _absent(operation, record, by_rank)
        if absent:
            return _Absence(operation, absent)
    return _Absence(flying[0] if flying else awaited, ())


def awaited_operation(record: FlightRecord) -> RecordedOperation | None:
    """The operation that a rank waits for, where it is one of a queue."""
    return (
        next((recorded for recorded in record.operations if recorded.number == record.wait_number), None) if record.wait else None
    )


def _absent(operation: RecordedOperation, record: FlightRecord, by_rank: Mapping[int, FlightRecord]) -> tuple[int, ...]:
    _, _, ranks = operation.queue.rpartition(" of ")
    members = _ranks(ranks, record, by_rank)
    return tuple(rank for rank in members if rank not in by_rank or not _has_started(by_rank[rank], operation))


def _ranks(text: str, record: FlightRecord, by_rank: Mapping[int, FlightRecord]) -> tuple[int, ...]:
    """Return the ranks that a text names; all ranks of the job if it names none or is damaged."""
    try:
        ranks = ranks_of(text, record.ranks)
    except ValueError:
        ranks = ()
    return ranks or tuple(sorted({*range(record.ranks), *by_rank}))


def _has_started(record: FlightRecord, operation: RecordedOperation) -> bool:
    """Whether a rank has posted its part of an operation, as far as its ring goes back."""
    of_queue = [recorded for recorded in record.operations if recorded.queue == operation.queue]
    same = next((recorded for recorded in of_queue if recorded.sequence == operation.sequence), None)
    if same is not None:
        return same.started_ns > 0
    return any(recorded.sequence > operation.sequence for recorded in of_queue)


def _never_posted(waiting: int, absent: Sequence[int], absence: _Absence, by_rank: Mapping[int, FlightRecord]) -> Autopsy:
    record = by_rank[waiting]
    sentences = [
        f"{named(absent).capitalize()} never posted {_text(absence, record)}, for which rank {waiting} waited "
        f"{_seconds(record, record.wait_since_ns)} ({place(record)})."
    ]
    latest = latest_seconds([*by_rank.values()])
    for rank in absent:
        if rank not in by_rank:
            continue
        other = by_rank[rank]
        silent = silent_seconds(other, latest)
        if other.seen_ns == other.begun_ns:  # the heartbeat has not begun, so that silence means nothing
            since = other.wall_seconds(other.phase_since_ns or other.begun_ns)
            sentences.append(f"Rank {rank} was in {place(other)} for {max(0.0, latest - since):.0f} s.")
            continue
        gone = f", and was silent for {silent:.0f} s at the end: ended, stopped, or its node lost" if silent else ""
        sentences.append(f"{_whereabouts(other)}{gone}.")
    return Autopsy(tuple(sentences), tuple(absent))


def _text(absence: _Absence, record: FlightRecord) -> str:
    """The operation that holds a rank up, with its place in its queue, and in the program."""
    operation = absence.operation
    if operation is None:
        return record.wait
    what = f"the {operation.operation} for {operation.purpose}" if operation.operation else operation.purpose
    return f"{what}, number {operation.sequence} of {operation.queue}{posted_at(operation)}"


def _circle(path: Sequence[int], edges: Mapping[int, _Absence], by_rank: Mapping[int, FlightRecord]) -> Autopsy:
    """Ranks of which each waits for the next; the first comes last again."""
    texts = {rank: _text(edges[rank], by_rank[rank]) for rank in path}
    blamed = tuple(sorted(texts))
    if len(blamed) == 1:
        return Autopsy((f"Rank {blamed[0]} waits for what it has not posted itself: {texts[blamed[0]]}.",), blamed)
    steps = [f"rank {rank} waits for {texts[rank]}, which rank {other} has not posted" for rank, other in pairwise(path)]
    return Autopsy((f"{named(blamed).capitalize()} wait for each other: {'; '.join(steps)}.",), blamed)


def _nobody_absent(rank: int, absence: _Absence, by_rank: Mapping[int, FlightRecord]) -> Autopsy:
    """All have posted what a rank waits for: one that does not move drives it no more, or the transport does not."""
    record = by_rank[rank]
    waited = f"rank {rank} waited {_seconds(record, record.wait_since_ns)} for ({place(record)})"
    posted = f"All ranks posted what {waited}, {_text(absence, record)}"
    still = [other for other in by_rank.values() if _is_still(other, record)]
    if not still:
        return Autopsy((f"{posted}: the transport has not moved it, as where a link is cut.",))
    ranks, latest = tuple(other.rank for other in still), latest_seconds([*by_rank.values()])
    sentences = [f"{posted}; {named(ranks)} did not drive it any more."]
    for other in still:
        silent = silent_seconds(other, latest)
        sentences.append(silence(other, silent) if silent else f"{_whereabouts(other)}.")
    return Autopsy(tuple(sentences), ranks)


def _is_still(record: FlightRecord, waiting: FlightRecord) -> bool:
    """Whether a rank has not moved for most of the time that another one waited: it computes, reads, or is stopped."""
    watched = record.alive_ns > record.begun_ns  # else no heartbeat has told of moves, as waits are
    if record.wait and not watched:
        return False
    at = waiting.wall_seconds(waiting.last_ns)
    waited = at - waiting.wall_seconds(waiting.wait_since_ns)
    return at - record.wall_seconds(record.moved_ns) > _STILL_SHARE * waited


def _whereabouts(record: FlightRecord) -> str:
    return f"Rank {record.rank} was in {place(record)} for {_seconds(record, record.phase_since_ns)}"


def _seconds(record: FlightRecord, since_ns: int) -> str:
    return f"{max(0.0, (record.last_ns - since_ns) * 1e-9):.0f} s"
