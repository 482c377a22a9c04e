"""The levels between a job's data files and its loaders: which samples are kept where, and what is said of it at the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ValidationError

from hpctrain.comm.base import Communicator
from hpctrain.comm.shared_memory import share
from hpctrain.config.data_section import CacheConfig
from hpctrain.config.size import AUTO
from hpctrain.data.readers import BlockReader
from hpctrain.data.image_file import ImageFile, ReadImages
from hpctrain.data.loader import Loader
from hpctrain.data.read_counts import CountedImages, ReadCounts
from hpctrain.data.cache import ALONE, NodeRank, SampleMemory, bytes_for, held_in
from hpctrain.core.errors import ConfigError
from hpctrain.experiment.kept_samples import KeptSamples, sentences
from hpctrain.job.session import StartedRank
from hpctrain.launch.available_memory import available_bytes
from hpctrain.core.sentences import rule

if TYPE_CHECKING:  # loaded where there are local copies only: each module is a file that every rank opens at its start
    from hpctrain.data.local_file import LocalFile

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
    """The section `data.cache` as a program writes it.

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

    Made-up images are left as they are: to make one takes no longer than to copy it.

    Args:
        loaders: in the order in which they are served where memory is short. auto_share: of the free memory of a node.
        stop_requested: this rank was asked to stop; memory is not filled any further then.
    """
    counts, node = ReadCounts(), rank.grid.node
    budget, shortage = _budget(node, config, auto_share)
    files = [loader for loader in loaders if isinstance(loader.file.pixels, BlockReader)]
    kept: list[KeptSamples] = []
    levels: list[ReadImages] = []
    local_files: list[LocalFile] = []
    for loader in files:
        level, of_file, local = _levels(node, loader.file, config, budget, counts)
        loader.read_through(level)
        levels.append(level)
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
            for loader, level in zip(files, levels, strict=True)
            for note in _filled(rank, loader.file, level, stop_requested)
        ]
    return DataCache(counts, (*((shortage,) if shortage else ()), *dict.fromkeys(notes)), tuple(local_files))


def _filled(rank: StartedRank, file: ImageFile, level: ReadImages, stop_requested: Callable[[], bool]) -> Iterator[str]:
    """Fill the memory of all nodes, and say so. Collective.

    Raises:
        DataError: as `fill`.
    """
    from hpctrain.experiment.memory_filling import fill  # which jobs of one node do without

    memory = level if isinstance(level, SampleMemory) else None
    if not all(rank.world.allgather_object(memory is not None)):  # on some node there is no room for a single sample
        return
    assert memory is not None
    begun = time.perf_counter()
    samples = fill(rank, memory, shared=memory.is_shared, stop_requested=stop_requested)
    seconds = time.perf_counter() - begun
    if samples:
        yield f"data {file.path}: memory was filled with {samples:,} samples in {seconds:.1f} s, each read once by the job"


def _budget(node: Communicator, config: CacheConfig, auto_share: float) -> tuple[int, str]:
    """The bytes that samples may take of this node's memory; and why that is less than was asked for, if it is."""
    free = node.broadcast_object(available_bytes() if node.rank == 0 else None)
    if config.memory == AUTO:
        return (_UNKNOWN_BYTES if free is None else int(auto_share * free)), ""
    most = config.memory if free is None else int(_LARGEST_SHARE * free)
    if config.memory <= most:
        return config.memory, ""
    return (
        most,
        f"data.cache.memory is {config.memory / 1e9:.3g} GB, but a node has {free / 1e9:.3g} GB free, of which 90 % count",
    )


def _levels(
    node: Communicator, file: ImageFile, config: CacheConfig, budget: int, counts: ReadCounts
) -> tuple[ReadImages, KeptSamples, LocalFile | None]:
    """The images of a file through its levels, what of them is kept, and the local copy, if there is one. Collective."""
    assert isinstance(file.pixels, BlockReader)
    samples, image_bytes = len(file), int(np.prod(file.shape))
    held = held_in(budget, samples, image_bytes)
    level: ReadImages = CountedImages(file.pixels, counts)
    local = _local(node, file, config, held)
    copy = None if local is None else local.copy
    if held or copy is not None:
        file.pixels.reads_by_calls()
    kept = KeptSamples(local_denied="" if local is None else local.denied)
    if local is not None and copy is not None:
        from hpctrain.data.local_copy import LocalSamples

        level = LocalSamples(level, copy, counts)
        kept = replace(kept, local_first=copy.first, local=copy.count, local_bytes=local.n_bytes, found=local.found)
    if not held:
        return level, kept, local
    memory_bytes, place = bytes_for(held, image_bytes), NodeRank(node.rank, node.size)
    memory = share(node, memory_bytes)
    if memory.denied:  # pages that are not touched take no memory
        held, place = held_in(budget // node.size, samples, image_bytes), ALONE
    kept = replace(kept, memory=held, memory_bytes=memory_bytes, denied=memory.denied)
    return SampleMemory(level, memory, held, counts, place), kept, local


def _local(node: Communicator, file: ImageFile, config: CacheConfig, held: int) -> LocalFile | None:
    """The local copy of what memory does not hold, or of all samples where a later run may take them. Collective."""
    if config.local is None or (held == len(file) and not config.keep):
        return None
    from hpctrain.data.local_file import LocalRequest, open_local

    limit = None if config.local_limit == AUTO else config.local_limit
    return open_local(node, file, LocalRequest(config.local, limit, 0 if config.keep else held, config.keep))
