"""Whole runs on virtual ranks: what `hpctrain train` does in a job, from the configuration to the last checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hpctrain.comm.grid import ProcessGrid
from hpctrain.config.load import load
from hpctrain.experiment.automatic_choice import Resolved
from hpctrain.experiment.grid import columns
from hpctrain.experiment.options import filled
from hpctrain.experiment.run import run_training
from hpctrain.experiment.session import Session
from hpctrain.launch.launcher import detect
from hpctrain.launch.signals import SignalWatch
from hpctrain.launch.threads import ThreadPlan
from hpctrain.parallel.groups import GridGroups
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine


def train_virtual(ranks: int, file: Path, *overrides: str, resume: str | None = None, steps: int = 0) -> None:
    """`hpctrain train file overrides --resume resume --steps steps` on virtual ranks. Signals are not watched."""
    program = partial(_rank, file=file, overrides=overrides, resume=resume, steps=steps)
    run_virtual(ranks, program, deadline_seconds=120)


def _rank(comm: ThreadCommunicator, file: Path, overrides: tuple[str, ...], resume: str | None, steps: int) -> None:
    config = filled(load(file, overrides)[0])
    grid = ProcessGrid(comm, config.grid.rows, columns(config, comm.size))
    session = Session(
        detect({}), ThreadPlan(1, 1, "a test"), comm, grid, GridGroups(grid), virtual_engine(comm), Resolved(config), {}
    )
    run_training(session, SignalWatch(), resume=resume, steps=steps, style="none")
