"""Batches of images that lie in memory as floating-point arrays: no file, no augmentation, no thread."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from hpctrain.boxes import Box, whole
from hpctrain.data.loader import Batch, MixedWith, Share, TileOfRank, cut
from hpctrain.data.mixing import Mixing
from hpctrain.data.sampler import Sampler, counts
from hpctrain.errors import ShapeError


class ArrayLoader:
    """Batches of rank `rank` of `ranks`, made as a `Loader` makes those of a file.

    Args:
        images: (N, H, W, C), of the network's dtype, the same on every rank; the loader keeps a reference.
        labels: (N,) integers from 0. sampler: of N samples.
        split_size: neighbouring ranks that form a split group. tiles: the box that each of them reads of the group's images;
            None: each rank reads its own samples.
        shards: a step's samples are shared out over so many shards, a multiple of the ranks; None: over the ranks themselves.
        mixing: of the images of a step with each other; None: they are not mixed.

    Raises:
        ShapeError: arrays of other shapes, or of another number of samples.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        sampler: Sampler,
        *,
        rank: int = 0,
        ranks: int = 1,
        split_size: int = 1,
        tiles: TileOfRank | None = None,
        shards: int | None = None,
        mixing: Mixing | None = None,
    ) -> None:
        if images.ndim != 4 or labels.shape != images.shape[:1] or len(images) != sampler.samples:
            raise ShapeError(
                f"Images of shape {images.shape} and labels of shape {labels.shape} are not {sampler.samples} samples; "
                f"give images (N, H, W, C) and labels (N,) with N = {sampler.samples}."
            )
        self.sampler = sampler
        self._images, self._labels = images, labels.astype(np.int64)
        height, width, channels = images.shape[1:]
        self._image_shape = height, width, channels
        self._mixing = mixing
        self._rank, self._ranks, self._split_size, self._tiles, self._shards = rank, ranks, split_size, tiles, shards

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    def epoch(self, epoch: int, first: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch from its sample `first` on; every rank yields the same number of them."""
        for step in range(self.sampler.steps(first)):
            yield self._make(epoch, step, first)

    def _make(self, epoch: int, step: int, begin: int) -> Batch:
        ids = self.sampler.ids(epoch, step, begin)
        of_all_ranks = counts(len(ids), self._ranks, self._split_size, self._shards)
        leader = self._rank - self._rank % self._split_size
        share = Share(of_all_ranks[leader : leader + self._split_size], self._rank - leader)
        group_start = sum(of_all_ranks[:leader])
        of_group = slice(group_start, group_start + sum(share.counts))
        own_start = group_start + sum(share.counts[: share.split_rank])
        own = slice(own_start, own_start + share.counts[share.split_rank])
        box = None if self._tiles is None else self._tiles(share.counts, self._image_shape)[share.split_rank]
        read = own if box is None else of_group
        x, mixed = self._cut(ids[read], box), None
        mix = (
            None
            if self._mixing is None
            else self._mixing.draw(epoch, begin + step * self.sampler.batch, *self._images.shape[1:3])
        )
        if mix is not None:
            partner_ids = ids[::-1]
            region = whole(self._images.shape[1:3]) if box is None else (box[1], box[2])
            mix.apply(x, self._cut(partner_ids[read], box), region)
            mixed = MixedWith(self._labels[partner_ids[own]], mix.weight)
        number = -(-begin // self.sampler.batch) + step
        labels, shape = self._labels[ids[own]], self._image_shape
        return Batch(x, labels, ids[of_group], of_all_ranks, len(ids), epoch, number, share, mixed, shape)

    def _cut(self, ids: np.ndarray, box: Box | None) -> np.ndarray:
        """A copy of the images of samples, or of a box of these."""
        images = self._images[ids]
        return images if box is None else cut(images, box)
