"""Started process of a job: world, grid, progress engine, log, and the cores that its ranks may run on.

A `StartedJob` has ranks, but no grid yet. A `StartedRank` has a place on the grid. A `Session` has a configuration as well.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TypeVar

from hpctrain.assembly.recipe import Recipe, check_batch, columns
from hpctrain.backend.choice import Backend, NodePlace, make_backend
from hpctrain.comm.base import Communicator, raise_on_all_ranks
from hpctrain.comm.groups import ProcessGrid, check_grid
from hpctrain.comm.progress import ProgressEngine
from hpctrain.config.schema import Config
from hpctrain.core.errors import ShapeError
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.job.automatic_choice import Resolved
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.threads import NodeLoad, ThreadPlan, usable_cores
from hpctrain.parallel.groups import GridGroups
from hpctrain.trace.tracer import Tracer, capacity_for

Result = TypeVar("Result")


@dataclass(frozen=True)
class StartedJob:
    """Ranks of a started job before it has a grid.

    Attributes:
        deadline_seconds: maximum time that a rank waits for other ranks.
    """

    world: Communicator
    threads: int
    deadline_seconds: float

    def place(self) -> NodePlace:
        """Return the place of this rank among the ranks that share its node's GPUs. Collective."""
        node = self.world.split_shared_memory("ranks of a node")
        return NodePlace(self.world.size, node.rank, node.size)


def on_root(world: Communicator, work: Callable[[], Result]) -> Result:
    """Run `work` on rank 0, and return its result or raise its error on every rank. Collective."""
    result: Result = world.broadcast_object(raise_on_all_ranks(world, lambda: work() if world.rank == 0 else None))
    return result


Cpus = frozenset[int]

_MOST_RANKS = 8  # maximum number of ranks of a node that are listed


def cores_of_ranks(world: Communicator, node_of: Sequence[int]) -> str:
    """Return a line on the cores that each rank may run on. Collective over `world`.

    Args:
        node_of: number of the node of each world rank.
    """
    return describe_cores(world.allgather_object(frozenset(os.sched_getaffinity(0))), node_of)


def describe_cores(cpus: Sequence[Cpus], node_of: Sequence[int]) -> str:
    """Return one line of text with the logical CPUs of each rank of the first node, and whether other nodes have the same."""
    nodes: dict[int, list[Cpus]] = {}
    for rank, node in enumerate(node_of):
        nodes.setdefault(node, []).append(cpus[rank])
    first, *others = nodes.values()
    line = f"cores of the ranks: {_node_cores(first)}"
    if any(node != first for node in others):
        return f"{line} on the first node; others differ"
    return f"{line} on each of {len(nodes)} nodes" if others else line


def _node_cores(cpus: Sequence[Cpus]) -> str:
    if len(cpus) > 1 and len(set(cpus)) == 1:
        return f"{ranges(cpus[0])}, shared by {len(cpus)} ranks"
    texts = [ranges(mask) for mask in cpus]
    if len(texts) > _MOST_RANKS:
        texts = [*texts[: _MOST_RANKS - 1], "...", texts[-1]]
    return " | ".join(texts)


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: {0, 1, 2, 5} -> "0-2,5"."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(runs)


def busy_node(world: Communicator, load: NodeLoad | None) -> str:
    """Return a line on the busiest node if other programs compete with its ranks, otherwise "". Collective over `world`.

    Args:
        load: load of this rank's node at the start; None if this rank has not measured it.
    """
    loads = world.allgather_object((platform.node(), load))
    busy = [(load, host) for host, load in loads if load is not None and load.is_busy]
    if not busy:
        return ""
    worst, host = max(busy, key=lambda one: one[0].others / one[0].cores)
    where = "here" if world.size == worst.ranks else f"on {host}"
    return f"busy machine: {worst.sentence(where)}; {worst.advice()}"


def oversubscribed(node: Communicator, world: Communicator, threads: int) -> bool:
    """Return whether the ranks of any node have more threads (`threads` here) than available cores. Collective over `world`."""
    of_node = node.allgather_object((frozenset(os.sched_getaffinity(0)), threads))
    cores = usable_cores(frozenset().union(*(mask for mask, _ in of_node)))
    return any(world.allgather_object(sum(count for _, count in of_node) > cores))


