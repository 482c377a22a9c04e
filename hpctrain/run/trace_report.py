"""The end of a traced run: all ranks' events on one clock in one file, and the table of where the time went."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.comm.base import Communicator
from hpctrain.comm.clock import ClockMap, Offset, measure_offset
from hpctrain.comm.progress import ProgressEngine
from hpctrain.storage.atomic_write import write_json
from hpctrain.storage.bookkeeping import reason
from hpctrain.trace import time_table
from hpctrain.trace.chrome import ChromeTrace
from hpctrain.trace.time_table import Postings, RowNames, TimeTable
from hpctrain.trace.time_table_text import COLUMNS, is_sum, lines
from hpctrain.trace.tracer import Category, Events, Tracer, cost_per_event_seconds
from hpctrain.train.progress_text import folded

TRACE_FILE = "trace.json"
TABLE_FILE = "time_table.json"
_TAG = 7302


@dataclass(frozen=True)
class RankTrace:
    """The data that one rank hands to rank 0. Times of `events` are by rank 0's clock. groups: as in `Postings`."""

    rank: int
    events: Events
    error_ns: int
    groups: Mapping[str, int]
    table: TimeTable | None


class TraceReport:
    """Made at a run's start and finished at its end, on every rank. Both are collective over `world`.

    Args:
        progress: the process's engine; its queues are idle at both times. trace: what it records into.
    """

    def __init__(self, world: Communicator, progress: ProgressEngine, trace: Tracer) -> None:
        self._world, self._progress, self._trace = world, progress, trace
        self.table: TimeTable | None = None  # this rank's, once finished
        self._begin = self._offset()
        trace.clear()  # start-up is not part of any step

    def finish(self, directory: Path, about: Mapping[str, Any], width: int | None = None) -> list[str]:
        """Rank 0 writes `trace.json` and `time_table.json`, and gets the lines to print; the others get none.

        A disk that refuses them is among the lines.

        Args:
            about: versions, machine, configuration: goes into both files. width: of the terminal; None where there is none.
        """
        events = self._trace.events()
        groups = self._groups()
        clock = ClockMap(self._begin, self._offset())
        events = replace(events, start_ns=clock.to_root(events.start_ns), stop_ns=clock.to_root(events.stop_ns))
        mine = RankTrace(self._world.rank, events, clock.error_ns, groups, _table(events))
        self.table = mine.table
        if self._world.rank != 0:
            self._send(mine)
            return []
        return self._write(directory, about, mine, width)

    def _offset(self) -> Offset:
        return measure_offset(self._world, self._progress.wait_handle, clock_ns=self._trace.clock_ns)

    def _groups(self) -> dict[str, int]:
        """For each queue, the world rank of its group's first member: queues of one name in different groups are different."""
        return {name: int(comm.broadcast_object(self._world.rank)) for name, comm in self._progress.communicators().items()}

    def _send(self, mine: RankTrace) -> None:
        payload = np.frombuffer(pickle.dumps(mine), np.uint8)
        self._progress.wait_handle(self._world.isend(np.array([payload.size], np.int64), 0, _TAG), "size of a trace")
        self._progress.wait_handle(self._world.isend(payload, 0, _TAG), "a trace")

    def _received(self) -> Iterator[RankTrace]:
        """The other ranks' traces, one at a time, so that rank 0 never holds all of them."""
        for rank in range(1, self._world.size):
            size = np.zeros(1, np.int64)
            self._progress.wait_handle(self._world.irecv(size, rank, _TAG), f"size of the trace of rank {rank}")
            payload = np.empty(int(size[0]), np.uint8)
            self._progress.wait_handle(self._world.irecv(payload, rank, _TAG), f"trace of rank {rank}")
            yield pickle.loads(payload.tobytes())

    def _write(self, directory: Path, about: Mapping[str, Any], mine: RankTrace, width: int | None) -> list[str]:
        tables: list[TimeTable | None] = []
        postings: list[Postings] = []
        error_ns = dropped = 0
        with ChromeTrace(directory / TRACE_FILE, self._begin.at_ns) as file:
            for trace in (mine, *self._received()):
                file.add_rank(trace.rank, trace.events)
                tables.append(trace.table)
                postings.append(Postings(trace.rank, trace.events.of(Category.COMMUNICATION), trace.groups))
                error_ns, dropped = max(error_ns, trace.error_ns), dropped + trace.events.dropped
            facts = {"ranks": self._world.size, "clock_error_seconds": error_ns * 1e-9, "dropped_events": dropped, **about}
            file.describe(facts)
        whole = [table for table in tables if table is not None]
        place = f"in {directory / TRACE_FILE}" if file.error is None else f"was not kept ({reason(file.error)})"
        summary = folded(
            [
                f"trace of {self._world.size} {'rank' if self._world.size == 1 else 'ranks'} {place}",
                f"their clocks agree to within {error_ns * 1e-3:.1f} us",
                *([f"{dropped} events found no room"] if dropped else []),
            ]
        )
        if len(whole) < len(tables):
            return [*summary, "no whole step was recorded, so there is no time table"]
        names = RowNames(time_table.layer_names(mine.events))
        late = time_table.latest(postings, names, time_table.counted_steps(mine.events))
        table = time_table.merge(whole, late)
        content = {**facts, "table": asdict(table), "per_rank": [asdict(rank_table) for rank_table in whole]}
        try:
            write_json(directory / TABLE_FILE, content)
        except OSError as error:
            summary.append(f"{directory / TABLE_FILE} was not written ({reason(error)})")
        shown = lines(table, error_ns * 1e-9, self._world.size, width or COLUMNS)
        if any(is_sum(line) for line in shown):
            summary.append(f"all rows: hpctrain trace {directory} --all")
        return [*shown, *summary]


def _table(events: Events) -> TimeTable | None:
    """This rank's rows, with what tracing itself costs: the events of a step times what one costs here."""
    table = time_table.tabulate(events)
    return None if table is None else replace(table, tracing_seconds=table.events * cost_per_event_seconds())
