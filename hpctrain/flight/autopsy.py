"""Findings from the flight records of all ranks: the first rank that went wrong, and where; one sentence each.

A rank that waits points to the ranks that have not posted what it waits for. Following these pointers ends at a rank that does
not wait, which delayed all others, or returns to a rank already seen: a cycle. If all ranks have posted, a rank that no longer
moves is to blame: a message also needs the processor of the ranks that posted it.

The rules are pure functions of records. `find_records` reads those of a directory; `rank_table` and `autopsy_json` show them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from signal import Signals

from hpctrain.core.errors import DataError
from hpctrain.core.text import ranks_of, spans
from hpctrain.flight.ring import FlightRecord, RecordedOperation, file_name, read
from hpctrain.launch.process_end import End

# A process that was silent this much longer than the latest one counts as dead or stopped: its heartbeat looks once a second, and
# twenty times within a short deadline.
_SILENT_SECONDS = 3.0
_SILENT_SHARE = 0.5


@dataclass(frozen=True)
class Autopsy:
    """The findings, the most important first, and the ranks that they blame."""

    sentences: tuple[str, ...]
    blamed: tuple[int, ...] = ()


def place(record: FlightRecord) -> str:
    """Return the phase and the step of a rank."""
    phase = record.phase or "its start"
    return f"{phase}, step {record.step}" if record.step else phase


def named(ranks: Sequence[int]) -> str:
    """Return ranks as words: 'rank 3', or 'ranks 0-2, 5'."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}"


def posted_at(operation: RecordedOperation) -> str:
    """Return the line of the program that posted an operation, as the end of a clause; empty if unknown."""
    return f" ({operation.line})" if operation.line else ""


def latest_seconds(records: Sequence[FlightRecord]) -> float:
    """Return the last instant at which any of the processes is known to have lived, on the wall clock."""
    return max(record.wall_seconds(record.last_ns) for record in records)


def silent_seconds(record: FlightRecord, latest: float) -> float:
    """Return the seconds from a process's last sign of life to the latest of all; 0 if they are too few to mean anything."""
    silent = latest - record.wall_seconds(record.last_ns)
    least = min(_SILENT_SECONDS, _SILENT_SHARE * record.deadline_ns * 1e-9) if record.deadline_ns else _SILENT_SECONDS
    return silent if silent > least else 0.0


def silence(record: FlightRecord, seconds: float) -> str:
    """Return the sentence about a process that was silent."""
    last = f"Rank {record.rank} was silent for {seconds:.0f} s at the end, last in {place(record)}"
    return f"{last}: ended, stopped, or its node lost."


_OF_RANKS = re.compile(r" of ranks ([0-9, -]+)\)$")
# A heartbeat looks for moves every second or every twentieth of a deadline, and other nodes see its record late.
_STILL_SHARE = 0.75


def waited_for(records: Sequence[FlightRecord]) -> Autopsy | None:
    """Return the ranks at the end of the waits, and what they did not post; None if no rank waits."""
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
            return _cycle([*path[path.index(absent[0]) :], absent[0]], edges, by_rank)
        path.append(absent[0])
    return _all_posted(path[-1], edges[path[-1]], by_rank)


@dataclass(frozen=True)
class _Absence:
    """The operation that holds up a waiting rank, if it is one of a queue, and the ranks that have not posted it."""

    operation: RecordedOperation | None
    ranks: tuple[int, ...]


def _absence(record: FlightRecord, by_rank: Mapping[int, FlightRecord]) -> _Absence:
    """Return what a waiting rank waits for; ranks without a record count as absent.

    An operation whose own turn has not come waits for those in flight on this rank: the first of them that others lack counts. If
    others lack none, the transport holds up the first of them.
    """
    awaited = awaited_operation(record)
    if awaited is None:  # outside of the queues: the ranks that do not wait for the same
        named = _OF_RANKS.search(record.wait)
        ranks = _ranks(named[1] if named else "", record, by_rank)
        return _Absence(None, tuple(rank for rank in ranks if rank not in by_rank or by_rank[rank].wait != record.wait))
    flying = [recorded for recorded in record.operations if recorded.started_ns and not recorded.done_ns]
    flying = [] if awaited.started_ns else sorted(flying, key=lambda recorded: recorded.started_ns)
    for operation in flying or [awaited]:
        members = _ranks(operation.queue.rpartition(" of ")[2], record, by_rank)
        absent = tuple(rank for rank in members if rank not in by_rank or not _has_started(by_rank[rank], operation))
        if absent:
            return _Absence(operation, absent)
    return _Absence(flying[0] if flying else awaited, ())


