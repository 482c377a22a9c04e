"""Report at the end of a traced run: a file with the events of all ranks on one clock, and a table of the time of a step.

For comparison, `run_compute_only` times steps without communication, and communication alone. In steps without communication,
every rank trains on its own share with its own gradients, at the same time as all others, since they share memory and power.
Ranks that split layers still exchange activations. The resulting parameters are discarded.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.assembly.recipe import Recipe
from hpctrain.comm.base import Communicator
from hpctrain.comm.groups import in_levels, levels
from hpctrain.comm.link import ClockMap, Offset, measure_offset
from hpctrain.comm.progress import ProgressEngine
from hpctrain.config.schema import AveragerConfig, CheckpointConfig, ChecksConfig, EvaluateConfig, HashesConfig
from hpctrain.core.intervals import even, even_interval
from hpctrain.core.text import counted, size_text
from hpctrain.job.session import Session
from hpctrain.nn.network import Network
from hpctrain.parallel.groups import GridGroups
from hpctrain.runs.directory import TABLE_FILE, TRACE_FILE
from hpctrain.runs.records import reason
from hpctrain.storage.atomic_write import write_json
from hpctrain.trace import time_table
from hpctrain.trace.chrome import ChromeTrace
from hpctrain.trace.time_table import Postings, RowNames, TimeTable
from hpctrain.trace.time_table_text import is_sum, lines
from hpctrain.trace.tracer import Category, Events, Tracer, cost_per_event_seconds

COMPUTE_ONLY_FILE = "compute_only.json"
_REPEATS = 5


def without_communication(session: Session) -> Session:
    """Return the session with gradients, batch statistics and messages restricted to this rank's split group. Collective.

    The ranks of a split group still exchange activations, since without these there would be nothing to compute.
    """
    config = session.config.model_copy(
        update={
            "averager": AveragerConfig(name="blocking"),
            "evaluate": EvaluateConfig(every_epochs=0),
            "checkpoint": CheckpointConfig(every_epochs=0),
            "checks": ChecksConfig(every_steps=0),  # each rank trains different parameters
            "hashes": HashesConfig(every_steps=0),
        }
    )
    return replace(session, resolved=replace(session.resolved, recipe=Recipe.of(config)), groups=session.groups.alone())


@dataclass(frozen=True)
class GradientExchange:
    """Median times of a reduce-scatter and an allgather of all gradients with nothing else running, on the slowest rank.

    Like the exchange of averagers, it is hierarchical if nodes have several ranks.

    Attributes:
        payload_bytes: bytes of the gradients.
    """

    payload_bytes: int
    seconds: float
    cpu_seconds: float


def measure_exchange(groups: GridGroups, progress: ProgressEngine, network: Network) -> GradientExchange:
    """Time the exchange of the gradients between the ranks that average them. Collective over `groups.all_ranks`."""
    buffers = [
        (in_levels(groups.gradients[name], levels(groups.nodes[name]), "exchange alone"), np.zeros(group.size, group.dtype))
        for name, group in network.groups.items()
    ]
    seconds = np.array([_exchange(groups.all_ranks, progress, buffers) for _ in range(_REPEATS + 1)][1:])
    slowest = np.max(groups.all_ranks.allgather_object(np.median(seconds, axis=0)), axis=0)
    return GradientExchange(sum(buffer.nbytes for _, buffer in buffers), float(slowest[0]), float(slowest[1]))


def _exchange(
    all_ranks: Communicator, progress: ProgressEngine, buffers: list[tuple[Communicator, np.ndarray]]
) -> tuple[float, float]:
    progress.wait_handle(all_ranks.ibarrier(), "start of an exchange")
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for comm, buffer in buffers:
        counts = even(len(buffer), comm.size)
        start, stop = even_interval(len(buffer), comm.size, comm.rank)
        reduced = np.zeros(stop - start, buffer.dtype)
        progress.wait_handle(comm.ireduce_scatter(buffer, reduced, counts), "reduce-scatter alone")
        buffer[start:stop] = reduced
        progress.wait_handle(comm.iallgather(None, buffer, counts), "allgather alone")
    return time.perf_counter() - begin, time.process_time() - cpu_begin


def report_compute_only(
    session: Session,
    directory: Path,
    table: TimeTable,
    exchange: GradientExchange,
    about: Mapping[str, Any],
) -> list[str]:
    """Write the measurement to a file, and return the lines to print on rank 0; none on other ranks. Collective over the world.

    Args:
        table: time table of this rank's steps.
        exchange: measured exchange of the gradients.
        about: conditions of the measurement, which are written into the file.
    """
    of_ranks = session.world.allgather_object((table.median_step_seconds, table.total.messages_seconds))
    per_rank = [float(seconds) for seconds, _ in of_ranks]
    slowest = int(np.argmax(per_rank))
    # One core computes and moves messages, so the exchange costs compute time; the wire works at the same time as both.
    limit = max(per_rank[slowest] + exchange.cpu_seconds, exchange.seconds)
    if not session.is_root:
        return []
    content = {
        **about,
        "ranks": session.world.size,
        "steps": table.steps,
        "compute_only_seconds": per_rank[slowest],
        "messages_seconds": of_ranks[slowest][1],
        "per_rank_seconds": per_rank,
        "exchange": asdict(exchange),
        "limit_seconds": limit,
    }
    write_json(directory / COMPUTE_ONLY_FILE, content)
    lines = [
        f"compute-only step {per_rank[slowest] * 1e3:.3f} ms: median of {table.steps} steps on the slowest rank, {slowest} "
        f"(fastest {min(per_rank) * 1e3:.3f} ms); posting and progress take {of_ranks[slowest][1] * 1e3:.3f} ms of it"
    ]
    if session.groups.all_ranks.size > 1:
        lines.append(
            f"gradients alone, reduce-scatter and allgather of {size_text(exchange.payload_bytes)}: "
            f"{exchange.seconds * 1e3:.3f} ms, {exchange.cpu_seconds * 1e3:.3f} ms of them CPU time; "
            f"no step is shorter than {limit * 1e3:.3f} ms"
        )
    return lines


_TAG = 7302


@dataclass(frozen=True)
class RankTrace:
    """Trace of one rank, as sent to rank 0.

    Attributes:
        error_ns: maximum error of the times of `events` on rank 0's clock, in ns.
        groups: groups of the queues, as in `Postings`.
        table: time table of the rank; None if no whole step was recorded.
    """

    rank: int
    events: Events
    error_ns: int
    groups: Mapping[str, int]
    table: TimeTable | None


class TraceReport:
    """Report of a traced run.

    Every rank creates it at the start of the run and calls `finish` at the end; both are collective over `world`.

    Args:
        progress: progress engine of the process; its queues must be idle at both times.
        trace: tracer of the progress engine.
    """

    def __init__(self, world: Communicator, progress: ProgressEngine, trace: Tracer) -> None:
        self._world, self._progress, self._trace = world, progress, trace
        self.table: TimeTable | None = None  # this rank's, once finished
        self._begin = self._offset()
        trace.clear()  # start-up is not part of any step

    def finish(self, directory: Path, about: Mapping[str, Any], width: int) -> list[str]:
        """Write `trace.json` and `time_table.json` on rank 0, and return the lines to print there; none on other ranks.

        If a file cannot be written, one of the lines reports the error.

        Args:
            about: versions, machine and configuration, written into both files.
            width: number of columns of a printed line.
        """
        events = self._trace.events()
        groups = self._groups()
        clock = ClockMap(self._begin, self._offset())
        events = replace(events, start_ns=clock.to_root(events.start_ns), stop_ns=clock.to_root(events.stop_ns))
        table = time_table.tabulate(events)
        if table is not None:  # estimated cost: the number of events of a step times the measured cost of an event
            table = replace(table, tracing_seconds=table.events * cost_per_event_seconds())
        self.table, mine = table, RankTrace(self._world.rank, events, clock.error_ns, groups, table)
        if self._world.rank != 0:
            self._send(mine)
            return []
        return self._write(directory, about, mine, width)

    def _offset(self) -> Offset:
        return measure_offset(self._world, self._progress.wait_handle, clock_ns=self._trace.clock_ns)

    def _groups(self) -> dict[str, int]:
        """Return the world rank of the first member of each queue's group, which distinguishes queues with the same name."""
        return {name: int(comm.broadcast_object(self._world.rank)) for name, comm in self._progress.communicators().items()}

    def _send(self, mine: RankTrace) -> None:
        payload = np.frombuffer(pickle.dumps(mine), np.uint8)
        self._progress.wait_handle(self._world.isend(np.array([payload.size], np.int64), 0, _TAG), "size of a trace")
        self._progress.wait_handle(self._world.isend(payload, 0, _TAG), "a trace")

    def _received(self) -> Iterator[RankTrace]:
        """Yield the other ranks' traces, one at a time, so that rank 0 never holds all of them."""
        for rank in range(1, self._world.size):
            size = np.zeros(1, np.int64)
            self._progress.wait_handle(self._world.irecv(size, rank, _TAG), f"size of the trace of rank {rank}")
            payload = np.empty(int(size[0]), np.uint8)
            self._progress.wait_handle(self._world.irecv(payload, rank, _TAG), f"trace of rank {rank}")
            yield pickle.loads(payload.tobytes())

    def _write(self, directory: Path, about: Mapping[str, Any], mine: RankTrace, width: int) -> list[str]:
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
        place = f"in {directory / TRACE_FILE}" if file.error is None else f"was not written ({reason(file.error)})"
        words = [
            f"trace of {counted(self._world.size, 'rank')} {place}",
            f"their clocks agree to within {error_ns * 1e-3:.1f} us",
            *([f"{dropped} events were dropped, as the buffer was full"] if dropped else []),
        ]
        summary = ["; ".join(words)]
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
        shown = lines(table, error_ns * 1e-9, self._world.size, width)
        if any(is_sum(line) for line in shown):
            summary.append(f"all rows: hpctrain trace {directory} --all")
        return [*shown, *summary]
