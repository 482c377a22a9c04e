"""Findings from the flight records of all ranks: the first rank that failed or hung, and its place in the program.

A waiting rank points to the ranks that have not posted the operation that it waits for. Following these pointers ends at a rank
that does not wait and that delayed all others, or returns to a rank already visited, which is a cycle. If all ranks have posted,
a rank that no longer makes progress is blamed, because a message also needs processor time on the ranks that posted it.

The rules are pure functions of records. `find_records` reads the records of a directory; `rank_table` and `autopsy_json` format
them.
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

# A process that is silent for this long after the last sign of life of any process counts as dead or stopped. Its heartbeat ticks
# once a second, and twenty times within a short deadline.
_SILENT_SECONDS = 3.0
_SILENT_SHARE = 0.5


@dataclass(frozen=True)
class Autopsy:
    """Findings, the most important first, and the ranks that they blame."""

    sentences: tuple[str, ...]
    blamed: tuple[int, ...] = ()


def place(record: FlightRecord) -> str:
    """Return the phase and the step of a rank, in words."""
    phase = record.phase or "its start"
    return f"{phase}, step {record.step}" if record.step else phase


def named(ranks: Sequence[int]) -> str:
    """Return ranks in words: 'rank 3', or 'ranks 0-2, 5'."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}"


def posted_at(operation: RecordedOperation) -> str:
    """Return the source line that posted an operation, in parentheses; empty if unknown."""
    return f" ({operation.line})" if operation.line else ""


def latest_seconds(records: Sequence[FlightRecord]) -> float:
    """Return the latest time, in seconds of the wall clock, at which any of the processes is known to have been alive."""
    return max(record.wall_seconds(record.last_ns) for record in records)


def silent_seconds(record: FlightRecord, latest: float) -> float:
    """Return the seconds between a process's last sign of life and `latest`; 0 if they are too few to indicate a failure."""
    silent = latest - record.wall_seconds(record.last_ns)
    least = min(_SILENT_SECONDS, _SILENT_SHARE * record.deadline_ns * 1e-9) if record.deadline_ns else _SILENT_SECONDS
    return silent if silent > least else 0.0


def silence(record: FlightRecord, seconds: float) -> str:
    """Return a sentence about a silent process: duration of the silence, and its last phase and step."""
    silent = f"Rank {record.rank} wrote nothing for the last {seconds:.0f} s, after {place(record)}"
    return f"{silent}: it ended, was stopped, or its node failed."


_OF_RANKS = re.compile(r" of ranks ([0-9, -]+)\)$")
# A heartbeat checks for progress every second or twentieth of a deadline, and other nodes see its record late.
_STILL_SHARE = 0.75


def waited_for(records: Sequence[FlightRecord]) -> Autopsy | None:
    """Return the finding for the end of a chain of waits (see the module); None if no rank waits."""
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
    """Reason of a wait.

    Attributes:
        operation: operation that blocks the waiting rank; None if it is not in a queue.
        ranks: ranks that have not posted it.
    """

    operation: RecordedOperation | None
    ranks: tuple[int, ...]


def _absence(record: FlightRecord, by_rank: Mapping[int, FlightRecord]) -> _Absence:
    """Return the operation that blocks a waiting rank and the ranks that have not posted it.

    Ranks without a record count as absent.

    An operation that is queued but not posted waits for the operations in flight on this rank; the first of these that other
    ranks have not posted is returned. If all ranks have posted them, the first one is returned without ranks: the transport has
    not completed it.
    """
    queued = record.operations if record.wait else ()
    awaited = next((recorded for recorded in queued if recorded.number == record.wait_number), None)
    if awaited is None:  # outside the queues: ranks that do not wait for the same purpose are absent
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


def _ranks(text: str, record: FlightRecord, by_rank: Mapping[int, FlightRecord]) -> tuple[int, ...]:
    """Return the ranks named in a text, or all ranks of the job if the text names none or is damaged."""
    try:
        ranks = ranks_of(text, record.ranks)
    except ValueError:
        ranks = ()
    return ranks or tuple(sorted({*range(record.ranks), *by_rank}))