def awaited_operation(record: FlightRecord) -> RecordedOperation | None:
    """Return the operation that a rank waits for, if it is one of a queue."""
    return (
        next((recorded for recorded in record.operations if recorded.number == record.wait_number), None) if record.wait else None
    )


def _ranks(text: str, record: FlightRecord, by_rank: Mapping[int, FlightRecord]) -> tuple[int, ...]:
    """Return the ranks that a text names; all ranks of the job if it names none or is damaged."""
    try:
        ranks = ranks_of(text, record.ranks)
    except ValueError:
        ranks = ()
    return ranks or tuple(sorted({*range(record.ranks), *by_rank}))


def _has_started(record: FlightRecord, operation: RecordedOperation) -> bool:
    """Return whether a rank has posted its part of an operation, as far as its ring goes back."""
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
        if other.seen_ns == other.begun_ns:  # the heartbeat has not begun: silence means nothing
            since = other.wall_seconds(other.phase_since_ns or other.begun_ns)
            sentences.append(f"Rank {rank} was in {place(other)} for {max(0.0, latest - since):.0f} s.")
            continue
        gone = f", and was silent for {silent:.0f} s at the end: ended, stopped, or its node lost" if silent else ""
        sentences.append(f"{_whereabouts(other)}{gone}.")
    return Autopsy(tuple(sentences), tuple(absent))


def _text(absence: _Absence, record: FlightRecord) -> str:
    """Return the operation that holds up a rank, with its place in its queue and in the program."""
    operation = absence.operation
    if operation is None:
        return record.wait
    what = f"the {operation.operation} for {operation.purpose}" if operation.operation else operation.purpose
    return f"{what}, number {operation.sequence} of {operation.queue}{posted_at(operation)}"


def _cycle(path: Sequence[int], edges: Mapping[int, _Absence], by_rank: Mapping[int, FlightRecord]) -> Autopsy:
    """Return the finding for ranks each of which waits for the next; the first rank is last again."""
    texts = {rank: _text(edges[rank], by_rank[rank]) for rank in path}
    blamed = tuple(sorted(texts))
    if len(blamed) == 1:
        return Autopsy((f"Rank {blamed[0]} waits for what it has not posted itself: {texts[blamed[0]]}.",), blamed)
    steps = [f"rank {rank} waits for {texts[rank]}, which rank {other} has not posted" for rank, other in pairwise(path)]
    return Autopsy((f"{named(blamed).capitalize()} wait for each other: {'; '.join(steps)}.",), blamed)


def _all_posted(rank: int, absence: _Absence, by_rank: Mapping[int, FlightRecord]) -> Autopsy:
    """Return the finding if all ranks posted what a rank waits for: a rank stopped driving it, or the transport did."""
    record = by_rank[rank]
    waited = f"rank {rank} waited {_seconds(record, record.wait_since_ns)} for ({place(record)})"
    posted = f"All ranks posted what {waited}, {_text(absence, record)}"
    still = [other for other in by_rank.values() if _is_still(other, record)]
    if not still:
        return Autopsy((f"{posted}: the transport did not complete it; a link may be cut.",))
    ranks, latest = tuple(other.rank for other in still), latest_seconds([*by_rank.values()])
    sentences = [f"{posted}; {named(ranks)} stopped driving it."]
    for other in still:
        silent = silent_seconds(other, latest)
        sentences.append(silence(other, silent) if silent else f"{_whereabouts(other)}.")
    return Autopsy(tuple(sentences), ranks)


def _is_still(record: FlightRecord, waiting: FlightRecord) -> bool:
    """Return whether a rank has not moved for most of the time that another one waited: it computes, reads, or is stopped."""
    watched = record.alive_ns > record.begun_ns  # otherwise no heartbeat has recorded moves, which waits are
    if record.wait and not watched:
        return False
    at = waiting.wall_seconds(waiting.last_ns)
    waited = at - waiting.wall_seconds(waiting.wait_since_ns)
    return at - record.wall_seconds(record.moved_ns) > _STILL_SHARE * waited


def _whereabouts(record: FlightRecord) -> str:
    return f"Rank {record.rank} was in {place(record)} for {_seconds(record, record.phase_since_ns)}"


def _seconds(record: FlightRecord, since_ns: int) -> str:
    return f"{max(0.0, (record.last_ns - since_ns) * 1e-9):.0f} s"


