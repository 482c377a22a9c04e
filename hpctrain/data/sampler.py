"""The samples of a step, their order, and the partners that they are mixed with.

All of it is a pure function of (seed, epoch, place in the epoch): the same on every rank and after every restart. Mixup and
cutmix mix images of a step with those of the same step in the opposite order, as timm does it by batch. A sample's partner
follows from its place in the step over all ranks: any number of ranks mixes the same images, whichever part of them each
reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpctrain.backend import counter_random
from hpctrain.core.errors import ConfigError, DataError
from hpctrain.core.intervals import Box, even, relative, size_of


def counts(samples: int, ranks: int, split_size: int = 1, shards: int | None = None) -> tuple[int, ...]:
    """Return `samples` over `ranks` as evenly as possible, larger shares first; zeros if there are fewer samples than ranks.

    split_size: neighbouring ranks that form a split group and work on each other's samples: the groups get even shares first,
        then the ranks of each group.
    shards: a multiple of `ranks`: the samples are divided over this many shards, and each rank has as many neighbouring ones;
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


class Reordering(NamedTuple):
    """From sample `first` of an epoch on, and in all epochs after it, samples come in the `number`-th other order."""

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
        """Follow these reorderings, in the order in which they arose, and no others. No epoch may be in progress."""
        self._reorderings, self._cached = tuple(reorderings), None

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a whole epoch, the short one included."""
        return self.steps()

    def steps(self, first: int = 0) -> int:
        """Return the batches of an epoch from its sample `first` on, the short one included; 0 if none is left."""
        return max(0, -(-(self.samples - first) // self.batch))

    def global_count(self, step: int, first: int = 0) -> int:
        """Return the samples of one step over all ranks; the steps begin at the epoch's sample `first`."""
        return max(0, min(self.batch, self.samples - first - step * self.batch))

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return all sample ids in the order of an epoch, (samples,) int64, read-only. The latest epoch's are kept."""
        cached = self._cached
        if cached is None or cached[0] != epoch:
            order = self._reordered(epoch) if self.shuffle else np.arange(self.samples, dtype=np.int64)
            order.flags.writeable = False
            cached = self._cached = (epoch, order)
        return cached[1]

    def ids(self, epoch: int, step: int, first: int = 0) -> NDArray[np.int64]:
        """Return the sample ids of one global batch, (global_count(step, first),) int64, a read-only view."""
        assert 0 <= step < self.steps(first), f"step {step} of {self.steps(first)} from sample {first}"
        begin = first + step * self.batch
        return self.order(epoch)[begin : begin + self.batch]

    def _reordered(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of an epoch: that of the last reordering before it, and from some samples on those within it."""
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


#: above it a Beta distribution would take too many tries to draw from, and mixes nearly by halves
MOST_ALPHA = 4.0

_UNIFORMS_AT_ONCE = 64


@dataclass(frozen=True)
class Mix:
    """The mixing of one step.

    weight: share of a sample's own label, in [0, 1], and with mixup of its image. box: with cutmix, the vertical and the
    horizontal interval that are cut from the partner's image; None: mixup.
    """

    weight: float
    box: Box | None = None

    def apply(self, images: np.ndarray, partners: np.ndarray, region: Box) -> None:
        """Mix `partners`, which is overwritten, into `images`: both hold `region` of each image, (N, h, w, C)."""
        if self.box is None:
            images *= images.dtype.type(self.weight)
            partners *= images.dtype.type(1.0 - self.weight)
            images += partners
            return
        bounds = [(max(a, start), min(b, stop)) for (a, b), (start, stop) in zip(self.box, region, strict=True)]
        if all(start < stop for start, stop in bounds):
            inside = tuple(bounds)
            rows, columns = relative(inside, region)
            images[:, rows, columns] = partners[:, rows, columns]


@dataclass(frozen=True)
class Mixing:
    """How images of a step are mixed.

    mixup: w ~ Beta(mixup, mixup); images and labels are w of their own and 1 - w of the partner's (Zhang et al., ICLR 2018).
    cutmix: w ~ Beta(cutmix, cutmix); a box of 1 - w of the area, clipped at the borders, is cut from the partner's image; labels
    follow from the area that is really cut (Yun et al., ICCV 2019). 0 switches either off; with both one of them is drawn.

    Args:
        mixup, cutmix: the alphas, in [0, MOST_ALPHA]. probability: share of steps that are mixed. switch: of these, share that
            takes cutmix where both are on. seed: of what is drawn.

    Raises:
        ConfigError: a value outside its range.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix", "probability", "switch"):
            value, most = getattr(self, name), MOST_ALPHA if name in ("mixup", "cutmix") else 1.0
            if not 0.0 <= value <= most:
                legal = 0.0 if not value >= 0.0 else most
                raise ConfigError(f"mixing.{name} {value} is outside [0, {most:g}]; the nearest legal value is {legal:g}.")

    @property
    def mixes(self) -> bool:
        """True if any step may be mixed."""
        return (self.mixup > 0 or self.cutmix > 0) and self.probability > 0

    def draw(self, epoch: int, first: int, height: int, width: int) -> Mix | None:
        """Return the mixing of the step that begins with the epoch's sample `first`; None if it is not mixed.

        Args:
            height, width: of the images that come out of the pipeline.
        """
        uniforms = _uniforms(counter_random.key("mixing", self.seed, epoch), first)
        if next(uniforms) >= self.probability or not (self.mixup or self.cutmix):
            return None
        takes_cutmix = next(uniforms) < (self.switch if self.mixup and self.cutmix else float(not self.mixup))
        place = next(uniforms), next(uniforms)
        weight = _beta(self.cutmix if takes_cutmix else self.mixup, uniforms)
        if not takes_cutmix:
            return Mix(weight)
        box = _box(weight, place, (height, width))
        return Mix(1.0 - size_of(box) / (height * width), box)


def _box(weight: float, place: tuple[float, float], size: tuple[int, int]) -> Box:
    """Return a clipped box of 1 - weight of the area around a place that is uniform over the image; timm's rand_bbox."""
    ratio = (1.0 - weight) ** 0.5
    intervals = []
    for u, length in zip(place, size, strict=True):
        cut, centre = int(length * ratio), int(u * length)
        intervals.append((max(0, centre - cut // 2), min(length, centre + cut // 2)))
    return tuple(intervals)


def _beta(alpha: float, uniforms: Iterator[float]) -> float:
    """Draw from Beta(alpha, alpha), by the method of Joehnk (1964)."""
    while True:
        x, y = next(uniforms) ** (1.0 / alpha), next(uniforms) ** (1.0 / alpha)
        if 0.0 < x + y <= 1.0:
            return float(x / (x + y))


def _uniforms(stream: counter_random.Key, sample: int) -> Iterator[float]:
    """Yield numbers in [0, 1), without end."""
    begin = 0
    while True:
        indices = range(begin, begin + _UNIFORMS_AT_ONCE)
        yield from counter_random.uniform(stream, np.array([sample]), indices)[0].tolist()
        begin += _UNIFORMS_AT_ONCE
