"""Steps that leave no trace where something of them is not finite: all ranks agree on that before anybody goes on.

A step updates as it always does, slice by slice. Behind its last update every rank looks at what it has made, one number tells
all ranks whether anybody saw something, and if so each of them goes back to its copy of what there was before the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.undo_copy import UndoCopy
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.train.finiteness import Cause, Finiteness
from hpctrain.train.weight_watch import WeightWatch


class StepGuard:
    """Keeps what a step changes, and undoes the step where any rank has seen what is not finite. Making it is collective.

    Args:
        averagers: by parameter group. comm: all ranks that train together; of which a copy is made.
        finiteness: looks at what this rank has updated. watch: learns of an undone step; None: no checks.
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
        """A step begins."""
        for copy in self._copies:
            copy.keep()

    def end(self, step: int, *, finite: bool) -> Cause | None:
        """Complete the step on every rank; undo it if it was not finite anywhere, and say why. Collective.

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
            self._watch.verify()  # the copies remove the traces of damage
            self._watch.step_undone()
        for copy in self._copies:
            copy.restore()
        return cause
