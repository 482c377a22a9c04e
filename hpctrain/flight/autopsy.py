"""Findings from the flight records of all ranks: the first that went wrong, and where. Pure; one sentence each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from signal import Signals

from hpctrain.flight.findings import Autopsy, latest_seconds, named, place, posted_at, silence, silent_seconds
from hpctrain.launch.exit_codes import End
from hpctrain.flight.ring import FlightRecord, RecordedOperation
from hpctrain.flight.waits import held_up

# Collectives whose sizes are the same on all ranks.
_ALIKE = re.compile(r"(allreduce|reduce-scatter|allgather|broadcast from \d+) of \d+ \w+ elements|barrier")


def newest(records: Sequence[FlightRecord]) -> tuple[FlightRecord, ...]:
    """The records of the latest start among them, by rank."""
    latest = max((record.job for record in records), default=0)
    jobs = (latest, 0)  # 0: a rank that ended before it had joined the others
    return tuple(sorted((record for record in records if record.job in jobs), key=lambda record: record.rank))


def autopsy(records: Sequence[FlightRecord]) -> Autopsy:
    """The findings from the records of one start."""
    if not records:
        return Autopsy(("No rank has left a record.",))
    ranks = [record.ranks for record in records]
    missing = sorted(set(range(max(ranks, key=ranks.count))) - {record.rank for record in records})
    unlike = _mismatch(records)  # first: an MPI may end a rank for it, hang, or go on with other numbers
    if unlike is None and not missing and all(record.end is End.FINISHED for record in records):
        return Autopsy((f"The job finished: {named(range(len(records)))} ended in good order.",))
    findings = unlike or _failed(records) or held_up(records) or _silent(records) or _stuck(records)
    sentences = list(findings.sentences)
    if missing:
        sentences.append(f"{named(missing).capitalize()} left no record here: never started, or on nodes that keep their own.")
    return Autopsy(tuple(sentences), findings.blamed)


def _failed(records: Sequence[FlightRecord]) -> Autopsy | None:
    """The ranks that failed first, with the sentence that they failed with."""
    ended = [record for record in records if record.end not in (End.RUNNING, End.FINISHED)]
    first = min(ended, key=lambda record: record.wall_seconds(record.seen_ns), default=None)
    if first is None or first.end is End.DEADLINE:  # a job that ends at a deadline has its ranks killed
        return None
    alike, how = [first.rank], f"was ended by {Signals(first.signal).name}" if first.end is End.SIGNAL else "failed"
    if first.end is End.LEFT:
        how = f"left with exit code {first.signal} before the run was over"
    if first.end is End.CLOSED:
        how = "closed the descriptors of other parts of the program, as by os.closerange"
    if first.end is End.LAUNCHER:  # all ranks of a node lose the launcher together
        alike = [record.rank for record in ended if (record.end, record.host) == (first.end, first.host)]
        did = "was stopped" if first.signal else "had ended"
        how = f"{'was' if len(alike) == 1 else 'were'} ended as the launcher's process on {first.host} {did}"
    if first.end is End.FAILED:  # all ranks say what concerns all of them
        alike = [record.rank for record in ended if record.sentence == first.sentence and record.end is End.FAILED]
        cause = f", because of {named(first.blamed)}" if first.blamed and first.blamed != tuple(sorted(alike)) else ""
        how = f"failed first{cause}: {first.sentence.rstrip('.')}"
    return Autopsy((f"{named(alike).capitalize()} {how} ({place(first)}).",), first.blamed or tuple(alike))


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
    said = "; ".join(f"{named(ranks)} {_posted(posted[ranks[0]])}" for ranks in ordered)
    others = [rank for ranks in ordered[1:] for rank in ranks]
    return Autopsy((f"Ranks posted different operations as number {sequence} of {queue}: {said}.",), tuple(others))


def _posted(operation: RecordedOperation) -> str:
    return f"the {operation.operation} for {operation.purpose}{posted_at(operation)}"


def _silent(records: Sequence[FlightRecord]) -> Autopsy | None:
    """Ranks whose records end before those of the others."""
    latest = latest_seconds(records)
    silent = {record: silent_seconds(record, latest) for record in records if record.end is End.RUNNING}
    silent = {record: seconds for record, seconds in silent.items() if seconds}
    if not silent:
        return None
    sentences = tuple(silence(record, seconds) for record, seconds in silent.items())
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
        which = named([record.rank for record in of_phase])
        sentences.append(f"{which.capitalize()} {_were(of_phase)} in {place(of_phase[0])} for {longest:.0f} s.")
    return Autopsy(tuple(sentences), tuple(record.rank for record in gave_up))


def _were(records: Sequence[FlightRecord]) -> str:
    return "was" if len(records) == 1 else "were"
