"""The samples of a step: a pure function of (seed, epoch, place in it), the same on every rank and after every restart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.backend import counter_random
from hpctrain.core.intervals import even
from hpctrain.core.errors import ConfigError, DataError


def counts(samples: int, ranks: int, split_size: int = 1, shards: int | None = None) -> tuple[int, ...]:
    """`samples` over `ranks` as evenly as possible, larger shares first; zeros where there are fewer samples than ranks.

    split_size: neighbouring ranks that form a split group and work on each other's samples: the groups get even shares first,
        then the ranks of each group.
    shards: a multiple of `ranks`: the samples are shared out over so many shards, and each rank has as many neighbouring ones;
        None: over the ranks themselves.
    """
    if shards is not None:
        assert split_size == 1, "shards are those of ranks that share no samples"
        per_rank = shards // ranks
        of_shards = even(samples, shards)
        return tuple(sum(of_shards[first : first + per_rank]) for first in range(0, shards, per_rank))
    if split_size > 1:
        groups = counts(samples, ranks // split_size)
        return tuple(count for of_group in groups for count in even(of_group, split_size))
    return even(samples, ranks)


def share_of(ids: NDArray[np.int64], rank: int, ranks: int, split_size: int = 1, shards: int | None = None) -> NDArray[np.int64]:
    """The contiguous share of one rank, as long as `counts` says; a view."""
    of_all_ranks = counts(len(ids), ranks, split_size, shards)
    start = sum(of_all_ranks[:rank])
    return ids[start : start + of_all_ranks[rank]]


class Reordering(NamedTuple):
    """From sample `first` of an epoch on, and in all epochs behind it, samples come in the `number`-th other order."""

    epoch: int
    first: int
    number: int


class Sampler:
    """Global batches of an epoch: every sample exactly once, the last batch short where `batch` does not divide.

    The order of an epoch does not depend on the batch. So a run that has seen its first samples can take the rest in batches of
    any size: steps are counted from the sample `first`.

    Where a run has gone back and takes another order, the samples of an epoch that were seen before stay where they are, and the
    rest of them is ordered again: each is still there once.

    Args:
        samples: size of the data set.
        batch: samples of a step over all ranks.
        seed: of the order; another epoch has another order.
        shuffle: False for evaluation: samples in file order.

    Raises:
        DataError: no samples. ConfigError: a batch below 1.
    """

    def __init__(self, samples: int, batch: int, seed: int = 0, shuffle: bool = True) -> None:
        if samples < 1:
            raise DataError(f"A data set of {samples} samples cannot be trained on; at least 1 is needed.")
        if batch < 1:
            raise ConfigError(f"A batch of {batch} samples is not possible; the smallest is 1.")
        self.samples = samples
        self.batch = batch
        self.seed = seed
        self.shuffle = shuffle
        self._reorderings: tuple[Reordering, ...] = ()
        self._cached: tuple[int, NDArray[np.int64]] | None = None

    def reorder(self, reorderings: Iterable[Reordering]) -> None:
        """Follow these from now on, and no others; in the order in which they came to be. While nobody reads."""
        self._reorderings, self._cached = tuple(reorderings), None

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a whole epoch, the short one included."""
        return self.steps()

    def steps(self, first: int = 0) -> int:
        """Batches of an epoch from its sample `first` on, the short one included; 0 where none is left."""
        return max(0, -(-(self.samples - first) // self.batch))

    def global_count(self, step: int, first: int = 0) -> int:
        """Samples of one step over all ranks; the steps begin at the epoch's sample `first`."""
        return max(0, min(self.batch, self.samples - first - step * self.batch))

    def order(self, epoch: int) -> NDArray[np.int64]:
        """All sample ids in the order of an epoch, (samples,) int64, read-only. The latest epoch's is kept."""
        cached = self._cached
        if cached is None or cached[0] != epoch:
            order = self._reordered(epoch) if self.shuffle else np.arange(self.samples, dtype=np.int64)
            order.flags.writeable = False
            cached = self._cached = (epoch, order)
        return cached[1]

    def ids(self, epoch: int, step: int, first: int = 0) -> NDArray[np.int64]:
        """Sample ids of one global batch, (global_count(step, first),) int64, a read-only view."""
        assert 0 <= step < self.steps(first), f"step {step} of {self.steps(first)} from sample {first}"
        begin = first + step * self.batch
        return self.order(epoch)[begin : begin + self.batch]

    def _reordered(self, epoch: int) -> NDArray[np.int64]:
        """The order of an epoch: that of the last reordering before it, and from some samples on those of it."""
        before = [change.number for change in self._reorderings if change.epoch < epoch]
        order = self._shuffled(epoch, *before[-1:])
        for change in self._reorderings:
            if change.epoch == epoch:
                rest = self._shuffled(epoch, change.number)
                order[change.first :] = rest[np.isin(rest, order[change.first :])]
        return order

    def _shuffled(self, epoch: int, *number: int) -> NDArray[np.int64]:
        # Sorting 64-bit random words, not a generator's permutation: NumPy may change that one between versions.
        stream = counter_random.key("sampler", self.seed, epoch, *number)
        words = counter_random.words(stream, np.zeros(1, np.int64), range(2 * self.samples))
        keys = words.reshape(self.samples, 2).astype(np.uint64) @ np.array([1 << 32, 1], np.uint64)
        return np.argsort(keys, kind="stable").astype(np.int64, copy=False)
