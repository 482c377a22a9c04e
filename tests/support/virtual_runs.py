"""Whole runs on virtual ranks: what `hpctrain train` does in a job, from the configuration to the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

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

Result = TypeVar("Result")


def train_virtual(ranks: int, file: Path, *overrides: str, resume: str | None = None, steps: int = 0) -> None:
    """`hpctrain train file overrides --resume resume --steps steps` on virtual ranks. Signals are not watched."""
    program = partial(_rank, file=file, overrides=overrides, resume=resume, steps=steps)
    run_virtual(ranks, program, deadline_seconds=120)


def work_virtual(
    ranks: int, file: Path, overrides: Sequence[str], work: Callable[[Session], Result], ranks_per_node: int | None = None
) -> list[Result]:
    """The results of `work` on each virtual rank of a job with a configuration. ranks_per_node: None: all are on one node."""
    return run_virtual(
        ranks, lambda comm: work(_session(comm, file, overrides)), deadline_seconds=120, ranks_per_node=ranks_per_node
    )


def _rank(comm: ThreadCommunicator, file: Path, overrides: tuple[str, ...], resume: str | None, steps: int) -> None:
    session = _session(comm, file, overrides)
    run_training(session, SignalWatch(), resume=resume, steps=steps, style="none")


def _session(comm: ThreadCommunicator, file: Path, overrides: Sequence[str]) -> Session:
    config = filled(load(file, overrides)[0])
    grid = ProcessGrid(comm, config.grid.rows, columns(config, comm.size))
    threads, engine = ThreadPlan(1, 1, "a test"), virtual_engine(comm)
    return Session(detect({}), threads, comm, grid, GridGroups(grid), engine, Resolved(config), {})