def _has_started(record: FlightRecord, operation: RecordedOperation) -> bool:
    """Return whether a rank has posted its part of an operation, judged by the operations still in its ring."""
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
        if other.seen_ns == other.begun_ns:  # the heartbeat has not begun, so silence proves nothing
            since = other.wall_seconds(other.phase_since_ns or other.begun_ns)
            sentences.append(f"Rank {rank} was in {place(other)} for {max(0.0, latest - since):.0f} s.")
            continue
        gone = f", and wrote nothing for the last {silent:.0f} s: it ended, was stopped, or its node failed" if silent else ""
        sentences.append(f"{_whereabouts(other)}{gone}.")
    return Autopsy(tuple(sentences), tuple(absent))


def _text(absence: _Absence, record: FlightRecord) -> str:
    """Return the operation that blocks a rank in words, with its number in the queue and its source line."""
    operation = absence.operation
    if operation is None:
        return record.wait
    what = f"the {operation.operation} for {operation.purpose}" if operation.operation else operation.purpose
    return f'{what}, operation {operation.sequence} of the queue "{operation.queue}"{posted_at(operation)}'


def _cycle(path: Sequence[int], edges: Mapping[int, _Absence], by_rank: Mapping[int, FlightRecord]) -> Autopsy:
    """Return the finding for a cycle of ranks that each wait for the next one. `path` ends with its first rank."""
    texts = {rank: _text(edges[rank], by_rank[rank]) for rank in path}
    blamed = tuple(sorted(texts))
    if len(blamed) == 1:
        return Autopsy((f"Rank {blamed[0]} waits for an operation that it has not posted: {texts[blamed[0]]}.",), blamed)
    steps = [f"rank {rank} waits for {texts[rank]}, which rank {other} has not posted" for rank, other in pairwise(path)]
    return Autopsy((f"{named(blamed).capitalize()} wait for each other: {'; '.join(steps)}.",), blamed)


def _all_posted(rank: int, absence: _Absence, by_rank: Mapping[int, FlightRecord]) -> Autopsy:
    """Return the finding if all ranks posted the awaited operation: a rank stopped making progress, or the transport failed."""
    record = by_rank[rank]
    waited = f"rank {rank} waited {_seconds(record, record.wait_since_ns)} for ({place(record)})"
    posted = f"All ranks posted the operation that {waited}, {_text(absence, record)}"
    still = [other for other in by_rank.values() if _is_still(other, record)]
    if not still:
        return Autopsy((f"{posted}: the transport did not complete it; a link may be broken.",))
    ranks, latest = tuple(other.rank for other in still), latest_seconds([*by_rank.values()])
    sentences = [f"{posted}; {named(ranks)} stopped making progress."]
    for other in still:
        silent = silent_seconds(other, latest)
        sentences.append(silence(other, silent) if silent else f"{_whereabouts(other)}.")
    return Autopsy(tuple(sentences), ranks)


def _is_still(record: FlightRecord, waiting: FlightRecord) -> bool:
    """Return whether a rank made no progress for most of the time that `waiting` waited: it computes, reads, or is stopped."""
    watched = record.alive_ns > record.begun_ns  # otherwise no heartbeat has recorded progress, and waits count as progress
    if record.wait and not watched:
        return False
    at = waiting.wall_seconds(waiting.last_ns)
    waited = at - waiting.wall_seconds(waiting.wait_since_ns)
    return at - record.wall_seconds(record.moved_ns) > _STILL_SHARE * waited


def _whereabouts(record: FlightRecord) -> str:
    return f"Rank {record.rank} was in {place(record)} for {_seconds(record, record.phase_since_ns)}"


def _seconds(record: FlightRecord, since_ns: int) -> str:
    return f"{max(0.0, (record.last_ns - since_ns) * 1e-9):.0f} s"


# Collectives with equal sizes on all ranks.
_SAME_SIZES = re.compile(r"(allreduce|reduce-scatter|allgather|broadcast from \d+) of \d+ \w+ elements|barrier")


