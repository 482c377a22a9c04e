"""A rank's share of a step in micro-batches, passes that follow one another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hpctrain.core.intervals import even
from hpctrain.data.loader import Share


@dataclass(frozen=True)
class MicroBatch:
    """One of a step's passes: the samples of each rank of the split group.

    shared: where they lie among the split group's samples. own: where this rank's lie among its own.
    """

    counts: tuple[int, ...]
    shared: slice | np.ndarray
    own: slice


def micro_batches_of(share: Share, micro_batches: int) -> Iterator[MicroBatch]:
    """A rank's share of a step in micro-batches; every rank of the split group makes the same ones."""
    sizes = [even(count, micro_batches) for count in share.counts]
    starts = [0] * len(share.counts)
    offsets = [sum(share.counts[:rank]) for rank in range(len(share.counts))]
    for number in range(micro_batches):
        counts = tuple(size[number] for size in sizes)
        runs = [range(offset + start, offset + start + n) for offset, start, n in zip(offsets, starts, counts, strict=True)]
        shared: slice | np.ndarray = slice(runs[0].start, runs[-1].stop)
        if micro_batches > 1 and len(runs) > 1:
            shared = np.concatenate([np.arange(run.start, run.stop) for run in runs])
        own = starts[share.split_rank]
        yield MicroBatch(counts, shared, slice(own, own + counts[share.split_rank]))
        starts = [start + n for start, n in zip(starts, counts, strict=True)]
