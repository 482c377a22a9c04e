"""The levels between a job's data files and its loaders: which samples are kept where, and what is said of it at the start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from hpctrain.comm.base import Communicator
from hpctrain.comm.shared_memory import share
from hpctrain.config.data_section import CacheConfig
from hpctrain.config.size import AUTO
from hpctrain.data.format import ImageArray, ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.mapped_reader import MappedReader
from hpctrain.data.read_counts import CountedImages, ReadCounts
from hpctrain.data.sample_memory import ALONE, Place, SampleMemory, bytes_for, held_in
from hpctrain.errors import ConfigError
from hpctrain.experiment.session import StartedRank
from hpctrain.launch.available_memory import available_bytes
from hpctrain.rules import rule

#: of the free memory of a node, that `auto` takes at most
AUTO_SHARE = 0.5
# That may be asked for.
_LARGEST_SHARE = 0.9
# Where nothing tells how much is free.
_UNKNOWN_BYTES = 1 << 30


@dataclass(frozen=True)
class Kept:
    """What is kept of a file: samples of it, in so many bytes of a node. denied: why ranks do not share them, if they do not."""

    samples: int = 0
    n_bytes: int = 0
    denied: str = ""


@dataclass(frozen=True)
class DataCache:
    """The levels of a job's data files.

    Attributes:
        counts: of this rank. notes: sentences on what is kept, for the start of a run.
    """

    counts: ReadCounts
    notes: tuple[str, ...]


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
    rank: StartedRank, config: CacheConfig, loaders: Sequence[Loader], *, auto_share: float = AUTO_SHARE
) -> DataCache:
    """Put the configured levels between loaders and their files. Collective.

    Made-up images are left as they are: to make one takes no longer than to copy it.

    Args:
        loaders: in the order in which they are served where memory is short. auto_share: of the free memory of a node.
    """
    counts, node = ReadCounts(), rank.grid.node
    budget, shortage = _budget(node, config, auto_share)
    files = [loader for loader in loaders if isinstance(loader.file.pixels, MappedReader)]
    kept: list[Kept] = []
    for loader in files:
        level, of_file = _level(node, loader.file, budget, counts)
        loader.read_through(level)
        budget -= of_file.n_bytes
        kept.append(of_file)
    of_ranks = rank.world.allgather_object(kept)
    least = [min(of_file, key=lambda kept: kept.samples) for of_file in zip(*of_ranks, strict=True)]
    notes = [_note(loader.file, of_file) for loader, of_file in zip(files, least, strict=True) if config.memory]
    return DataCache(counts, (*((shortage,) if shortage else ()), *dict.fromkeys(notes)))


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


def _level(node: Communicator, file: ImageFile, budget: int, counts: ReadCounts) -> tuple[ImageArray, Kept]:
    """The images of a file through memory, and what of them is kept there. Collective."""
    assert isinstance(file.pixels, MappedReader)
    samples, image_bytes = len(file), int(np.prod(file.shape))
    source, held = CountedImages(file.pixels, counts), held_in(budget, samples, image_bytes)
    if not held:
        return source, Kept()
    file.pixels.reads_by_calls()
    memory = share(node, bytes_for(held, image_bytes))
    place, kept_bytes = Place(node.rank, node.size), bytes_for(held, image_bytes)
    if memory.denied:  # pages that are not touched take no memory
        held, place = held_in(budget // node.size, samples, image_bytes), ALONE
    return SampleMemory(source, memory, held, counts, place), Kept(held, kept_bytes, memory.denied)


def _note(file: ImageFile, kept: Kept) -> str:
    """What is kept of a file, in a sentence."""
    share_of_all = f"{math.floor(100 * kept.samples / len(file))} % of the samples stay"
    which = "all samples stay" if kept.samples == len(file) else share_of_all
    rest = "" if kept.samples == len(file) else ", the others are read again in each epoch"
    where = "in memory of each node"
    if kept.denied:
        where = f"in memory of each rank, as the ranks of a node cannot share it ({kept.denied})"
    return f"data {file.path}: {which} {where} ({kept.n_bytes / 1e9:.3g} GB){rest}"
