"""The samples of a step, their order, their partners in mixup and cutmix, and the samples held out for validation.

Order and partners are pure functions of (seed, epoch, place in the epoch). The held-out samples are a pure function of (labels,
amount, seed). All are equal on every rank and after every restart. Mixup and cutmix mix the images of a step with the same images
in reverse order, as timm does for a batch. The partner of a sample depends on its place in the step over all ranks, so any number
of ranks mixes the same pairs.
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
    """Return the number of samples of each rank, as even as possible, larger numbers first.

    If there are fewer samples than ranks, some ranks receive none.

    Args:
        split_size: number of neighbouring ranks that form a split group and work on each other's samples. Samples are divided
            evenly over the groups, then over the ranks of each group.
        shards: number of shards over which the samples are divided, a multiple of `ranks`; each rank has an equal number of
            neighbouring shards. None: the samples are divided over the ranks.
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
    """Change of the sample order: order `number` holds from sample `first` of epoch `epoch` on, and in all later epochs."""

    epoch: int
    first: int
    number: int


class Sampler:
    """Global batches of an epoch. Each sample occurs exactly once. The last batch may be smaller.

    The order of an epoch does not depend on the batch. Therefore a run that has processed the first samples can process the
    remaining ones in batches of any size: steps are counted from the sample `first`.

    If a run goes back and changes the order within an epoch, the samples already processed keep their places and the remaining
    ones are reordered, so each sample still occurs once.

    Args:
        samples: size of the data set.
        batch: number of samples of a step over all ranks.
        seed: seed of the order, which differs between epochs.
        shuffle: whether to shuffle; False: file order, for evaluation.
        subset: (samples,) int64, ids of the samples in file order; None: 0 to samples - 1.

    Raises:
        DataError: there are no samples.
        ConfigError: the batch is below 1.
    """

    def __init__(
        self, samples: int, batch: int, seed: int = 0, shuffle: bool = True, subset: NDArray[np.int64] | None = None
    ) -> None:
        assert subset is None or len(subset) == samples, f"{samples} samples"
        if samples < 1:
            raise DataError(f"A data set of {samples} samples cannot be used for training; at least 1 is needed.")
        if batch < 1:
            raise ConfigError(f"A batch of {batch} samples is not possible; the smallest is 1.")
        self.samples = samples
        self.batch = batch
        self.seed = seed
        self.shuffle = shuffle
        self.subset = subset
        self._reorderings: tuple[Reordering, ...] = ()
        self._cached: tuple[int, NDArray[np.int64]] | None = None

    def reorder(self, reorderings: Iterable[Reordering]) -> None:
        """Replace the reorderings. They must be in the order in which they were made, and no epoch may be in progress."""
        self._reorderings, self._cached = tuple(reorderings), None

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of a whole epoch, including a smaller last one."""
        return self.steps()

    def steps(self, first: int = 0) -> int:
        """Return the number of batches of an epoch from its sample `first`, including a smaller last one; 0 if none is left."""
        return max(0, -(-(self.samples - first) // self.batch))

    def global_count(self, step: int, first: int = 0) -> int:
        """Return the number of samples of one step over all ranks. Steps are counted from the epoch's sample `first`."""
        return max(0, min(self.batch, self.samples - first - step * self.batch))

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return all sample ids in the order of an epoch, (samples,) int64, read-only. The latest epoch's order is cached."""
        cached = self._cached
        if cached is None or cached[0] != epoch:
            order = self._reordered(epoch) if self.shuffle else np.arange(self.samples, dtype=np.int64)
            order = order if self.subset is None else self.subset[order]
            order.flags.writeable = False
            cached = self._cached = (epoch, order)
        return cached[1]

    def ids(self, epoch: int, step: int, first: int = 0) -> NDArray[np.int64]:
        """Return the sample ids of one global batch, (global_count(step, first),) int64, a read-only view."""
        assert 0 <= step < self.steps(first), f"step {step} of {self.steps(first)} from sample {first}"
        begin = first + step * self.batch
        return self.order(epoch)[begin : begin + self.batch]

    def _reordered(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of an epoch: the order that holds at its beginning, with the reorderings within it applied."""
        before = [change.number for change in self._reorderings if change.epoch < epoch]
        order = self._shuffled(epoch, *before[-1:])
        for change in self._reorderings:
            if change.epoch == epoch:
                rest = self._shuffled(epoch, change.number)
                order[change.first :] = rest[np.isin(rest, order[change.first :])]
        return order

    def _shuffled(self, epoch: int, *number: int) -> NDArray[np.int64]:
        keys = _sort_keys(counter_random.key("sampler", self.seed, epoch, *number), self.samples)
        return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def _sort_keys(stream: counter_random.Key, samples: int) -> NDArray[np.uint64]:
    """Return random numbers to sort samples by. NumPy's permutation may change between versions."""
    words = counter_random.words(stream, np.zeros(1, np.int64), range(2 * samples))
    keys: NDArray[np.uint64] = words.reshape(samples, 2).astype(np.uint64) @ np.array([1 << 32, 1], np.uint64)
    return keys


class ValidationSplit(NamedTuple):
    """Numbers of the samples of a file that are trained on and that are held out for validation, both int64 and ascending."""

    training: NDArray[np.int64]
    validation: NDArray[np.int64]


def hold_out(labels: NDArray[np.int64], amount: int | float, seed: int, origin: object) -> ValidationSplit:
    """Divide the samples of a file into training and validation, stratified by class.

    Each class has the same share in both parts, up to one sample, unless it has too few samples: at least one sample of each
    class is trained on. The division is a pure function of the first three arguments.

    Args:
        labels: (N,) class of each sample.
        amount: fraction of the samples that are held out, in (0, 1), or their number.
        origin: file of the samples, for messages.

    Raises:
        DataError: too few samples would be left for training, or the file is too small to hold out a sample.
    """
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    most, wanted = int((sizes - 1).sum()), amount if isinstance(amount, int) else max(1, round(amount * len(labels)))
    if wanted > most:
        legal = f"the largest number is {most:,}" if most else "give another file for validation"
        raise DataError(
            f"{wanted:,} of the {len(labels):,} samples of {origin} cannot be held out for validation (validation {amount:g}), "
            f"because training needs a sample of each of {len(sizes):,} classes; {legal}."
        )
    quota = wanted * sizes // len(labels)
    while (left := wanted - int(quota.sum())) > 0:
        missing = wanted * sizes - quota * len(labels)  # times the number of samples, so that the order is exact
        open_classes = np.flatnonzero(quota < sizes - 1)
        quota[open_classes[np.argsort(-missing[open_classes], kind="stable")][:left]] += 1
    order = np.lexsort((_sort_keys(counter_random.key("validation", seed), len(labels)), classes))
    rank_in_class = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    held_out = np.zeros(len(labels), bool)
    held_out[order] = rank_in_class < np.repeat(quota, sizes)
    return ValidationSplit(np.flatnonzero(~held_out), np.flatnonzero(held_out))


_UNIFORMS_AT_ONCE = 64


@dataclass(frozen=True)
class Mix:
    """Mixing of one step.

    Attributes:
        weight: weight of a sample's own label, in [0, 1]; in mixup also the weight of its own image.
        box: vertical and horizontal interval that cutmix replaces by the partner's pixels; None: mixup.
    """

    weight: float
    box: Box | None = None

    def apply(self, images: np.ndarray, partners: np.ndarray, region: Box) -> None:
        """Mix `partners` into `images` in place; both hold `region` of each image, (N, h, w, C). Mixup overwrites `partners`."""
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
    """Mixup and cutmix of the images of a step.

    Mixup draws w ~ Beta(mixup, mixup); images and labels are weighted by w, those of the partner by 1 - w (Zhang et al., ICLR
    2018). Cutmix draws w ~ Beta(cutmix, cutmix); a box of 1 - w of the area, clipped at the borders, is replaced by the partner's
    pixels, and the labels are weighted by the area actually cut (Yun et al., ICCV 2019). A value of 0 switches either off. With
    both, one of them is drawn per step.

    Args:
        mixup: alpha of mixup, in [0, 4]. Above, drawing from a Beta distribution takes too many attempts.
        cutmix: alpha of cutmix, in [0, 4].
        probability: share of steps that are mixed.
        switch: share of mixed steps that use cutmix if both are on.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch: float = 0.5
    seed: int = 0

    @property
    def mixes(self) -> bool:
        """Whether any step may be mixed."""
        return (self.mixup > 0 or self.cutmix > 0) and self.probability > 0

    def draw(self, epoch: int, first: int, height: int, width: int) -> Mix | None:
        """Return the mixing of the step from the epoch's sample `first` on, for images of (height, width); None if not mixed."""
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
    """Return a clipped box of 1 - weight of the area around `place`, uniform in [0, 1) over the image, like timm's rand_bbox."""
    ratio = (1.0 - weight) ** 0.5
    intervals = []
    for u, length in zip(place, size, strict=True):
        cut, centre = int(length * ratio), int(u * length)
        intervals.append((max(0, centre - cut // 2), min(length, centre + cut // 2)))
    return tuple(intervals)


def _beta(alpha: float, uniforms: Iterator[float]) -> float:
    """Return a number from Beta(alpha, alpha), drawn by the method of Joehnk (1964)."""
    while True:
        x, y = next(uniforms) ** (1.0 / alpha), next(uniforms) ** (1.0 / alpha)
        if 0.0 < x + y <= 1.0:
            return float(x / (x + y))


def _uniforms(stream: counter_random.Key, sample: int) -> Iterator[float]:
    """Yield the uniform numbers in [0, 1) of a sample's stream, endlessly."""
    begin = 0
    while True:
        indices = range(begin, begin + _UNIFORMS_AT_ONCE)
        yield from counter_random.uniform(stream, np.array([sample]), indices)[0].tolist()
        begin += _UNIFORMS_AT_ONCE
