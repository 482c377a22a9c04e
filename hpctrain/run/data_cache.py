"""The levels between a job's data files and its loaders: which samples are kept where, and the sentences on it at the start.

Memory of the nodes may be filled before the first step: each sample is read once by the job and sent to the other nodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ValidationError

from hpctrain.comm.base import Communicator, Handle, raise_on_all_ranks
from hpctrain.comm.shared_memory import share
from hpctrain.config.schema import CacheConfig
from hpctrain.config.values import AUTO_SIZE
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.core.text import rule
from hpctrain.data.cache import ALONE, FillingPlan, NodeRank, ReadCounts, SampleCache, bytes_for, held_in
from hpctrain.data.image_file import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.readers import BlockReader
from hpctrain.job.session import StartedRank
from hpctrain.launch.control_groups import available_bytes

if TYPE_CHECKING:
    from hpctrain.data.local_copy import LocalFile


@dataclass(frozen=True)
class KeptSamples:
    """The samples of a file that a node keeps.

    Attributes:
        memory, memory_bytes: samples from the first on. denied: why ranks do not share that memory; empty: they do.
        local_first, local, local_bytes: samples of the local copy. found: of them, those that an earlier run has left.
        local_denied: why there is no such copy, or a smaller one than asked for; empty: neither.
    """

    memory: int = 0
    memory_bytes: int = 0
    denied: str = ""
    local_first: int = 0
    local: int = 0
    local_bytes: int = 0
    found: int = 0
    local_denied: str = ""

    @property
    def covered(self) -> int:
        """Samples that the data file is read for once."""
        return max(self.memory, self.local_first + self.local if self.local_first <= self.memory else 0)


def sentences(file: ImageFile, kept: KeptSamples) -> Iterator[str]:
    """Yield the levels of a file, a sentence each."""
    again = ", the others are read again in each epoch" if kept.covered < len(file) else ""
    if kept.memory:
        where = "in memory of each node"
        if kept.denied:
            where = f"in memory of each rank, as the ranks of a node cannot share it ({kept.denied})"
        size = f"({kept.memory_bytes / 1e9:.3g} GB)"
        yield f"data {file.path}: {_part(kept.memory, file)} stay {where} {size}{'' if kept.local else again}"
    if kept.local:
        size = f"({kept.local_bytes / 1e9:.3g} GB)"
        found = f", {kept.found:,} of them from an earlier run" if kept.found else ""
        short = f", as {kept.local_denied}" if kept.local_denied else ""
        yield f"data {file.path}: {_part(kept.local, file)} stay in a local copy on each node {size}{found}{short}{again}"
    elif kept.local_denied:
        yield f"data {file.path}: there is no local copy, as {kept.local_denied}"
    if not kept.memory and not kept.local:
        yield f"data {file.path}: no sample stays in memory of a node, all are read again in each epoch"


def _part(samples: int, file: ImageFile) -> str:
    return "all samples" if samples == len(file) else f"{math.floor(100 * samples / len(file))} % of the samples"


# Of a chunk, and what a rank receives in a round.
_CHUNK_BYTES = 4 << 20
_RECEIVED_BYTES = 64 << 20
_TAG = 411


def fill(rank: StartedRank, memory: SampleCache, *, shared: bool, stop_requested: Callable[[], bool] = lambda: False) -> int:
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
    """Return whether `ends` is true on some rank. Collective."""
    count = np.array([bool(ends)], np.int64)
    rank.progress.wait_handle(rank.world.iallreduce(count), "whether memory is filled on")
    return bool(count[0])


def _plan(rank: StartedRank, memory: SampleCache, *, shared: bool) -> FillingPlan:
    """Plan who sends what: memories are numbered by node, then those that a rank has by itself."""
    world = rank.world
    mark = rank.grid.node_of[world.rank] if shared else world.size + world.rank
    of_ranks = world.allgather_object((memory.held, mark))
    marks = sorted({mark for _, mark in of_ranks})
    at_once = min(_CHUNK_BYTES, _RECEIVED_BYTES // len(marks)) // memory.image_bytes
    return FillingPlan(min(held for held, _ in of_ranks), max(1, at_once), tuple(marks.index(mark) for _, mark in of_ranks))


def _round(rank: StartedRank, memory: SampleCache, plan: FillingPlan, turn: int, errors: list[HpctrainError]) -> None:
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


def _parts(message: np.ndarray, memory: SampleCache) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (n, H, W, C) of a message, and a byte for each that says whether it counts."""
    count = len(message) // (1 + memory.image_bytes)
    return message[count:].reshape(count, *memory.shape[1:]), message[:count]


#: of the free memory of a node, that `auto` takes at most
AUTO_SHARE = 0.5
# That may be asked for.
_LARGEST_SHARE = 0.9
# Where nothing tells how much is free.
_UNKNOWN_BYTES = 1 << 30


@dataclass(frozen=True)
class DataCache:
    """The levels of a job's data files.

    Attributes:
        counts: of this rank. notes: sentences on what is kept, for the start of a run.
        local_files: that this rank is to leave for a later run.
    """

    counts: ReadCounts
    notes: tuple[str, ...]
    local_files: tuple[LocalFile, ...] = ()

    def keep(self) -> None:
        """Leave local copies for a later run, where that is asked for. Once all ranks have read; not collective."""
        for local in self.local_files:
            local.keep()


