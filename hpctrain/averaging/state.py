"""Whole optimiser state of a parameter, from the ranks that own parts of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.averaging.slices import Slice
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.parameter import Segment
from hpctrain.optim.base import Optimizer


def gather_state(
    optimizer: Optimizer, segment: Segment, slices: Sequence[Slice], comm: Communicator, progress: ProgressEngine
) -> dict[str, np.ndarray]:
    """State of one parameter by name, 1-D, on every rank. Collective over `comm`.

    Args:
        segment: the whole parameter. slices: those that hold some of it, each shared out over the ranks.
    """
    whole = {name: np.empty_like(view, shape=(segment.size,)) for name, view in optimizer.state(segment.part(0, 0)).items()}
    for piece in slices:
        owned = [segment.part(*piece.part(rank, comm.size)) for rank in range(comm.size)]
        counts = [part.size for part in owned]
        begin = max(segment.start, piece.start) - segment.start
        for name, target in whole.items():
            mine = optimizer.state(owned[comm.rank])[name]
            handle = comm.iallgather(mine, target[begin : begin + sum(counts)], counts)
            progress.wait_handle(handle, f"{name} of {segment.parameter}")
    return whole