# Collectives whose sizes are the same on all ranks.
_SAME_SIZES = re.compile(r"(allreduce|reduce-scatter|allgather|broadcast from \d+) of \d+ \w+ elements|barrier")


def newest(records: Sequence[FlightRecord]) -> tuple[FlightRecord, ...]:
    """Return the records of the latest start among them, by rank."""
    latest = max((record.job for record in records), default=0)
    jobs = (latest, 0)  # 0: a rank that ended before it had joined the others
    return tuple(sorted((record for record in records if record.job in jobs), key=lambda record: record.rank))


def autopsy(records: Sequence[FlightRecord]) -> Autopsy:
    """Return the findings from the records of one start."""
    if not records:
        return Autopsy(("No rank has left a record.",))
    ranks = [record.ranks for record in records]
    missing = sorted(set(range(max(ranks, key=ranks.count))) - {record.rank for record in records})
    # These come first: an MPI may end a rank for them, hang, or continue with wrong numbers.
    difference = _different_phase(records) or _different_operation(records)
    if difference is None and not missing and all(record.end is End.FINISHED for record in records):
        return Autopsy((f"The job finished: {named(range(len(records)))} ended normally.",))
    findings = difference or _failed(records)
    ahead: tuple[str, ...] = ()
    if findings is None:
        findings, ahead = waited_for(records) or _silent(records) or _stuck(records), _ahead(records)
    sentences = [*findings.sentences, *ahead]
    if missing:
        sentences.append(
            f"{named(missing).capitalize()} left no record here: they never started, or their nodes keep their own records."
        )
    return Autopsy(tuple(sentences), findings.blamed)


def _failed(records: Sequence[FlightRecord]) -> Autopsy | None:
    """Return the ranks that failed first, with the sentence that they failed with."""
    ended = [record for record in records if record.end not in (End.RUNNING, End.FINISHED)]
    first = min(ended, key=lambda record: record.wall_seconds(record.seen_ns), default=None)
    if first is None or first.end is End.DEADLINE:  # a job that ends at a deadline has its ranks killed
        return None
    failed, how = [first.rank], f"was ended by {Signals(first.signal).name}" if first.end is End.SIGNAL else "failed"
    if first.end is End.EXITED:
        how = f"exited with code {first.signal} before the run was over"
    if first.end is End.CLOSED:
        how = "closed the descriptors of other parts of the program, as by os.closerange"
    if first.end is End.LAUNCHER:  # all ranks of a node lose the launcher together
        failed = [record.rank for record in ended if (record.end, record.host) == (first.end, first.host)]
        did = "was stopped" if first.signal else "had ended"
        how = f"{'was' if len(failed) == 1 else 'were'} ended as the launcher's process on {first.host} {did}"
    if first.end is End.FAILED:  # all ranks report an error that concerns all of them
        failed = [record.rank for record in ended if record.sentence == first.sentence and record.end is End.FAILED]
        cause = f", because of {named(first.blamed)}" if first.blamed and first.blamed != tuple(sorted(failed)) else ""
        how = f"failed first{cause}: {first.sentence.rstrip('.')}"
    return Autopsy((f"{named(failed).capitalize()} {how} ({place(first)}).",), first.blamed or tuple(failed))


def _different_phase(records: Sequence[FlightRecord]) -> Autopsy | None:
    """Return the first collective phase that not all ranks entered; None if all did, as far as the records reach."""
    of_ranks = {record.rank: dict(record.phases) for record in records}
    for number in sorted(set().union(*of_ranks.values())):
        sentence, others = different_phases({rank: phases[number] for rank, phases in of_ranks.items() if number in phases})
        if others:
            return Autopsy((sentence,), others)
    return None


def _ahead(records: Sequence[FlightRecord]) -> tuple[str, ...]:
    """Return a sentence on the latest phase if only some ranks have entered it: ranks may be a phase apart, but wait there."""
    latest = {record.rank: record.phases[-1] for record in records if record.phases}
    number, phase = max(latest.values(), default=(0, ""))
    entered = [rank for rank, (of_rank, _) in latest.items() if of_rank == number]
    others = [record for record in records if record.rank in latest and record.rank not in entered]
    if not others:
        return ()
    places = ", ".join(dict.fromkeys(f"in {place(record)}" for record in others))
    behind = f"{named([record.rank for record in others])} {'was' if len(others) == 1 else 'were'} {places}"
    return (f"Only {named(entered)} entered {phase}; {behind}.",)