def cache_of(value: object) -> CacheConfig:
    """Return the section `data.cache` as a program writes it.

    Raises:
        ConfigError: a key that there is not, or a value that is not taken.
    """
    try:
        return CacheConfig.model_validate(value)
    except ValidationError as error:
        fault = error.errors()[0]
        key = str(fault["loc"][0]) if fault["loc"] else ""
        broken = f"there is no key {key!r}" if fault["type"] == "extra_forbidden" else f"{key or 'it'} {rule(fault)}"
        raise ConfigError(
            f"cache is {value!r}, but {broken}; give true, false, or a mapping with {', '.join(CacheConfig.model_fields)}."
        ) from error


def give_levels(
    rank: StartedRank,
    config: CacheConfig,
    loaders: Sequence[Loader],
    *,
    auto_share: float = AUTO_SHARE,
    stop_requested: Callable[[], bool] = lambda: False,
) -> DataCache:
    """Put the configured levels between loaders and their files. Collective.

    Synthetic images are left as they are: to make one takes no longer than to copy it.

    Args:
        loaders: in the order in which they are served where memory is short. auto_share: of the free memory of a node.
        stop_requested: this rank was asked to stop; memory is not filled any further then.
    """
    counts, node = ReadCounts(), rank.grid.node
    budget, shortage = _budget(node, config, auto_share)
    files = [loader for loader in loaders if isinstance(loader.file.pixels, BlockReader)]
    kept: list[KeptSamples] = []
    caches: list[SampleCache] = []
    local_files: list[LocalFile] = []
    for loader in files:
        cache, of_file, local = _cache(node, loader.file, config, budget, counts)
        loader.read_through(cache)
        caches.append(cache)
        budget -= of_file.memory_bytes
        kept.append(of_file)
        local_files += [local] if local is not None and node.rank == 0 else []
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
    return DataCache(counts, (*((shortage,) if shortage else ()), *dict.fromkeys(notes)), tuple(local_files))


def _filled(rank: StartedRank, file: ImageFile, cache: SampleCache, stop_requested: Callable[[], bool]) -> Iterator[str]:
    """Fill the memory of all nodes, and say so. Collective.

    Raises:
        DataError: as `fill`.
    """
    if not all(rank.world.allgather_object(cache.held)):  # on some node there is no room for a single sample
        return
    begun = time.perf_counter()
    samples = fill(rank, cache, shared=cache.is_shared, stop_requested=stop_requested)
    seconds = time.perf_counter() - begun
    if samples:
        yield f"data {file.path}: memory was filled with {samples:,} samples in {seconds:.1f} s, each read once by the job"


def _budget(node: Communicator, config: CacheConfig, auto_share: float) -> tuple[int, str]:
    """Return the bytes that samples may take of this node's memory; and why that is less than was asked for, if it is."""
    free = node.broadcast_object(available_bytes() if node.rank == 0 else None)
    if config.memory == AUTO_SIZE:
        return (_UNKNOWN_BYTES if free is None else int(auto_share * free)), ""
    most = config.memory if free is None else int(_LARGEST_SHARE * free)
    if config.memory <= most:
        return config.memory, ""
    return (
        most,
        f"data.cache.memory is {config.memory / 1e9:.3g} GB, but a node has {free / 1e9:.3g} GB free, of which 90 % count",
    )


def _cache(
    node: Communicator, file: ImageFile, config: CacheConfig, budget: int, counts: ReadCounts
) -> tuple[SampleCache, KeptSamples, LocalFile | None]:
    """Return the cache over a file, what it keeps, and the local copy, if there is one. Collective."""
    assert isinstance(file.pixels, BlockReader)
    samples, image_bytes = len(file), int(np.prod(file.shape))
    held = held_in(budget, samples, image_bytes)
    local = _local(node, file, config, held)
    copy = None if local is None else local.copy
    if held or copy is not None:
        file.pixels.reads_by_calls()
    kept = KeptSamples(local_denied="" if local is None else local.denied)
    if local is not None and copy is not None:
        kept = replace(kept, local_first=copy.first, local=copy.count, local_bytes=local.n_bytes, found=local.found)
    if not held:
        return SampleCache(file.pixels, counts, copy=copy), kept, local
    memory_bytes, place = bytes_for(held, image_bytes), NodeRank(node.rank, node.size)
    memory = share(node, memory_bytes)
    if memory.denied:  # pages that are not touched take no memory
        held, place = held_in(budget // node.size, samples, image_bytes), ALONE
    kept = replace(kept, memory=held, memory_bytes=memory_bytes, denied=memory.denied)
    return SampleCache(file.pixels, counts, memory, held, place, copy=copy), kept, local


def _local(node: Communicator, file: ImageFile, config: CacheConfig, held: int) -> LocalFile | None:
    """Return the local copy of what memory does not hold, or of all samples where a later run may take them. Collective."""
    if config.local is None or (held == len(file) and not config.keep):
        return None
    from hpctrain.data.local_copy import LocalRequest, open_local

    limit = None if config.local_limit == AUTO_SIZE else config.local_limit
    return open_local(node, file, LocalRequest(config.local, limit, 0 if config.keep else held, config.keep))
