"""Picklable values among ranks, on top of buffer operations, so that they wait with the deadline. Start-up and shut-down only."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from hpctrain.comm.base import Communicator, Handle

Wait = Callable[[Handle, str], None]


def allgather_object(comm: Communicator, value: Any, wait: Wait) -> list[Any]:
    """Every rank's value, in rank order. Collective; waits through `wait(handle, purpose)`."""
    pickled = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = np.zeros(comm.size, np.int64)
    sizes[comm.rank] = pickled.size
    wait(comm.iallgather(None, sizes, [1] * comm.size), "sizes of gathered objects")
    counts = [int(size) for size in sizes]
    gathered = np.empty(sum(counts), np.uint8)
    wait(comm.iallgather(pickled, gathered, counts), "gathered objects")
    ends = np.cumsum(sizes)
    return [pickle.loads(gathered[end - size : end].tobytes()) for size, end in zip(sizes, ends, strict=True)]


def broadcast_object(comm: Communicator, value: Any, root: int, wait: Wait) -> Any:
    """`root`'s value; root gets its own object back. Collective; waits through `wait(handle, purpose)`."""
    data = np.frombuffer(pickle.dumps(value), np.uint8).copy() if comm.rank == root else np.empty(0, np.uint8)
    size = np.array([data.size], np.int64)
    wait(comm.ibroadcast(size, root), "size of a broadcast object")
    if comm.rank != root:
        data = np.empty(int(size[0]), np.uint8)
    wait(comm.ibroadcast(data, root), "broadcast object")
    return value if comm.rank == root else pickle.loads(data.tobytes())
