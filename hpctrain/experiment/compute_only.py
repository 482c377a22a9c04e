"""The step without communication, and the communication without the step: what a real step is compared with.

Every rank trains on its own share with its own gradients, at the same time as all others, as they share memory and power. Ranks
that split layers among them exchange activations as ever. What the ranks learn is of no use and is not kept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.intervals import even, even_interval
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.groups import in_levels, levels
from hpctrain.config.evaluation_sections import EvaluateConfig
from hpctrain.config.schema import AveragerConfig, CheckpointConfig, ChecksConfig, HashesConfig
from hpctrain.job.session import Session
from hpctrain.nn.network import Network
from hpctrain.parallel.groups import GridGroups
from hpctrain.storage.atomic_write import write_json
from hpctrain.trace.time_table import TimeTable

RESULT_FILE = "compute_only.json"
_REPEATS = 5


def without_communication(session: Session) -> Session:
    """The same rank with the same share of the batch, whose gradients, batch statistics and messages stay in its split group.

    Collective. The ranks of a split group go on exchanging activations: without them there is nothing to compute on.
    """
    config = session.config.model_copy(
        update={
            "averager": AveragerConfig(name="blocking"),
            "evaluate": EvaluateConfig(every_epochs=0),
            "checkpoint": CheckpointConfig(every_epochs=0),
            "checks": ChecksConfig(every_steps=0),  # each rank trains something else
            "hashes": HashesConfig(every_steps=0),
        }
    )
    return replace(session, resolved=replace(session.resolved, config=config), groups=session.groups.alone())


@dataclass(frozen=True)
class GradientExchange:
    """A reduce-scatter and an allgather of all gradients with nothing beside them, on the slowest rank; medians.

    In two levels where nodes have several ranks: in one they would take longer than an averager does.

    payload_bytes: of the gradients. seconds: until both are complete. cpu_seconds: of the process in that time.
    """

    payload_bytes: int
    seconds: float
    cpu_seconds: float


def measure_exchange(groups: GridGroups, progress: ProgressEngine, network: Network) -> GradientExchange:
    """Exchange buffers of the gradients' size among those who average them. Collective over all ranks of `groups`."""
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


def report(
    session: Session,
    directory: Path,
    table: TimeTable,
    exchange: GradientExchange,
    about: Mapping[str, Any],
) -> list[str]:
    """Record and describe the measurement; the lines are rank 0's. Collective over the world.

    Args:
        table: of this rank's steps.
    """
    of_ranks = session.world.allgather_object((table.median_step_seconds, table.total.messages_seconds))
    per_rank = [float(seconds) for seconds, _ in of_ranks]
    slowest = int(np.argmax(per_rank))
    # One core computes and moves messages, so what the exchange costs it adds to the compute; the wire works beside both.
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
    write_json(directory / RESULT_FILE, content)
    lines = [
        f"compute-only step {per_rank[slowest] * 1e3:.3f} ms: median of {table.steps} steps on the slowest rank, {slowest} "
        f"(fastest {min(per_rank) * 1e3:.3f} ms); posting and progress take {of_ranks[slowest][1] * 1e3:.3f} ms of it"
    ]
    if session.groups.all_ranks.size > 1:
        lines.append(
            f"gradients alone, reduce-scatter and allgather of {exchange.payload_bytes / 1e6:.1f} MB: "
            f"{exchange.seconds * 1e3:.3f} ms, {exchange.cpu_seconds * 1e3:.3f} ms of them CPU time; "
            f"no step is shorter than {limit * 1e3:.3f} ms"
        )
    return lines
