"""Findings from the flight records of all ranks: the first that went wrong, and where. Pure; one sentence each.

A rank that waits points to those that have not posted what it waits for. Followed from rank to rank this ends at one that waits
for nobody, which held all others up, or runs in a circle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from signal import Signals

from hpctrain.flight.ring import End, FlightRecord, RecordedOperation
from hpctrain.rank_spans import ranks_of, spans

# Collectives whose sizes are the same on all ranks.
_ALIKE = re.compile(r"(allreduce|reduce-scatter|allgather|broadcast from \d+) of \d+ \w+ elements|barrier")
_OF_RANKS = re.compile(r" of ranks ([0-9, -]+)\)$")
# A process that has been silent for so much longer than the latest one is taken for dead, or stopped.
_SILENT_SECONDS = 3.0


@dataclass(frozen=True)
class Autopsy:
    """The findings, the most important first, and the ranks that they blame."""

    sentences: tuple[str, ...]
    blamed: tuple[int, ...] = ()


def newest(records: Sequence[FlightRecord]) -> tuple[FlightRecord, ...]:
    """The records of the latest start among them, by rank."""
    latest = max((record.job for record in records), default=0)
    return tuple(sorted((record for record in records if record.job == latest), key=lambda record: record.rank))


def autopsy(records: Sequence[FlightRecord]) -> Autopsy:
    """The findings from the records of one start."""
    if not records:
        return Autopsy(("No rank has left a record.",))
    missing = sorted(set(range(records[0].ranks)) - {record.rank for record in records})
    unlike = _mismatch(records)  # first: an MPI may end a rank for it, hang, or go on with other numbers
    if unlike is None and not missing and all(record.end is End.FINISHED for record in records):
        return Autopsy((f"The job finished: {_ranks(range(len(records)))} ended in good order.",))
    findings = unlike or _failed(records) or _held_up(records) or _silent(records) or _stuck(records)
    sentences = list(findings.sentences)
    if missing:
        sentences.append(f"{_ranks(missing).capitalize()} left no record here: never started, or on nodes that keep their own.")
    return Autopsy(tuple(sentences), findings.blamed)


def _failed(records: Sequence[FlightRecord]) -> Autopsy | None:
    """The ranks that failed first, with the sentence that they failed with."""
    ended = [record for record in records if record.end in (End.FAILED, End.SIGNAL, End.LEFT)]
    if not ended:
        return None
    first = min(ended, key=lambda record: record.wall_seconds(record.seen_ns))
    alike, how = [first.rank], f"was ended by {Signals(first.signal).name}" if first.end is End.SIGNAL else "failed"
    if first.end is End.LEFT:
        how = f"left with exit code {first.signal} before the run was over"
    if first.end is End.FAILED:  # all ranks say what concerns all of them
        alike = [record.rank for record in ended if record.sentence == first.sentence and record.end is End.FAILED]
        how = f"failed first: {first.sentence.rstrip('.')}"
    return Autopsy((f"{_ranks(alike).capitalize()} {how} ({place(first)}).",), tuple(alike))


def _mismatch(records: Sequence[FlightRecord]) -> Autopsy | None:
    """The first operation of a queue that ranks have not posted alike."""
    by_queue: dict[str, dict[int, dict[int, RecordedOperation]]] = {}
    for record in records:
        for recorded in record.operations:
            if recorded.started_ns:
                by_queue.setdefault(recorded.queue, {}).setdefault(recorded.sequence, {})[record.rank] = recorded
    for queue, sequences in by_queue.items():
        for sequence in sorted(sequences):
            posted = sequences[sequence]
            texts = {rank: _comparable(recorded) for rank, recorded in posted.items()}
            if len(set(texts.values())) > 1:
                return _unlike(queue, sequence, posted, texts)
    return None


def _comparable(operation: RecordedOperation) -> tuple[str, str]:
    """The words of an operation that must be the same on all ranks."""
    alike = _ALIKE.match(operation.operation)
    return operation.purpose, alike[0] if alike else ""


def _unlike(queue: str, sequence: int, posted: Mapping[int, RecordedOperation], texts: Mapping[int, tuple[str, str]]) -> Autopsy:
    """Ranks that posted different operations: the fewest are to blame, the higher ones where both are as many."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(rank)
    ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    said = "; ".join(f"{_ranks(ranks)} the {posted[ranks[0]].operation} for {posted[ranks[0]].purpose}" for ranks in ordered)
    others = [rank for ranks in ordered[1:] for rank in ranks]
    return Autopsy((f"Ranks posted different operations as number {sequence} of {queue}: {said}.",), tuple(others))


