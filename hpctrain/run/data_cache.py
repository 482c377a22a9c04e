"""Cache levels between a job's data files and its loaders: memory of the nodes, and local copies.

Memory of the nodes may be filled before the first step. The job then reads each sample once and sends it to the other nodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.comm.base import Communicator, Handle, raise_on_all_ranks
from hpctrain.comm.shared_memory import share
from hpctrain.config.schema import CacheConfig
from hpctrain.config.values import AUTO_SIZE
from hpctrain.core.errors import HpctrainError
from hpctrain.core.text import size_text
from hpctrain.data.cache import ALONE, FillingPlan, NodeRank, ReadCounts, SampleCache, bytes_for, held_in
from hpctrain.data.image_file import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.readers import BlockReader
from hpctrain.job.session import StartedRank
from hpctrain.launch.control_groups import available_bytes


@dataclass(frozen=True)
class KeptSamples:
    """Samples of a file that a node keeps.

    Attributes:
        memory, memory_bytes: number of samples in memory, from the first one on, and their size in bytes.
        denied: why the ranks of the node cannot share memory, so that each keeps these samples; "" if they can.
        local_first, local, local_bytes: first sample of the local copy, number of its samples, and their size in bytes.
        local_denied: why there is no local copy, or a smaller one than requested; "" otherwise.
    """

    memory: int = 0
    memory_bytes: int = 0
    denied: str = ""
    local_first: int = 0
    local: int = 0
    local_bytes: int = 0
    local_denied: str = ""

    @property
    def covered(self) -> int:
        """Number of samples, from the first one on, that are read from the data file only once."""
        return max(self.memory, self.local_first + self.local if self.local_first <= self.memory else 0)


def sentences(file: ImageFile, kept: KeptSamples) -> Iterator[str]:
    """Yield sentences on the cache levels of a file."""
    again = ", the others are read again in each epoch" if kept.covered < len(file) else ""
    if kept.memory:
        where = "in memory of each node"
        if kept.denied:
            where = f"in memory of each rank, as the ranks of a node cannot share it ({kept.denied})"
        size = f"({size_text(kept.memory_bytes)})"
        yield f"data {file.path}: {_part(kept.memory, file)} stay {where} {size}{'' if kept.local else again}"
    if kept.local:
        size = f"({size_text(kept.local_bytes)})"
        short = f", as {kept.local_denied}" if kept.local_denied else ""
        yield f"data {file.path}: {_part(kept.local, file)} stay in a local copy on each node {size}{short}{again}"
    elif kept.local_denied:
        yield f"data {file.path}: there is no local copy, as {kept.local_denied}"
    if not kept.memory and not kept.local:
        yield f"data {file.path}: no sample stays in memory of a node; all are read again in each epoch"


def _part(samples: int, file: ImageFile) -> str:
    return "all samples" if samples == len(file) else f"{math.floor(100 * samples / len(file))} % of the samples"


# Maximum bytes of a chunk, and of all chunks that a rank receives in a round.
_CHUNK_BYTES = 4 << 20
_RECEIVED_BYTES = 64 << 20
_TAG = 411


def fill(rank: StartedRank, memory: SampleCache, *, shared: bool, stop_requested: Callable[[], bool] = lambda: False) -> int:
    """Fill the memory of every node; return the number of samples that all nodes then hold, except unreadable ones. Collective.

    A sample that cannot be read, but may be replaced, is skipped; the ranks that need it handle it later. If a rank was asked to
    stop, all ranks end after the same round, and the remaining samples are read later as well.

    Args:
        memory: empty cache of this rank or its node.
        shared: whether the ranks of this node share `memory`.
        stop_requested: function that returns whether this rank was asked to stop.

    Raises:
        DataError: a rank could not read a sample that must not be replaced; on every rank.
    """
    plan = _plan(rank, memory, shared=shared)
    errors: list[HpctrainError] = []
    done = 0
    while done < plan.rounds and not _some_rank_ends(rank, errors or stop_requested()):
        _round(rank, memory, plan, done, errors)
        done += 1

    def raise_first() -> None:
        if errors:
            raise errors[0]

    raise_on_all_ranks(rank.world, raise_first)
    return plan.done_after(done)


def _some_rank_ends(rank: StartedRank, ends: object) -> bool:
    """Return whether `ends` is true on some rank. Collective."""
    count = np.array([bool(ends)], np.int64)
    rank.progress.wait_handle(rank.world.iallreduce(count), "whether memory is filled on")
    return bool(count[0])


def _plan(rank: StartedRank, memory: SampleCache, *, shared: bool) -> FillingPlan:
    """Return the plan of rounds. Memories are numbered: shared ones first, by node, then unshared ones, by rank. Collective."""
    world = rank.world
    mark = rank.grid.node_of[world.rank] if shared else world.size + world.rank
    of_ranks = world.allgather_object((memory.held, mark))
    marks = sorted({mark for _, mark in of_ranks})
    at_once = min(_CHUNK_BYTES, _RECEIVED_BYTES // len(marks)) // memory.image_bytes
    return FillingPlan(min(held for held, _ in of_ranks), max(1, at_once), tuple(marks.index(mark) for _, mark in of_ranks))


def _round(rank: StartedRank, memory: SampleCache, plan: FillingPlan, turn: int, errors: list[HpctrainError]) -> None:
    """Read a chunk, send it, and receive the chunks of other ranks.

    After an error, the rank reads nothing, and sends its chunk with no sample marked as valid.
    """
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


def _parts(message: np.ndarray, memory: SampleCache) -> tuple[np.ndarray, np.ndarray]:
    """Return views of a message: the images (n, H, W, C), and n bytes that mark the valid images."""
    count = len(message) // (1 + memory.image_bytes)
    return message[count:].reshape(count, *memory.shape[1:]), message[:count]


#: maximum fraction of a node's free memory for `auto`
AUTO_SHARE = 0.5
# Maximum fraction that may be configured.
_LARGEST_SHARE = 0.9
# Assumed free memory if the system does not report it.
_UNKNOWN_BYTES = 1 << 30


@dataclass(frozen=True)
class DataCache:
    """Cache levels of a job's data files.

    Attributes:
        counts: samples and bytes that this rank has read.
        notes: sentences on the kept samples, for the start of a run.
    """

    counts: ReadCounts
    notes: tuple[str, ...]


def add_caches(
    rank: StartedRank,
    config: CacheConfig,
    loaders: Sequence[Loader],
    *,
    auto_share: float = AUTO_SHARE,
    stop_requested: Callable[[], bool] = lambda: False,
) -> DataCache:
    """Put the configured cache levels between loaders and their files. Collective.

    Synthetic images are not cached, since generating one takes no longer than copying it.

    Args:
        loaders: loaders in order of priority if memory is short. Loaders of one file share its cache.
        auto_share: fraction of a node's free memory that `auto` may use.
        stop_requested: function that returns whether this rank was asked to stop; filling memory then ends early.
    """
    counts, node = ReadCounts(), rank.grid.node
    budget, shortage = _budget(node, config, auto_share)
    by_reader = {id(loader.file.pixels): loader for loader in reversed(loaders)}  # the first loader of each file
    files = [loader for loader in loaders if loader in by_reader.values() and isinstance(loader.file.pixels, BlockReader)]
    kept: list[KeptSamples] = []
    caches: list[SampleCache] = []
    for loader in files:
        cache, of_file = _cache(node, loader.file, config, budget, counts)
        loader.read_through(cache)
        caches.append(cache)
        budget -= of_file.memory_bytes * (node.size if of_file.denied else 1)
        kept.append(of_file)
    for loader in loaders:
        loader.read_through(by_reader[id(loader.file.pixels)].pixels)
    of_ranks = rank.world.allgather_object(kept)
    least = [min(of_file, key=lambda kept: (kept.covered, kept.memory)) for of_file in zip(*of_ranks, strict=True)]
    off = config.memory == 0 and config.local is None
    notes = [text for loader, of_file in zip(files, least, strict=True) for text in sentences(loader.file, of_file) if not off]
    if config.fill == "start" or (config.fill == "auto" and len(set(rank.grid.node_of)) > 1):
        notes += [
            note
            for loader, cache in zip(files, caches, strict=True)
            for note in _filled(rank, loader.file, cache, stop_requested)
        ]
    return DataCache(counts, (*((shortage,) if shortage else ()), *dict.fromkeys(notes)))


def _filled(rank: StartedRank, file: ImageFile, cache: SampleCache, stop_requested: Callable[[], bool]) -> Iterator[str]:
    """Fill the memory of all nodes, and yield a sentence on it. Collective.

    Raises:
        DataError: as for `fill`.
    """
    if not all(rank.world.allgather_object(cache.held)):  # on some node there is no room for a single sample
        return
    begun = time.perf_counter()
    samples = fill(rank, cache, shared=cache.is_shared, stop_requested=stop_requested)
    seconds = time.perf_counter() - begun
    if samples:
        yield f"data {file.path}: memory was filled with {samples:,} samples in {seconds:.1f} s, each read once by the job"


def _budget(node: Communicator, config: CacheConfig, auto_share: float) -> tuple[int, str]:
    """Return the bytes of this node's memory for samples, and why they are fewer than configured; "" if they are not."""
    free = node.broadcast_object(available_bytes() if node.rank == 0 else None)
    if config.memory == AUTO_SIZE:
        return (_UNKNOWN_BYTES if free is None else int(auto_share * free)), ""
    most = config.memory if free is None else int(_LARGEST_SHARE * free)
    if config.memory <= most:
        return config.memory, ""
    return (
        most,
        f"data.cache.memory is {size_text(config.memory)}, but a node has {size_text(free)} free, of which at most 90 % may "
        "be used",
    )