@dataclass(frozen=True)
class StartedRank:
    """Started process of a job, with its place on the grid.

    Attributes:
        launcher: launcher that has started the process.
        threads: plan of its threads.
        grid: place of this rank on the grid.
    """

    launcher: Launcher
    threads: ThreadPlan
    world: Communicator
    grid: ProcessGrid
    groups: GridGroups
    progress: ProgressEngine

    @property
    def mpi_library(self) -> str:
        """Name and version of the MPI library; "none" in a job of one process without MPI."""
        if not self.launcher.starts_mpi:
            return "none"
        from hpctrain.comm import mpi

        return mpi.describe()

    @property
    def threads_may_communicate(self) -> bool:
        """Whether several threads of this process may send and receive messages, one at a time."""
        if not self.launcher.starts_mpi:
            return True
        from hpctrain.comm import mpi

        return mpi.threads_may_call()

    @property
    def place(self) -> NodePlace:
        """Place of this rank among the ranks that share its node's GPUs."""
        return NodePlace(self.world.size, self.grid.node.rank, self.grid.node.size)

    @property
    def is_root(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.world.rank == 0


@dataclass(frozen=True)
class Session(StartedRank):
    """Started process of a job with a configuration.

    Attributes:
        resolved: configuration, including the automatic choice for this run.
        revision: revision of the repository around the working directory, on rank 0.
        device_messages: outcome of this rank's trial of MPI messages from GPU memory (see `run.messages.try_transport`); None:
            there was no trial.
    """

    resolved: Resolved
    revision: Mapping[str, object]
    device_messages: str | None = None

    @property
    def config(self) -> Config:
        """Configuration without open sections."""
        return self.resolved.recipe.config

    @property
    def recipe(self) -> Recipe:
        """Recipe of the configuration on the grid, without facts about images and without a backend."""
        return replace(self.resolved.recipe, grid=(self.grid.rows, self.grid.cols))

    def backend(self) -> Backend:
        """Return the backend of this rank: that of the search, if any, because the first backend of a process chooses its GPU."""
        config = self.config
        return self.resolved.backend or make_backend(config.backend, config.dtype, config.precision, self.place)

    @classmethod
    def start(
        cls,
        resolved: Resolved,
        launcher: Launcher,
        threads: ThreadPlan,
        world: Communicator,
        revision: Mapping[str, object],
        flight: FlightRecorder | None = None,
        device_messages: str | None = None,
    ) -> Session:
        """Create the groups and the progress engine over a started world. Collective.

        Args:
            flight: recorder that is notified of all operations and waits.
            device_messages: see `Session`.

        Raises:
            ShapeError, ConfigError: see `check_sizes`.
        """
        config = resolved.recipe.config
        assert not config.automatic, "all open sections must be chosen before the grid is created"
        rows, cols = config.grid.rows, columns(config, world.size)
        raise_on_all_ranks(world, partial(check_sizes, rows, cols, world.size, config.batch))
        progress = ProgressEngine(
            rank=world.rank,
            deadline_seconds=config.deadline_seconds,
            abort=world.abort,
            trace=Tracer(capacity_for(world.size)) if config.trace else None,
            flight=flight,
        )
        grid = ProcessGrid(world, rows, cols)
        return cls(launcher, threads, world, grid, GridGroups(grid), progress, resolved, revision, device_messages)


def check_sizes(rows: int, cols: int, size: int, batch: int) -> None:
    """Raise if `size` ranks do not fit a grid, or if a rank of a grid of one row would have no sample of a batch.

    Raises:
        ShapeError: the number of ranks is not the product of the grid's rows and columns.
        ConfigError: the batch has fewer samples than the ranks of a grid of one row.
    """
    try:
        check_grid(rows, cols, size)
    except ShapeError as error:
        places = rows * cols
        start = f"; to keep this grid, start the program with `mpiexec -n {places}`" if places > 0 else ""
        raise ShapeError(f"{str(error).removesuffix('.')}{start}.") from None
    check_batch(batch, rows, cols)
