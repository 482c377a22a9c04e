"""The memory of all nodes, filled before the first step: one rank of the job reads a sample and sends it to the other nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpctrain.comm.base import Handle
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.data.filling_plan import FillingPlan
from hpctrain.data.cache import SampleMemory
from hpctrain.core.errors import HpctrainError
from hpctrain.job.session import StartedRank

# Of a chunk, and what a rank receives in a round.
_CHUNK_BYTES = 4 << 20
_RECEIVED_BYTES = 64 << 20
_TAG = 411


def fill(rank: StartedRank, memory: SampleMemory, *, shared: bool, stop_requested: Callable[[], bool] = lambda: False) -> int:
    """Fill the memory of every node; give the number of samples that all of them hold then, but for unreadable ones. Collective.

    A sample that cannot be read, and for which others may stand in, is left to the ranks that need it. So are those that are
    missing where the job is to stop: all ranks end with the same round.

    Args:
        memory: empty. shared: whether the ranks of this node have it in common. stop_requested: this rank was asked to stop.

    Raises:
        DataError: on every rank, where one could not read a sample, and none may stand in for it.
    """
    plan = _plan(rank, memory, shared=shared)
    errors: list[HpctrainError] = []
    done = 0
    while done < plan.rounds and not _some_rank_ends(rank, errors or stop_requested()):
        _round(rank, memory, plan, done, errors)
        done += 1

    def tell() -> None:
        if errors:
            raise errors[0]

    raise_on_all_ranks(rank.world, tell)
    return plan.done_after(done)


def _some_rank_ends(rank: StartedRank, ends: object) -> bool:
    """Whether `ends` is true on some rank. Collective."""
    count = np.array([bool(ends)], np.int64)
    rank.progress.wait_handle(rank.world.iallreduce(count), "whether memory is filled on")
    return bool(count[0])


def _plan(rank: StartedRank, memory: SampleMemory, *, shared: bool) -> FillingPlan:
    """Memories are numbered by node, and those of ranks that are alone with theirs behind them."""
    world = rank.world
    mark = rank.grid.node_of[world.rank] if shared else world.size + world.rank
    of_ranks = world.allgather_object((memory.held, mark))
    marks = sorted({mark for _, mark in of_ranks})
    at_once = min(_CHUNK_BYTES, _RECEIVED_BYTES // len(marks)) // memory.image_bytes
    return FillingPlan(min(held for held, _ in of_ranks), max(1, at_once), tuple(marks.index(mark) for _, mark in of_ranks))


def _round(rank: StartedRank, memory: SampleMemory, plan: FillingPlan, turn: int, errors: list[HpctrainError]) -> None:
    """Read a chunk, send it, and receive those of others; after an error nothing more is read, and nothing sent counts."""
    comm, me, size = rank.world, rank.world.rank, 1 + memory.image_bytes
    incoming: list[tuple[int, np.ndarray, Handle]] = []
    for sender in plan.senders(turn, me):
        first, stop = plan.chunk(turn, sender)
        message = np.empty((stop - first) * size, np.uint8)
        incoming.append((first, message, comm.irecv(message, sender, _TAG)))
    first, stop = plan.chunk(turn, me)
    message = np.zeros((stop - first) * size, np.uint8)
    if first < stop and not errors:
        try:
            memory.read_ahead(first, *_parts(message, memory))
        except HpctrainError as error:
            errors.append(error)
    handles = [comm.isend(message, receiver, _TAG) for receiver in plan.receivers(turn, me)]
    for first, received, handle in incoming:
        rank.progress.wait_handle(handle, "samples of another node")
        memory.put(first, *_parts(received, memory))
    for handle in handles:
        rank.progress.wait_handle(handle, "samples for another node")
    rank.progress.notes.alive()


def _parts(message: np.ndarray, memory: SampleMemory) -> tuple[np.ndarray, np.ndarray]:
    """The images (n, H, W, C) of a message, and a byte for each that says whether it counts."""
    count = len(message) // (1 + memory.image_bytes)
    return message[count:].reshape(count, *memory.shape[1:]), message[:count]