def different_phases(phases: Mapping[int, str]) -> tuple[str, tuple[int, ...]]:
    """Return a sentence on ranks that have entered different phases of a run, and the ranks to blame: none if they have not.

    The smaller groups are to blame. phases: name by rank.
    """
    largest, *smaller = _by_size(phases)
    entered = "; ".join(f"{named(ranks)} {phases[ranks[0]]}" for ranks in (largest, *smaller))
    return f"Ranks entered different phases of the run: {entered}.", tuple(rank for ranks in smaller for rank in ranks)


def _different_operation(records: Sequence[FlightRecord]) -> Autopsy | None:
    """Return the first operation of a queue that ranks posted differently."""
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
                return _operations_sentence(queue, sequence, posted, texts)
    return None


def _comparable(operation: RecordedOperation) -> tuple[str, str]:
    """Return the words of an operation that must be the same on all ranks."""
    match = _SAME_SIZES.match(operation.operation)
    return operation.purpose, match[0] if match else ""


def _operations_sentence(
    queue: str, sequence: int, posted: Mapping[int, RecordedOperation], texts: Mapping[int, tuple[str, str]]
) -> Autopsy:
    """Return the finding for ranks that posted different operations. The smallest group is to blame, or the later of two."""
    ordered = _by_size(texts)
    groups = "; ".join(
        f"{named(ranks)} the {posted[ranks[0]].operation} for {posted[ranks[0]].purpose}{posted_at(posted[ranks[0]])}"
        for ranks in ordered
    )
    others = [rank for ranks in ordered[1:] for rank in ranks]
    return Autopsy((f"Ranks posted different operations as number {sequence} of {queue}: {groups}.",), tuple(others))


def _by_size(words: Mapping[int, Hashable]) -> list[list[int]]:
    """Return the ranks that share their words, the largest group first, the one with the lowest ranks among equals."""
    groups: dict[Hashable, list[int]] = {}
    for rank, text in words.items():
        groups.setdefault(text, []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))


def _silent(records: Sequence[FlightRecord]) -> Autopsy | None:
    """Return the ranks whose records end before those of the others."""
    latest = latest_seconds(records)
    silent = {record: silent_seconds(record, latest) for record in records if record.end is End.RUNNING}
    silent = {record: seconds for record, seconds in silent.items() if seconds}
    if not silent:
        return None
    sentences = tuple(silence(record, seconds) for record, seconds in silent.items())
    return Autopsy(sentences, tuple(record.rank for record in silent))


def _stuck(records: Sequence[FlightRecord]) -> Autopsy:
    """Return where each rank is, if no rank waits for another."""
    by_phase: dict[str, list[FlightRecord]] = {}
    for record in records:
        by_phase.setdefault(record.phase, []).append(record)
    gave_up = [record for record in records if record.end is End.DEADLINE]
    sentences = []
    for of_phase in by_phase.values():
        longest = max((record.last_ns - record.phase_since_ns) * 1e-9 for record in of_phase)
        which = named([record.rank for record in of_phase])
        sentences.append(
            f"{which.capitalize()} {'was' if len(of_phase) == 1 else 'were'} in {place(of_phase[0])} for {longest:.0f} s."
        )
    return Autopsy(tuple(sentences), tuple(record.rank for record in gave_up))


_ENDS = {
    End.RUNNING: "unknown",
    End.FINISHED: "finished",
    End.FAILED: "failed",
    End.DEADLINE: "deadline",
    End.SIGNAL: "killed",
    End.EXITED: "exited",
    End.CONTINUED: "continued",
    End.LAUNCHER: "launcher",
    End.CLOSED: "closed",
}
_NAME = re.compile(re.escape(file_name(0)).replace("00000", r"(\d{5,7})"))
#: prefix of directories, numbered from 1, with the records from before a loss of ranks
BEFORE_LOSS = "before-loss-"
# Largest number of damaged records that are reported one by one; the others are counted.
_MOST_NOTES = 8


@dataclass(frozen=True)
class FoundRecords:
    """The content of a directory of records.

    Attributes:
        records: of the latest start, by rank. damaged: a sentence per record that cannot be read. others: number of entries that
            are no records.
    """

    records: tuple[FlightRecord, ...]
    damaged: tuple[str, ...] = ()
    others: int = 0

    def notes(self) -> list[str]:
        """Return a sentence for each of the first damaged records, and one with the number of the others."""
        lines = list(self.damaged[:_MOST_NOTES])
        if len(self.damaged) > _MOST_NOTES:
            lines.append(f"{len(self.damaged) - _MOST_NOTES} more records cannot be read.")
        if self.others:
            lines.append(f"{self.others} {'entry is' if self.others == 1 else 'entries are'} no flight record, and was left out.")
        return lines


