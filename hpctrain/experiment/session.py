"""A started process of a job: its world, grid, progress engine and log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain import log
from hpctrain.comm.base import Communicator
from hpctrain.comm.grid import GridAxis, ProcessGrid
from hpctrain.comm.launcher import Launcher, check_world
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.comm.watchdog import guard
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.threads import ThreadPlan
from hpctrain.trace.tracer import Tracer, capacity_for


@dataclass(frozen=True)
class Session:
    """What every command that communicates starts with.

    samples: the ranks that share a step's samples out (they hold the same weights). gradients: those that average them, the same
    ranks. messages: the same ranks, on a communicator of its own for the small message, so that its order is not tied to the
    gradients'. statistics: the same, for
    synchronised batch norm. revision: of the repository around the working directory, on rank 0.
    """

    config: Config
    launcher: Launcher
    threads: ThreadPlan
    world: Communicator
    grid: ProcessGrid
    samples: Communicator
    gradients: Communicator
    messages: Communicator
    statistics: Communicator
    progress: ProgressEngine
    revision: Mapping[str, object]

    @classmethod
    def start(
        cls, config: Config, launcher: Launcher, threads: ThreadPlan, world: Communicator, revision: Mapping[str, object]
    ) -> Session:
        """Make the groups and the progress engine over a started world. Collective.

        Raises:
            ShapeError: a grid that does not multiply to it.
            ConfigError: fewer samples in a batch than ranks that share them.
        """
        log.configure(world.rank)
        columns = config.grid.cols if config.grid.cols is not None else max(1, world.size // config.grid.rows)
        grid = ProcessGrid(world, config.grid.rows, columns)
        if config.batch < columns:
            raise ConfigError(
                f"batch {config.batch} is smaller than the {columns} ranks that share it; the smallest batch is {columns}."
            )
        samples = grid.along(GridAxis.COL)
        messages = samples.split(0, samples.rank, "messages")
        statistics = samples.split(0, samples.rank, "statistics")
        assert messages is not None
        assert statistics is not None
        trace = Tracer(capacity_for(world.size)) if config.trace else None
        progress = ProgressEngine(rank=world.rank, deadline_seconds=config.deadline_seconds, abort=world.abort, trace=trace)
        return cls(config, launcher, threads, world, grid, samples, samples, messages, statistics, progress, revision)

    @property
    def mpi_library(self) -> str:
        """Name and version of the MPI library; "none" in a job of one process without MPI."""
        if self.launcher.name == "none":
            return "none"
        from hpctrain.comm import mpi

        return mpi.describe()

    @property
    def threads_may_communicate(self) -> bool:
        """True where a second thread of this process may drive messages."""
        if self.launcher.name == "none":
            return True
        from hpctrain.comm import mpi

        return mpi.threads_may_call()

    @property
    def is_root(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.world.rank == 0


def start_world(launcher: Launcher, deadline_seconds: float) -> Communicator:
    """MPI's world under a launcher; one process, and no MPI at all, without one.

    Raises:
        LaunchError: the world has another size than the launcher was asked for.
    """
    if launcher.name == "none":
        return SingleCommunicator()
    from hpctrain.comm import mpi

    with guard("The start of MPI", deadline_seconds, rank=launcher.rank):
        world = mpi.world(deadline_seconds)
    check_world(launcher, world.size)
    return world
