"""A started process of a job: its world, grid, progress engine and log."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from hpctrain import log
from hpctrain.backend.cuda.choose import NodePlace
from hpctrain.comm.base import Communicator
from hpctrain.comm.grid import ProcessGrid, check_grid
from hpctrain.comm.poll_policy import MORE_RANKS_THAN_CORES, WaitPolicy
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.comm.single import SingleCommunicator
from hpctrain.comm.watchdog import guard
from hpctrain.config.schema import Config
from hpctrain.core.errors import LaunchError
from hpctrain.job.automatic_choice import Resolved
from hpctrain.config.grid import check_batch, columns
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.launch.launcher import Launcher, check_world, environment_fault, lone_fault
from hpctrain.launch.threads import ThreadPlan, outnumbers_cores
from hpctrain.parallel.groups import GridGroups
from hpctrain.trace.tracer import Tracer, capacity_for


@dataclass(frozen=True)
class StartedRank:
    """A started process of a job: its world, its place on the grid, and its progress engine.

    groups: the grid's communicators, each with one use.
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
        """True where a second thread of this process may drive messages."""
        if not self.launcher.starts_mpi:
            return True
        from hpctrain.comm import mpi

        return mpi.threads_may_call()

    @property
    def place(self) -> NodePlace:
        """This rank among those that share its node's GPUs."""
        return NodePlace(self.world.size, self.grid.node.rank, self.grid.node.size)

    @property
    def is_root(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.world.rank == 0


@dataclass(frozen=True)
class Session(StartedRank):
    """A started process of a configured job.

    resolved: the configuration, with what was chosen for this run. revision: of the repository around the working directory, on
    rank 0. device_messages: the outcome of this rank's trial of MPI's messages from GPUs, see `experiment.transport`.
    """

    resolved: Resolved
    revision: Mapping[str, object]
    device_messages: str | None = None

    @property
    def config(self) -> Config:
        """The configuration, in which nothing is left open."""
        return self.resolved.config

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
        """Make the groups and the progress engine over a started world. Collective.

        Args:
            flight: is told of all operations and waits. device_messages: as in the session.

        Raises:
            ShapeError: a grid that does not multiply to it.
            ConfigError: fewer samples in a batch than ranks that share them.
        """
        config = resolved.config
        assert not config.automatic, "what is open is chosen before there is a grid"
        grid, progress = on_grid(
            world,
            config.grid.rows,
            columns(config, world.size),
            batch=config.batch,
            deadline_seconds=config.deadline_seconds,
            trace=Tracer(capacity_for(world.size)) if config.trace else None,
            flight=flight,
        )
        return cls(launcher, threads, world, grid, GridGroups(grid), progress, resolved, revision, device_messages)


def on_grid(
    world: Communicator,
    rows: int,
    cols: int,
    *,
    batch: int,
    deadline_seconds: float,
    trace: Tracer | None = None,
    flight: FlightRecorder | None = None,
) -> tuple[ProcessGrid, ProgressEngine]:
    """This rank's place on a grid of all ranks, and its progress engine; its log lines have its rank. Collective.

    Raises:
        ShapeError: a grid that does not multiply to the world's size.
        ConfigError: fewer samples in a batch than ranks that share them.
    """
    log.configure(world.rank, world.size)
    raise_on_all_ranks(world, partial(_check_sizes, rows, cols, world.size, batch))
    progress = ProgressEngine(rank=world.rank, deadline_seconds=deadline_seconds, abort=world.abort, trace=trace, flight=flight)
    return ProcessGrid(world, rows, cols), progress


def _check_sizes(rows: int, cols: int, size: int, batch: int) -> None:
    check_grid(rows, cols, size)
    check_batch(batch, rows, cols)


def start_world(launcher: Launcher, deadline_seconds: float, flight: FlightRecorder | None = None) -> Communicator:
    """MPI's world under a launcher, or where HPCTRAIN_EXPECT_RANKS asks for several ranks; else one process, and no MPI at all.

    flight: is told of waits during start-up.

    Raises:
        LaunchError: the launcher is gone, or the world's size differs from what the launcher or HPCTRAIN_EXPECT_RANKS requested.
    """
    fault = environment_fault(os.environ)
    if fault is not None and launcher.starts_mpi:
        raise LaunchError(fault)
    if not launcher.starts_mpi:
        alone = lone_fault(launcher, os.environ)
        if alone is not None:
            log.get_logger(__name__).warning(alone)
        return SingleCommunicator()
    from hpctrain.comm import mpi

    with guard("The start of MPI", deadline_seconds, rank=launcher.rank):
        world = mpi.world(deadline_seconds, flight, MORE_RANKS_THAN_CORES if outnumbers_cores(launcher) else WaitPolicy())
    check_world(launcher, world.size, mpi.describe())
    return world