def newest(records: Sequence[FlightRecord]) -> tuple[FlightRecord, ...]:
    """Return the records of the latest start, and of ranks that ended before they joined it, ordered by rank."""
    latest = max((record.job for record in records), default=0)
    jobs = (latest, 0)  # 0: a rank that ended before it joined the job
    return tuple(sorted((record for record in records if record.job in jobs), key=lambda record: record.rank))


def autopsy(records: Sequence[FlightRecord]) -> Autopsy:
    """Return the findings from the records of one start."""
    if not records:
        return Autopsy(("No rank has left a record.",))
    ranks = [record.ranks for record in records]
    missing = sorted(set(range(max(ranks, key=ranks.count))) - {record.rank for record in records})
    # These come first: an MPI library may end a rank because of them, hang, or continue with wrong data.
    difference = _different_phase(records) or _different_operation(records)
    if difference is None and not missing and all(record.end is End.FINISHED for record in records):
        return Autopsy((f"The job finished: {named(range(len(records)))} ended normally.",))
    findings = difference or _failed(records)
    ahead: tuple[str, ...] = ()
    if findings is None:
        findings = _gone(records)
    if findings is None:
        findings, ahead = waited_for(records) or _silent(records) or _stuck(records), _ahead(records)
    sentences = [*findings.sentences, *ahead]
    if missing:
        sentences.append(
            f"{named(missing).capitalize()} left no record here: they never started, or their nodes keep their own records."
        )
    return Autopsy(tuple(sentences), findings.blamed)


def _failed(records: Sequence[FlightRecord]) -> Autopsy | None:
    """Return the finding for the ranks that failed first, with their error; None if none failed or the first met its deadline."""
    ended = [record for record in records if record.end not in (End.RUNNING, End.FINISHED)]
    first = min(ended, key=lambda record: record.wall_seconds(record.seen_ns), default=None)
    if first is None or first.end is End.DEADLINE:  # the other ranks of a job that ends at a deadline are killed
        return None
    failed, how = [first.rank], f"was ended by {Signals(first.signal).name}" if first.end is End.SIGNAL else "failed"
    if first.end is End.EXITED:
        how = f"exited with code {first.signal} before the run was over"
    if first.end is End.CLOSED:
        how = "closed the descriptors of other parts of the program, as by os.closerange"
    if first.end is End.LAUNCHER:  # all ranks of a node lose the launcher at the same time
        failed = [record.rank for record in ended if (record.end, record.host) == (first.end, first.host)]
        did = "was stopped" if first.signal else "had ended"
        how = f"{'was' if len(failed) == 1 else 'were'} ended as the launcher's process on {first.host} {did}"
    if first.end is End.FAILED:  # all ranks report an error that concerns all of them
        failed = [record.rank for record in ended if record.sentence == first.sentence and record.end is End.FAILED]
        cause = f", because of {named(first.blamed)}" if first.blamed and first.blamed != tuple(sorted(failed)) else ""
        how = f"failed first{cause}: {first.sentence.rstrip('.')}"
    return Autopsy((f"{named(failed).capitalize()} {how} ({place(first)}).",), first.blamed or tuple(failed))


def _gone(records: Sequence[FlightRecord]) -> Autopsy | None:
    """Return the finding if all unfinished ranks ended at the same time without a record of their end; None otherwise.

    The result is also None if a rank had waited for seconds, because its wait shows the cause.
    """
    gone = [record for record in records if record.end is not End.FINISHED]
    latest = latest_seconds(records)
    waited = [(record.last_ns - record.wait_since_ns) * 1e-9 for record in gone if record.wait]
    together = bool(gone) and all(record.gone and not silent_seconds(record, latest) for record in gone)
    if not together or max(waited, default=0) > _SILENT_SECONDS:
        return None
    ranks = tuple(record.rank for record in gone)
    sentence = (
        f"{named(ranks).capitalize()} ended without a record of {'its' if len(ranks) == 1 else 'their'} end, probably killed by "
        f"SIGKILL, as by the kernel if memory runs out ({place(gone[0])})."
    )
    return Autopsy((sentence,), ranks if len(ranks) < len(records) else ())


