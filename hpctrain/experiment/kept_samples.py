"""The samples of a data file that are kept at each level, in plain data and in sentences for the start of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.data.image_file import ImageFile


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
    """The levels of a file, a sentence each."""
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
