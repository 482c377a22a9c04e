"""Batches of images that lie in memory as floating-point arrays: no file, no augmentation, no thread."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from hpctrain.data.loader import Batch, Share, TileOfRank, cut
from hpctrain.data.sampler import Sampler, counts
from hpctrain.errors import ShapeError


class ArrayLoader:
    """Batches of rank `rank` of `ranks`, made as a `Loader` makes those of a file.

    Args:
        images: (N, H, W, C), of the network's dtype, the same on every rank; the loader keeps a reference.
        labels: (N,) integers from 0. sampler: of N samples.
        split_size: neighbouring ranks that form a split group. tiles: the box that each of them reads of the group's images;
            None: each rank reads its own samples.

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
    ) -> None:
        if images.ndim != 4 or labels.shape != images.shape[:1] or len(images) != sampler.samples:
            raise ShapeError(
                f"Images of shape {images.shape} and labels of shape {labels.shape} are not {sampler.samples} samples; "
                f"give images (N, H, W, C) and labels (N,) with N = {sampler.samples}."
            )
        self.sampler = sampler
        self._images, self._labels = images, labels.astype(np.int64)
        self._rank, self._ranks, self._split_size, self._tiles = rank, ranks, split_size, tiles

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    def epoch(self, epoch: int, first: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch from its sample `first` on; every rank yields the same number of them."""
        for step in range(self.sampler.steps(first)):
            yield self._make(epoch, step, first)

    def _make(self, epoch: int, step: int, begin: int) -> Batch:
        ids = self.sampler.ids(epoch, step, begin)
        of_all_ranks = counts(len(ids), self._ranks, self._split_size)
        leader = self._rank - self._rank % self._split_size
        share = Share(of_all_ranks[leader : leader + self._split_size], self._rank - leader)
        group_ids = ids[sum(of_all_ranks[:leader]) :][: sum(share.counts)]
        own_ids = group_ids[sum(share.counts[: share.split_rank]) :][: share.counts[share.split_rank]]
        if self._tiles is None:
            x = self._images[own_ids]
        else:
            x = cut(self._images[group_ids], self._tiles(share.counts)[share.split_rank])
        number = -(-begin // self.sampler.batch) + step
        return Batch(x, self._labels[own_ids], group_ids, of_all_ranks, len(ids), epoch, number, share)
