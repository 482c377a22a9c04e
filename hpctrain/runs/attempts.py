"""Traces that an attempt at a training leaves in its output directory: checkpoints, and the flight records of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpctrain.core.errors import CheckpointError, DataError, RunOwnedError
from hpctrain.flight.autopsy import autopsy, records_in
from hpctrain.flight.ring import FlightRecord
from hpctrain.launch.supervisor import AttemptOutcome
from hpctrain.runs.directory import RunDirectory, StoredCheckpoint, flight_directory, listed_runs, stored_checkpoints
from hpctrain.runs.owner import living_owner, owners

# Maximum number of runs read per attempt, newest first. An attempt has one run, new or resumed, which is rarely an old one.
_MOST_RUNS = 8


class RunTraces:
    """Finder of checkpoints and flight records written since the previous call of `look`.

    Only file names and flight records are read.

    Args:
        supervisor: identifier of the `hpctrain run` process that starts the attempts.
    """

    def __init__(self, output: Path, name: str, supervisor: str = "") -> None:
        self._output, self._name, self._supervisor = output, name, supervisor
        self._seen = {stored.path: stored.version for stored in self._checkpoints()}
        self._jobs = {records[0].job for records in self._records()}

    def look(self) -> AttemptOutcome:
        """Return the newest checkpoint, the last step and the first finding of the attempt since the previous call."""
        stored = list(self._checkpoints())
        written = [one for one in stored if self._seen.get(one.path) != one.version]
        self._seen = {one.path: one.version for one in stored}
        runs_of = list(dict.fromkeys(one.path.parent.parent for one in written))  # the newest run first
        newest = max(written, key=lambda one: (-runs_of.index(one.path.parent.parent), one.step), default=None)
        run, path, step = (None, None, None) if newest is None else (runs_of[0], newest.path, newest.step)
        for records in self._records():
            if records[0].job not in self._jobs:
                self._jobs.add(records[0].job)
                found = autopsy(records)
                reached = max((record.step for record in records), default=0) or step
                return AttemptOutcome(run, path, reached, found.sentences[0], _node(records, found.blamed))
        return AttemptOutcome(run, path, step)

    def _checkpoints(self) -> Iterator[StoredCheckpoint]:
        """Yield all checkpoints of the runs with this name, newest run first."""
        for run in self._own_runs():
            yield from stored_checkpoints(run.checkpoints)

    def _own_runs(self) -> Iterator[RunDirectory]:
        """Yield the runs with this name, newest first.

        A run is omitted if it cannot be read, if another supervisor started its last owner, or if its last owner has no
        supervisor and may be alive.
        """
        for run in listed_runs(self._output, self._name):
            with suppress(CheckpointError, RunOwnedError, OSError):
                last = next(reversed(owners(run.path)), None)
                if last is None or last.supervisor == self._supervisor or (not last.supervisor and not living_owner(run.path)):
                    yield run.open()

    def _records(self) -> Iterator[tuple[FlightRecord, ...]]:
        """Yield the records of the latest start of each run, newest run first. Runs without records are omitted."""
        for run, _ in zip(self._own_runs(), range(_MOST_RUNS), strict=False):
            try:
                yield records_in(flight_directory(run.path))
            except (DataError, OSError):
                continue


def _node(records: tuple[FlightRecord, ...], blamed: tuple[int, ...]) -> str:
    """Return the Slurm name of the node of the blamed ranks; "" if they are on several nodes, or if there is only one node."""
    hosts = {record.host.partition(".")[0] for record in records if record.rank in blamed}
    others = {record.host.partition(".")[0] for record in records} - hosts
    return hosts.pop() if len(hosts) == 1 and others else ""