def _different_phase(records: Sequence[FlightRecord]) -> Autopsy | None:
    """Return the finding for the first collective phase in which the records differ; None if all phases in the records agree."""
    of_ranks = {record.rank: dict(record.phases) for record in records}
    for number in sorted(set().union(*of_ranks.values())):
        sentence, others = different_phases({rank: phases[number] for rank, phases in of_ranks.items() if number in phases})
        if others:
            return Autopsy((sentence,), others)
    return None


def _ahead(records: Sequence[FlightRecord]) -> tuple[str, ...]:
    """Return a sentence about the latest phase if only some ranks entered it.

    Ranks that are one phase apart are not in error: the ranks ahead may be waiting for the others.
    """
    latest = {record.rank: record.phases[-1] for record in records if record.phases}
    number, phase = max(latest.values(), default=(0, ""))
    entered = [rank for rank, (of_rank, _) in latest.items() if of_rank == number]
    others = [record for record in records if record.rank in latest and record.rank not in entered]
    if not others:
        return ()
    places = ", ".join(dict.fromkeys(f"in {place(record)}" for record in others))
    rest = f"{named([record.rank for record in others])} {'was' if len(others) == 1 else 'were'} {places}"
    return (f"Only {named(entered)} entered {phase}; {rest}.",)


def different_phases(phases: Mapping[int, str]) -> tuple[str, tuple[int, ...]]:
    """Return a sentence about ranks that entered different phases of a run, and the ranks to blame: the smaller groups.

    Args:
        phases: name of the phase, by rank. If all are equal, no ranks are returned.
    """
    largest, *smaller = _by_size(phases)
    entered = "; ".join(f"{named(ranks)} {phases[ranks[0]]}" for ranks in (largest, *smaller))
    return f"Ranks entered different phases of the run: {entered}.", tuple(rank for ranks in smaller for rank in ranks)


def _different_operation(records: Sequence[FlightRecord]) -> Autopsy | None:
    """Return the finding for the first operation of a queue that ranks posted differently; None if there is none."""
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
    """Return the purpose of an operation, and its text if both must be equal on all ranks, otherwise ""."""
    match = _SAME_SIZES.match(operation.operation)
    return operation.purpose, match[0] if match else ""


def _operations_sentence(
    queue: str, sequence: int, posted: Mapping[int, RecordedOperation], texts: Mapping[int, tuple[str, str]]
) -> Autopsy:
    """Return the finding for ranks that posted different operations. The smaller groups are blamed."""
    ordered = _by_size(texts)
    groups = "; ".join(
        f"{named(ranks)} the {posted[ranks[0]].operation} for {posted[ranks[0]].purpose}{posted_at(posted[ranks[0]])}"
        for ranks in ordered
    )
    others = [rank for ranks in ordered[1:] for rank in ranks]
    sentence = f'Ranks posted different operations as operation {sequence} of the queue "{queue}": {groups}.'
    return Autopsy((sentence,), tuple(others))


def _by_size(words: Mapping[int, Hashable]) -> list[list[int]]:
    """Return groups of ranks with equal values, the largest group first. Groups of one size are ordered by the lowest rank."""
    groups: dict[Hashable, list[int]] = {}
    for rank, text in words.items():
        groups.setdefault(text, []).append(rank)
    return sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))


def _silent(records: Sequence[FlightRecord]) -> Autopsy | None:
    """Return the finding for unfinished ranks whose records end seconds before the latest record; None if there are none."""
    latest = latest_seconds(records)
    silent = {record: silent_seconds(record, latest) for record in records if record.end is End.RUNNING}
    silent = {record: seconds for record, seconds in silent.items() if seconds}
    if not silent:
        return None
    sentences = tuple(silence(record, seconds) for record, seconds in silent.items())
    return Autopsy(sentences, tuple(record.rank for record in silent))


def _stuck(records: Sequence[FlightRecord]) -> Autopsy:
    """Return the finding if no rank waits: the ranks in each phase, and the longest time that one of them spent in it."""
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
    End.LAUNCHER: "launcher",
    End.CLOSED: "closed",
}
_NAME = re.compile(re.escape(file_name(0)).replace("00000", r"(\d{5,7})"))
# Largest number of damaged records that are reported one by one; the others are counted.
_MOST_NOTES = 8


