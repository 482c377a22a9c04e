"""All ranks of a job that has started, before there is a grid. Apart from the search, which most starts do not load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hpctrain.comm.base import Communicator
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks

Told = TypeVar("Told")


@dataclass(frozen=True)
class StartedJob:
    """All ranks of a started job, before there is a grid. threads: of a rank. deadline_seconds: that a rank waits for others."""

    world: Communicator
    threads: int
    deadline_seconds: float

    def on_root(self, work: Callable[[], Told]) -> Told:
        """The result of rank 0's work, on every rank; an error, too. Collective."""
        told: Told = self.world.broadcast_object(raise_on_all_ranks(self.world, lambda: work() if self.world.rank == 0 else None))
        return told