def _held_up(records: Sequence[FlightRecord]) -> Autopsy | None:
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
    """
    awaited = awaited_operation(record)
    if awaited is None:  # outside the queues: those that do not wait for the same
        named = _OF_RANKS.search(record.wait)
        ranks = ranks_of(named[1]) if named else tuple(by_rank)
        return _Absence(None, tuple(rank for rank in ranks if rank not in by_rank or by_rank[rank].wait != record.wait))
    flying = [recorded for recorded in record.operations if recorded.started_ns and not recorded.done_ns]
    for operation in (awaited,) if awaited.started_ns else (*sorted(flying, key=lambda recorded: recorded.started_ns), awaited):
        absent = _absent(operation, by_rank)
        if absent:
            return _Absence(operation, absent)
    return _Absence(awaited, ())


def awaited_operation(record: FlightRecord) -> RecordedOperation | None:
    """The operation that a rank waits for, where it is one of a queue."""
    return (
        next((recorded for recorded in record.operations if recorded.number == record.wait_number), None) if record.wait else None
    )


def _absent(operation: RecordedOperation, by_rank: Mapping[int, FlightRecord]) -> tuple[int, ...]:
    members = _members(operation, by_rank)
    return tuple(rank for rank in members if rank not in by_rank or not _has_started(by_rank[rank], operation))


def _members(operation: RecordedOperation, by_rank: Mapping[int, FlightRecord]) -> tuple[int, ...]:
    name, _, ranks = operation.queue.rpartition(" of ")
    return ranks_of(ranks) if name else tuple(by_rank)


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
        f"{_ranks(absent).capitalize()} never posted {_text(absence, record)}, for which rank {waiting} waited "
        f"{_seconds(record, record.wait_since_ns)} ({place(record)})."
    ]
    latest = max(other.wall_seconds(other.last_ns) for other in by_rank.values())
    for rank in absent:
        if rank not in by_rank:
            continue
        other = by_rank[rank]
        silent = latest - other.wall_seconds(other.last_ns)
        gone = (
            f", and was silent for {silent:.0f} s at the end: ended, stopped, or its node lost"
            if silent > _SILENT_SECONDS
            else ""
        )
        sentences.append(f"Rank {rank} was in {place(other)} for {_seconds(other, other.phase_since_ns)}{gone}.")
    return Autopsy(tuple(sentences), tuple(absent))


def _text(absence: _Absence, record: FlightRecord) -> str:
    """The operation that holds a rank up, with its place in its queue."""
    operation = absence.operation
    if operation is None:
        return record.wait
    what = f"the {operation.operation} for {operation.purpose}" if operation.operation else operation.purpose
    return f"{what}, number {operation.sequence} of {operation.queue}"


def _circle(path: Sequence[int], edges: Mapping[int, _Absence], by_rank: Mapping[int, FlightRecord]) -> Autopsy:
    """Ranks of which each waits for the next; the first comes last again."""
    texts = {rank: _text(edges[rank], by_rank[rank]) for rank in path}
    blamed = tuple(sorted(texts))
    if len(blamed) == 1:
        return Autopsy((f"Rank {blamed[0]} waits for what it has not posted itself: {texts[blamed[0]]}.",), blamed)
    steps = [f"rank {rank} waits for {texts[rank]}, which rank {other} has not posted" for rank, other in pairwise(path)]
    return Autopsy((f"{_ranks(blamed).capitalize()} wait for each other: {'; '.join(steps)}.",), blamed)


def _nobody_absent(rank: int, absence: _Absence, by_rank: Mapping[int, FlightRecord]) -> Autopsy:
    record = by_rank[rank]
    waited = f"rank {rank} waited {_seconds(record, record.wait_since_ns)} for ({place(record)})"
    return Autopsy(
        (f"All ranks posted what {waited}, {_text(absence, record)}: the transport has not moved it, as where a link is cut.",)
    )


def _silent(records: Sequence[FlightRecord]) -> Autopsy | None:
    """Ranks whose records end before those of the others."""
    latest = max(record.wall_seconds(record.last_ns) for record in records)
    silent = {
        record: latest - record.wall_seconds(record.last_ns)
        for record in records
        if record.end is End.RUNNING and latest - record.wall_seconds(record.last_ns) > _SILENT_SECONDS
    }
    if not silent:
        return None
    sentences = tuple(
        f"Rank {record.rank} was silent for {seconds:.0f} s at the end, last in {place(record)}: "
        f"ended, stopped, or its node lost."
        for record, seconds in silent.items()
    )
    return Autopsy(sentences, tuple(record.rank for record in silent))


def _stuck(records: Sequence[FlightRecord]) -> Autopsy:
    """Nobody waits for anybody: where each of them is."""
    by_phase: dict[str, list[FlightRecord]] = {}
    for record in records:
        by_phase.setdefault(record.phase, []).append(record)
    gave_up = [record for record in records if record.end is End.DEADLINE]
    sentences = []
    for of_phase in by_phase.values():
        longest = max((record.last_ns - record.phase_since_ns) * 1e-9 for record in of_phase)
        which = _ranks([record.rank for record in of_phase])
        sentences.append(f"{which.capitalize()} {_were(of_phase)} in {place(of_phase[0])} for {longest:.0f} s.")
    return Autopsy(tuple(sentences), tuple(record.rank for record in gave_up))


def place(record: FlightRecord) -> str:
    """The phase and the step of a rank."""
    phase = record.phase or "its start"
    return f"{phase}, step {record.step}" if record.step else phase


def _seconds(record: FlightRecord, since_ns: int) -> str:
    return f"{max(0.0, (record.last_ns - since_ns) * 1e-9):.0f} s"


def _were(records: Sequence[FlightRecord]) -> str:
    return "was" if len(records) == 1 else "were"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}"
