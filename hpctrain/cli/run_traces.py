"""The traces of an attempt at a training in its output directory: checkpoints, and the flight records of its ranks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from hpctrain.cli.runs import directory_of
from hpctrain.core.errors import DataError
from hpctrain.flight.autopsy import autopsy, records_in
from hpctrain.flight.ring import FlightRecord
from hpctrain.launch.supervisor import AttemptOutcome
from hpctrain.runs.directory import RunDirectory, runs
from hpctrain.runs.owner import living_owner, owners

_CHECKPOINT = re.compile(r"checkpoint-(\d{8,})(\.h5|\.shards)?")
# An attempt has one run: its own, or the one that it resumed, which is seldom an old one.
_MOST_RUNS = 8


class RunTraces:
    """Reports checkpoints and flight records that are new since the last call. Reads file names and flight records only.

    Args:
        output, name: of the configuration. supervisor: mark of the process that starts the attempts.
    """

    def __init__(self, output: Path, name: str, supervisor: str = "") -> None:
        self._output, self._name, self._supervisor = output, name, supervisor
        self._seen = dict(self._checkpoints())
        self._jobs = {records[0].job for records in self._records()}

    def look(self) -> AttemptOutcome:
        """The traces of the latest attempt."""
        written = {path: version for path, version in self._checkpoints() if self._seen.get(path) != version}
        self._seen = dict(self._checkpoints())
        runs_of = list(dict.fromkeys(path.parent.parent for path in written))  # the newest run first
        newest = max(written, key=lambda path: (-runs_of.index(path.parent.parent), _step(path)), default=None)
        step = None if newest is None else _step(newest)
        run = None if newest is None else newest.parent.parent
        for records in self._records():
            if records[0].job not in self._jobs:
                self._jobs.add(records[0].job)
                found = autopsy(records)
                reached = max((record.step for record in records), default=0) or step
                return AttemptOutcome(run, newest, reached, found.sentences[0], _node(records, found.blamed))
        return AttemptOutcome(run, newest, step)

    def _checkpoints(self) -> Iterator[tuple[Path, tuple[int, ...]]]:
        """Yield (path, file version) of all checkpoints of the runs with this name, newest run first."""
        for run in self._own_runs():
            for path in run.checkpoints.glob("checkpoint-*"):
                if _CHECKPOINT.fullmatch(path.name):
                    with contextlib.suppress(OSError):  # deleted meanwhile, or a broken link
                        status = path.stat()
                        yield path, (status.st_ino, status.st_size, status.st_mtime_ns)

    def _own_runs(self) -> Iterator[RunDirectory]:
        """Yield the runs with this name, newest first, except those that another job has written to last."""
        for run in runs(self._output, self._name):
            last = next(reversed(owners(run.path)), None)
            if last is None or last.supervisor == self._supervisor or (not last.supervisor and not living_owner(run.path)):
                yield run

    def _records(self) -> Iterator[tuple[FlightRecord, ...]]:
        """The records of the latest start of each run, the newest run first; runs without any are left out."""
        for run, _ in zip(self._own_runs(), range(_MOST_RUNS), strict=False):
            try:
                yield records_in(directory_of(run.path))
            except (DataError, OSError):
                continue


def _step(path: Path) -> int:
    match = _CHECKPOINT.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _node(records: tuple[FlightRecord, ...], blamed: tuple[int, ...]) -> str:
    """The node of the blamed ranks, by Slurm's name for it; "" where they are on several, or there is no other one."""
    hosts = {record.host.partition(".")[0] for record in records if record.rank in blamed}
    others = {record.host.partition(".")[0] for record in records} - hosts
    return hosts.pop() if len(hosts) == 1 and others else ""
