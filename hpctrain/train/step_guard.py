"""Undoes steps with non-finite values. All ranks agree on each step before any of them goes on.

A step updates as usual, slice by slice. After its last update every rank checks the values that it has updated, and ranks sum one
number. If any rank has found a non-finite value, each restores its copy from before the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.averager_state import UndoCopy
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.train.finiteness import Cause, Finiteness
from hpctrain.train.weight_watch import WeightWatch


class StepGuard:
    """Keeps what a step changes, and undoes the step if any rank has found a non-finite value. Making it is collective.

    Args:
        averagers: by parameter group. comm: all ranks that train together; the guard makes a copy of it.
        finiteness: checks what this rank has updated. watch: is informed of undone steps; None if the replica has no checks.
    """

    def __init__(
        self,
        averagers: Mapping[str, GradientAverager],
        comm: Communicator,
        progress: ProgressEngine,
        finiteness: Finiteness,
        watch: WeightWatch | None,
    ) -> None:
        self._averagers, self._progress, self._finiteness = tuple(averagers.values()), progress, finiteness
        self._watch = watch
        self._copies = [UndoCopy(averager) for averager in self._averagers]
        copied = comm.split(0, comm.rank, "agreement on finite steps")
        assert copied is not None
        self._comm = copied
        self._bad_ranks = np.zeros(1, np.float64)

    def begin(self) -> None:
        """Copy what the next step changes."""
        for copy in self._copies:
            copy.keep()

    def end(self, step: int, *, finite: bool) -> Cause | None:
        """Complete the step on every rank. If any rank has found a non-finite value, undo it and return the cause. Collective.

        Args:
            step: counted from 1. finite: this rank's loss and batch statistics.
        """
        for averager in self._averagers:
            averager.drain()
        seen = self._finiteness.begin().faults()
        self._bad_ranks[0] = not finite or bool(seen)
        comm, bad_ranks = self._comm, self._bad_ranks
        queue = self._progress.queue(comm)
        self._progress.wait(queue.post(lambda: comm.iallreduce(bad_ranks), "agreement on a finite step"))
        if not bad_ranks[0]:
            return None
        cause = self._finiteness.cause(step, seen, finite=finite, gather=comm.allgather_object)
        if self._watch is not None:
            self._watch.verify()  # before the copies overwrite what may be damaged
            self._watch.step_undone()
        for copy in self._copies:
            copy.restore()
        return cause