def _cache(
    node: Communicator, file: ImageFile, config: CacheConfig, budget: int, counts: ReadCounts
) -> tuple[SampleCache, KeptSamples]:
    """Return the cache over a file, and its kept samples. Collective."""
    assert isinstance(file.pixels, BlockReader)
    samples, image_bytes = len(file), int(np.prod(file.shape))
    held = held_in(budget, samples, image_bytes)
    copy, denied = None, ""
    if config.local is not None and held < samples:
        from hpctrain.data.local_copy import open_local

        local = open_local(node, file, config.local, None if config.local_limit == AUTO_SIZE else config.local_limit, held)
        copy, denied = local.copy, local.denied
    if held or copy is not None:
        file.pixels.reads_by_calls()
    kept = KeptSamples(local_denied=denied)
    if copy is not None:
        kept = replace(kept, local_first=copy.first, local=copy.count, local_bytes=copy.count * copy.sample_bytes)
    if not held:
        return SampleCache(file.pixels, counts, copy=copy), kept
    memory_bytes, place = bytes_for(held, image_bytes), NodeRank(node.rank, node.size)
    memory = share(node, memory_bytes)
    if memory.denied:  # the array is allocated anyway: untouched pages occupy no memory
        held, place = held_in(budget // node.size, samples, image_bytes), ALONE
        memory_bytes = bytes_for(held, image_bytes)
    kept = replace(kept, memory=held, memory_bytes=memory_bytes, denied=memory.denied)
    return SampleCache(file.pixels, counts, memory, held, place, copy=copy), kept