def find_records(directory: Path, *, operations: bool = True) -> FoundRecords:
    """Return the records of the latest start in a directory, and what else it holds. operations: see `read`.

    Raises:
        DataError: the directory or none of its records can be read.
    """
    try:
        names = sorted(os.listdir(directory))
    except NotADirectoryError as error:
        raise DataError(f"{directory} is no directory; give that of a run.") from error
    except FileNotFoundError as error:
        raise DataError(f"There is no directory {directory}; give that of a run.") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{str(directory)!r} cannot be read ({error}); give the directory of a run.") from error
    records, damaged = [], []
    ours = [(int(match[1]), directory / name) for name in names if (match := _NAME.fullmatch(name))]
    for rank, path in ours:
        try:
            record = read(path, operations=operations)
        except DataError as error:
            damaged.append(str(error))
        except OSError as error:
            damaged.append(f"{path} cannot be read: {error.strerror or error}.")
        else:
            if record.rank == rank:
                records.append(record)
            else:
                damaged.append(f"{path} holds the record of rank {record.rank}; delete it.")
    if not records:
        if damaged:
            raise DataError(f"No flight record in {directory} can be read. {damaged[0]}")
        raise DataError(f"{directory} holds no flight records (rank-*.flight); give the directory of a run that kept them.")
    earlier = sum(name.startswith(BEFORE_LOSS) for name in names)
    return FoundRecords(newest(records), tuple(damaged), len(names) - len(ours) - earlier)


def records_in(directory: Path, *, operations: bool = True) -> tuple[FlightRecord, ...]:
    """Return the records of the latest start in a directory, by rank; see `find_records`.

    Raises:
        DataError: no record there can be read.
    """
    return find_records(directory, operations=operations).records


def explanation(directory: Path | None) -> list[str]:
    """Return lines for the end of a job that hangs; none if no records are kept."""
    if directory is None:
        return []
    try:
        return [f"autopsy: {sentence}" for sentence in autopsy(records_in(directory)).sentences]
    except (DataError, OSError) as error:
        return [f"autopsy: {error}"]


def rank_table(records: Sequence[FlightRecord]) -> list[tuple[str, ...]]:
    """Return a table of the ranks, titles first: how each ended, its step, its phase and its wait with their seconds."""
    rows: list[tuple[str, ...]] = [("rank", "host", "end", "step", "phase", "for, s", "waits for", "for, s")]
    for record in records:
        waits = (record.wait, _seconds_text(record.last_ns - record.wait_since_ns)) if record.wait else ("", "")
        phase = record.phase or "start"
        since = _seconds_text(record.last_ns - (record.phase_since_ns or record.begun_ns))
        rows.append((str(record.rank), record.host, _ENDS[record.end], str(record.step or ""), phase, since, *waits))
    return rows


def autopsy_json(records: Sequence[FlightRecord], notes: Sequence[str] = ()) -> dict[str, object]:
    """Return the findings, and each rank's state with its unfinished operations.

    Args:
        notes: about files that were left out.
    """
    result = autopsy(records)
    return {
        "findings": list(result.sentences),
        "blamed": list(result.blamed),
        "notes": list(notes),
        "ranks": [_state(record) for record in records],
    }


def _state(record: FlightRecord) -> dict[str, object]:
    unfinished = [operation for operation in record.operations if not operation.done_ns]
    return {
        "rank": record.rank,
        "host": record.host,
        "process": record.process,
        "end": _ENDS[record.end],
        "sentence": record.sentence,
        "epoch": record.epoch,
        "step": record.step,
        "place": place(record),
        "seen": record.wall_seconds(record.seen_ns),
        "last": record.wall_seconds(record.last_ns),
        "waits_for": record.wait,
        "unfinished": [
            {
                "queue": operation.queue,
                "number": operation.sequence,
                "purpose": operation.purpose,
                "operation": operation.operation,
                "line": operation.line,
            }
            for operation in unfinished
        ],
    }


def _seconds_text(nanoseconds: int) -> str:
    return f"{max(0.0, nanoseconds * 1e-9):.1f}"
