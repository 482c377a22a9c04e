"""The ranks of a started job. This module is apart from the search, which most starts do not load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hpctrain.comm.base import Communicator
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks

Result = TypeVar("Result")


@dataclass(frozen=True)
class StartedJob:
    """The ranks of a started job before it has a grid. threads: per rank. deadline_seconds: how long a rank waits for others."""

    world: Communicator
    threads: int
    deadline_seconds: float

    def on_root(self, work: Callable[[], Result]) -> Result:
        """Run `work` on rank 0, and return its result or raise its error on every rank. Collective."""
        on_rank_0 = raise_on_all_ranks(self.world, lambda: work() if self.world.rank == 0 else None)
        result: Result = self.world.broadcast_object(on_rank_0)
        return result