@dataclass(frozen=True)
class FoundRecords:
    """Contents of a directory of records.

    Attributes:
        records: records of the latest start, by rank.
        damaged: a sentence for each unreadable record.
        others: number of entries that are not records.
    """

    records: tuple[FlightRecord, ...]
    damaged: tuple[str, ...] = ()
    others: int = 0

    def notes(self) -> list[str]:
        """Return a sentence for each of the first damaged records, then the numbers of the other ones and of other entries."""
        lines = list(self.damaged[:_MOST_NOTES])
        if len(self.damaged) > _MOST_NOTES:
            lines.append(f"{len(self.damaged) - _MOST_NOTES} more records cannot be read.")
        if self.others:
            are = "entry is not a flight record and was" if self.others == 1 else "entries are not flight records and were"
            lines.append(f"{self.others} {are} left out.")
        return lines


def find_records(directory: Path, *, operations: bool = True) -> FoundRecords:
    """Return the records of the latest start in a directory, with its damaged records and the number of other entries.

    Args:
        operations: whether to read operations; see `read`.

    Raises:
        DataError: the directory is unreadable, or has no readable record.
    """
    try:
        names = sorted(os.listdir(directory))
    except NotADirectoryError as error:
        raise DataError(f"{directory.absolute()} is not a directory; give the directory of a run.") from error
    except FileNotFoundError as error:
        raise DataError(f"There is no directory {directory.absolute()}; give the directory of a run.") from error
    except (OSError, ValueError) as error:  # ValueError: the path has a null byte
        advice = "grant read permission" if isinstance(error, PermissionError) else "give the directory of a run"
        raise DataError(f"{str(directory)!r} cannot be read ({getattr(error, 'strerror', None) or error}); {advice}.") from error
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
                damaged.append(f"{path} contains the record of rank {record.rank}; delete it.")
    if not records:
        if damaged:
            raise DataError(f"No flight record in {directory} can be read. {damaged[0]}")
        raise DataError(f"{directory.absolute()} contains no flight records (rank-*.flight); give the directory of a run.")
    return FoundRecords(newest(records), tuple(damaged), len(names) - len(ours))


def records_in(directory: Path, *, operations: bool = True) -> tuple[FlightRecord, ...]:
    """Return the records of the latest start in a directory, by rank; see `find_records`.

    Raises:
        DataError: no record in the directory is readable.
    """
    return find_records(directory, operations=operations).records


def explanation(directory: Path | None) -> list[str]:
    """Return the findings as lines for the output of a job that hangs; empty without a directory of records."""
    if directory is None:
        return []
    try:
        return [f"autopsy: {sentence}" for sentence in autopsy(records_in(directory)).sentences]
    except (DataError, OSError) as error:
        return [f"autopsy: {error}"]


def rank_table(records: Sequence[FlightRecord]) -> list[tuple[str, ...]]:
    """Return a table of the ranks, titles first: end, step, phase and wait of each rank, with the durations of the last two."""
    rows: list[tuple[str, ...]] = [("rank", "host", "end", "step", "phase", "for, s", "waits for", "for, s")]
    for record in records:
        waits = (record.wait, _seconds_text(record.last_ns - record.wait_since_ns)) if record.wait else ("", "")
        phase = record.phase or "start"
        since = _seconds_text(record.last_ns - (record.phase_since_ns or record.begun_ns))
        rows.append((str(record.rank), record.host, _end(record), str(record.step or ""), phase, since, *waits))
    return rows


def autopsy_json(records: Sequence[FlightRecord], notes: Sequence[str] = ()) -> dict[str, object]:
    """Return the findings, and each rank's state with its unfinished operations, as JSON-compatible values.

    Args:
        notes: sentences about files that were left out.
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
        "end": _end(record),
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


def _end(record: FlightRecord) -> str:
    return "unrecorded" if record.gone else _ENDS[record.end]


def _seconds_text(nanoseconds: int) -> str:
    return f"{max(0.0, nanoseconds * 1e-9):.1f}"
