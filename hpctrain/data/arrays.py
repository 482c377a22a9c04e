"""Batches of images that lie in memory as floating-point arrays: no file, no augmentation, no thread."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.core.intervals import Box, whole
from hpctrain.data.loader import Batch, MixedWith, Share, TileOfRank, cut
from hpctrain.data.mixing import Mixing
from hpctrain.data.sampler import Sampler, counts
from hpctrain.core.errors import DataError, ShapeError

# Images are examined in blocks of the first size. If they exceed the second, as memory maps may, some blocks are skipped.
_BLOCK_BYTES, _MOST_BYTES = 1 << 22, 1 << 29


@dataclass(frozen=True)
class Samples:
    """Finite images (N, H, W, C) of a floating dtype, and labels (N,) int64, all valid classes."""

    images: np.ndarray
    labels: np.ndarray

    def facts(self) -> dict[str, str]:
        """Return the facts by which ranks compare their arrays: shape, dtype and checksum of images and labels.

        Reads at most 512 MiB of images, in evenly spaced blocks.
        """
        checksum = 0
        for _, block in _blocks(self.images):
            checksum = zlib.crc32(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data, checksum)
        return {
            "images": f"{self.images.shape} {self.images.dtype} with crc32 {checksum:08x}",
            "labels": f"{self.labels.shape} with crc32 {zlib.crc32(np.ascontiguousarray(self.labels).data):08x}",
        }


def as_samples(images: Any, labels: Any, classes: int, dtype: np.dtype | str) -> Samples:
    """Check images and labels, and return them as arrays for an `ArrayLoader`.

    Args:
        images: array-like (N, H, W, C), floating. labels: array-like (N,), integers.
        classes: number of classes; labels are in 0 .. classes - 1. dtype: floating dtype of the returned images.

    Raises:
        DataError: not convertible to an array, another kind of numbers, an image that is not finite in `dtype`, or a label
            outside its range.
        ShapeError: arrays of other shapes.
    """
    pixels, numbers = _array("images", images), _array("labels", labels)
    if pixels.dtype.kind != "f":
        raise DataError(
            f"images has dtype {pixels.dtype}, but must be floating-point, normalised by you; "
            "give (images / 255.0 - mean) / deviation for pixels of 0 to 255."
        )
    if numbers.dtype.kind not in "iu":
        raise DataError(f"labels has dtype {numbers.dtype}, but must be integers from 0 to {classes - 1}; give their numbers.")
    count = pixels.shape[0] if pixels.ndim else 0
    if pixels.ndim != 4 or numbers.shape != (count,) or not count:
        raise _no_samples(pixels, numbers, max(1, count))
    outside = np.flatnonzero((numbers < 0) | (numbers >= classes))
    if outside.size:
        raise DataError(
            f"Label {numbers[outside[0]]} of sample {outside[0]} is outside 0..{classes - 1} ({outside.size} such labels); "
            f"the model has {classes} classes."
        )
    with np.errstate(over="ignore"):
        pixels = pixels.astype(dtype, copy=False)
    for begin, block in _blocks(pixels):
        if not np.isfinite(block).all():
            sample = begin + int(np.flatnonzero(~np.isfinite(block.reshape(len(block), -1)).all(axis=1))[0])
            raise DataError(
                f"Sample {sample} of images holds a value that is not finite in {pixels.dtype}; mend it, or leave it out."
            )
    return Samples(pixels, numbers.astype(np.int64, copy=False))


def _array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except Exception as error:  # ragged lists, tensors on a device, anything that __array__ may raise
        reason = " ".join(str(error).split()).rstrip(".")
        raise DataError(f"{name} is no array and cannot be made one ({reason}); give an array of NumPy.") from error


def _no_samples(images: np.ndarray, labels: np.ndarray, count: int) -> ShapeError:
    return ShapeError(
        f"Images of shape {images.shape} and labels of shape {labels.shape} are not {count} samples; "
        f"give images (N, H, W, C) and labels (N,) with N = {count}."
    )


def _blocks(images: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (number of the first sample, images) of each block; of evenly spaced blocks if the images exceed 512 MiB."""
    rows = max(1, _BLOCK_BYTES // max(1, images[:1].nbytes))
    begins = np.arange(0, len(images), rows)
    if images.nbytes > _MOST_BYTES:
        begins = begins[np.linspace(0, len(begins) - 1, max(2, _MOST_BYTES // _BLOCK_BYTES)).astype(int)]
    for begin in begins.tolist():
        yield begin, images[begin : begin + rows]


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
            raise _no_samples(images, labels, sampler.samples)
        self.sampler = sampler
        self._images, self._labels = images, labels.astype(np.int64, casting="same_kind")
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
