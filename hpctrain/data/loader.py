"""Batches of one rank, from data files (`Loader`) or from arrays in memory (`ArrayLoader`).

A `Loader` gathers, augments and normalises batches in advance, in a ring of preallocated buffers. It uses a thread instead of a
process, because forking after MPI has started is not allowed, and because the work (copies, Pillow, NumPy on large arrays)
releases the GIL.

The samples of a step are divided over the split groups, and within a group over its ranks (`sampler.counts`). If ranks share
samples, each rank needs one box of every image of its group, for its first layers (`GridDistribution.tiles_by_counts`). It reads
only the stored pixels from which the drawn augmentations compute this box (`Pipeline.part`), or whole images if the cache of its
node has room for them (`SampleCache.bring`).

An `ArrayLoader` takes floating-point images in memory, without files, augmentation or threads.
"""

from __future__ import annotations

import math
import queue
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import numpy as np

from hpctrain.backend.pixels import PixelBatch
from hpctrain.core.errors import DataError, ShapeError
from hpctrain.core.intervals import Box, clip, relative, shape_of, size_of, whole
from hpctrain.core.registry import CountFromZero, check_types
from hpctrain.data.cache import SampleCache
from hpctrain.data.image_file import ImageArray, ImageFile
from hpctrain.data.pipeline import ImageSizes, Pipeline
from hpctrain.data.sampler import Mixing, Sampler, counts

#: function (samples of each rank of a split group, (H, W, C)) -> each rank's box of the group's images (N, H, W, C)
TileOfRank = Callable[[tuple[int, ...], tuple[int, int, int]], Sequence[Box]]


@dataclass(frozen=True)
class Share:
    """Numbers of samples of the ranks of a split group, which exchange activations, and this rank's number in the group."""

    counts: tuple[int, ...]
    split_rank: int = 0


@dataclass(frozen=True)
class MixedWith:
    """Partners of a rank's samples: their labels (N,) int64, and the weight of the samples' own labels."""

    labels: np.ndarray
    weight: float


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step. The arrays are views into the loader's ring, valid until the next batch is requested.

    Attributes:
        x: (N, H, W, C) normalised images of the rank's samples; or this rank's tile of the images of its split group; or the
            pixels from which a kernel set computes the images.
        y: (N,) int64 labels of the rank's samples; N may be 0.
        sample_ids: int64 numbers of all samples of the split group, in order.
        counts: numbers of samples of all ranks.
        global_count: sum of `counts`, by which the loss is divided.
        epoch: number of the epoch, from 0.
        step: number of the step in the epoch, from 0. An epoch that resumes at sample `first` starts with step ceil(first / batch
            size).
        share: samples of the split group, which may consist of this rank only.
        mixed: partners of the samples in mixup or cutmix; None: the images are not mixed.
        image_shape: (H, W, C) of whole images, which may change from epoch to epoch; None: the shape for which the network was
            built.
        class_scale: factor on the loss's weights of classes: number of samples of the step divided by the sum of the weights of
            their classes; None: the loss has no weights.
    """

    x: np.ndarray | PixelBatch
    y: np.ndarray
    sample_ids: np.ndarray
    counts: tuple[int, ...]
    global_count: int
    epoch: int
    step: int
    share: Share
    mixed: MixedWith | None = None
    image_shape: tuple[int, int, int] | None = None
    class_scale: float | None = None


class LoaderRank(TypedDict):
    """Position of a rank among the ranks that divide the batches, as keyword arguments of a loader (see `Loader`)."""

    rank: int
    ranks: int
    split_size: int
    tiles: TileOfRank | None
    shards: int | None


class BatchSource(Protocol):
    """Source of this rank's batches, epoch by epoch: a `Loader` or an `ArrayLoader`."""

    sampler: Sampler

    def epoch(self, epoch: CountFromZero, first: CountFromZero = 0) -> Generator[Batch, None, None]:
        """Yield the batches of one epoch from its sample `first`; all ranks yield the same number of batches."""


def cut(images: np.ndarray, box: Box) -> np.ndarray:
    """Return a copy of the elements of a box of images (N, H, W, C). Elements outside the images are zero."""
    out = np.zeros([stop - start for start, stop in box], images.dtype)
    inside = clip(box, images.shape)
    if size_of(inside):
        out[relative(inside, box)] = images[tuple(slice(start, stop) for start, stop in inside)]
    return out


def _gathered(images: ImageArray, ids: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write whole images of samples to `out`, and return it."""
    if isinstance(images, np.ndarray):
        return np.take(images, ids, axis=0, out=out, mode="clip")
    return images.take(ids, out)


@dataclass(frozen=True)
class _Slot:
    """Flat memory for the largest batch, and for the partners' images and labels if images are mixed."""

    x: np.ndarray
    y: np.ndarray
    partners: np.ndarray
    partner_labels: np.ndarray


@dataclass(frozen=True)
class _Division:
    """Division of the samples of a step: over all ranks, over the split group, and the slices of the group and of this rank."""

    counts: tuple[int, ...]
    share: Share
    group: slice
    own: slice


class _Batches:
    """Base of the loaders: the rank's position among the ranks that divide the batches of a sampler."""

    def __init__(
        self,
        sampler: Sampler,
        rank: int,
        ranks: int,
        split_size: int,
        tiles: TileOfRank | None,
        shards: int | None,
        mixing: Mixing | None,
        class_weights: Sequence[float],
    ) -> None:
        assert 0 <= rank < ranks, f"rank {rank} of {ranks}"
        assert ranks % split_size == 0, f"{ranks} ranks in split groups of {split_size}"
        self.sampler = sampler
        self._rank, self._ranks, self._split_size, self._shards = rank, ranks, split_size, shards
        self._tiles, self._mixing = tiles, mixing
        self._class_weights = np.array(class_weights, np.float64)

    def _class_scale(self, labels: np.ndarray) -> float | None:
        """Return `Batch.class_scale` of a step.

        Mixing does not change it, since each sample is the partner of exactly one sample.

        Args:
            labels: labels of the samples of all ranks, in order, so that every rank adds in the same order.
        """
        return len(labels) / float(self._class_weights[labels].sum()) if self._class_weights.size else None

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    def _divide(self, total: int) -> _Division:
        of_all_ranks = counts(total, self._ranks, self._split_size, self._shards)
        leader = self._rank - self._rank % self._split_size
        share = Share(of_all_ranks[leader : leader + self._split_size], self._rank - leader)
        first, own = sum(of_all_ranks[:leader]), sum(of_all_ranks[: self._rank])
        return _Division(of_all_ranks, share, slice(first, first + sum(share.counts)), slice(own, own + of_all_ranks[self._rank]))


class Loader(_Batches):
    """Batches of rank `rank` of `ranks`: whole images of its samples, or its tile of the images of its split group.

    With a sampler without shuffling and a pipeline without augmentations, it is an evaluation loader that yields every sample
    once, in order. If a rank reads tiles, only the pixels that may be needed for them are read from the file.

    Args:
        file: images; the loader keeps a reference to its map.
        split_size: number of neighbouring ranks that form a split group.
        tiles: function that returns each rank's box of the group's images after the pipeline, with zeros outside the images.
            None: each rank reads its own samples.
        shards: number of shards into which the samples of a step are divided, a multiple of the number of ranks; None: number of
            ranks.
        prefetch: number of batches made in advance by a thread; 0: each batch is made on request, without a thread.
        pixels: reader of the file's images, such as a cache; None: the file itself.
        mixing: mixing of the images of a step; None: images are not mixed.
        sizes: sizes of images by epoch; None: the pipeline's size in all epochs.
        class_weights: weight of each class in the loss of the steps; empty: all are 1.
        leaves_pixels: whether batches hold uint8 pixels, to which a kernel set applies the last steps of the pipeline. Ignored if
            images are tiled or mixed, or if the pipeline does not support it.
        holds_out: whether the file's samples that the loader does not read are held out for validation.
    """

    def __init__(
        self,
        file: ImageFile,
        sampler: Sampler,
        pipeline: Pipeline,
        *,
        rank: int = 0,
        ranks: int = 1,
        split_size: int = 1,
        tiles: TileOfRank | None = None,
        shards: int | None = None,
        prefetch: int = 2,
        pixels: ImageArray | None = None,
        mixing: Mixing | None = None,
        sizes: ImageSizes | None = None,
        class_weights: Sequence[float] = (),
        leaves_pixels: bool = False,
        holds_out: bool = False,
    ) -> None:
        super().__init__(sampler, rank, ranks, split_size, tiles, shards, mixing, class_weights)
        assert sampler.samples <= len(file), f"{sampler.samples} samples of {len(file)}"
        self.file, self.holds_out = file, holds_out
        self._any_size, self._sizes = pipeline, sizes
        self._pipeline = pipeline if sizes is None else pipeline.resized(sizes.at(0))
        self.image_shape = self._pipeline.output_shape(*file.shape)
        self._pixel_shape = self._pipeline.stored_shape(*file.shape)
        self._prefetch = prefetch
        self._leaves_pixels = leaves_pixels and tiles is None and mixing is None and pipeline.can_defer
        self._box_of: dict[tuple[int, ...], Box] = {}
        self._images: ImageArray = file.pixels if pixels is None else pixels
        self._ring: list[_Slot] = []
        self._raw = np.empty((0, *file.shape), np.uint8)
        self._in_use = False

    @property
    def pixels(self) -> ImageArray:
        """Reader of the file's images."""
        return self._images

    def read_through(self, pixels: ImageArray) -> None:
        """Set the reader of the file's images, which must return the same images. Call it between two epochs."""
        assert not self._in_use
        self._images = pixels

    def epoch(self, epoch: CountFromZero, first: CountFromZero = 0) -> Generator[Batch, None, None]:
        """Yield the batches of one epoch; see `BatchSource`.

        Errors in the thread are raised here. Closing the generator early ends the thread. Only one epoch may be in progress.
        """
        check_types(Loader.epoch, {"epoch": epoch, "first": first})
        assert not self._in_use, "an epoch of this loader is still being read; close it first"
        self._in_use = True
        try:
            self._take_size(epoch)
            self._allocate(first)
            steps = range(self.sampler.steps(first))
            if self._prefetch == 0:
                for step in steps:
                    yield self._make(self._ring[0], epoch, step, first)
            else:
                yield from _ahead(self._ring, steps, lambda slot, step: self._make(slot, epoch, step, first))
        finally:
            self._in_use = False

    def _take_size(self, epoch: int) -> None:
        """Switch to the image size of an epoch, and release buffers of another size."""
        if self._sizes is None:
            return
        pipeline = self._any_size.resized(self._sizes.at(epoch))
        shape = pipeline.output_shape(*self.file.shape)
        if shape != self.image_shape:
            self._pipeline, self.image_shape = pipeline, shape
            self._pixel_shape = pipeline.stored_shape(*self.file.shape)
            self._box_of, self._ring = {}, []

    def _allocate(self, first: int) -> None:
        """Allocate memory for the batches of whole epochs and of an epoch from `first`, whose last batch may be smaller."""
        shares = {share.counts: share for start in (0, first) for share in self._shares(start)}
        if self._ring and shares.keys() <= self._box_of.keys():
            return
        self._box_of |= {counts: self._box(share) for counts, share in shares.items()}
        boxes = self._box_of.values()
        samples = max(box[0][1] - box[0][0] for box in boxes if self._is_whole(box)) if any(map(self._is_whole, boxes)) else 0
        self._raw = np.empty((samples, *self.file.shape), np.uint8)
        size = samples * math.prod(self._pixel_shape) if self._leaves_pixels else max(map(size_of, boxes))
        self._ring = [self._slot(size) for _ in range(self._prefetch + 1)]

    def _slot(self, size: int) -> _Slot:
        mixes, dtype = self._mixing is not None, np.dtype(np.uint8) if self._leaves_pixels else self._pipeline.dtype
        labels = self._divide(min(self.sampler.batch, self.sampler.samples)).counts[self._rank]  # of the largest batch
        partners = np.empty(size if mixes else 0, dtype), np.empty(labels if mixes else 0, np.int64)
        return _Slot(np.empty(size, dtype), np.empty(labels, np.int64), *partners)

    def _shares(self, first: int) -> list[Share]:
        """Return the shares of the split group in the first and the last batch of the epoch from its sample `first`.

        Other batches have the size of the first one.
        """
        steps = self.sampler.steps(first)
        return [self._divide(self.sampler.global_count(step, first)).share for step in {0, steps - 1} if 0 <= step < steps]

    def _box(self, share: Share) -> Box:
        if self._tiles is not None:
            return self._tiles(share.counts, self.image_shape)[share.split_rank]
        start = sum(share.counts[: share.split_rank])
        return (start, start + share.counts[share.split_rank]), *whole(self.image_shape)

    def _is_whole(self, box: Box) -> bool:
        return box[1:] == whole(self.image_shape)

    def _make(self, slot: _Slot, epoch: int, step: int, begin: int) -> Batch:
        ids = self.sampler.ids(epoch, step, begin)
        division = self._divide(len(ids))
        share, group_ids, own_ids = division.share, ids[division.group], ids[division.own]
        box = self._box_of[share.counts]
        x: np.ndarray | PixelBatch
        if self._leaves_pixels:
            shape = len(own_ids), *self._pixel_shape
            pixels = slot.x[: math.prod(shape)].reshape(shape)
            raw = _gathered(self._images, own_ids, pixels if self._pipeline.keeps_pixels else self._raw[: len(own_ids)])
            x = self._pipeline.unfinished(raw, own_ids, epoch, pixels)
        else:
            x = slot.x[: size_of(box)].reshape(shape_of(box))
            self._fill(group_ids[slice(*box[0])], epoch, box, x)
        self.file.take_labels(own_ids, slot.y[: len(own_ids)])  # after the images, because samples may be replaced
        mixed = self._mix(slot, ids[::-1], epoch, begin + step * self.sampler.batch, box, division)
        number, labels = -(-begin // self.sampler.batch) + step, slot.y[: len(own_ids)]
        scale = self._class_scale(self.file.labels[ids])
        return Batch(x, labels, group_ids, division.counts, len(ids), epoch, number, share, mixed, self.image_shape, scale)

    def _fill(self, ids: np.ndarray, epoch: int, box: Box, x: np.ndarray) -> None:
        """Write the elements of `box` of the images of `ids`, after the pipeline, to `x`."""
        if self._is_whole(box):
            raw = _gathered(self._images, ids, self._raw[: len(ids)])
            self._pipeline(raw, ids, epoch, x)
        else:
            self._make_region(ids, epoch, box, x)

    def _mix(self, slot: _Slot, partner_ids: np.ndarray, epoch: int, place: int, box: Box, of: _Division) -> MixedWith | None:
        """Mix the images of a slot with the images of their partners.

        Args:
            partner_ids: partners of the step's samples over all ranks, in the order of the samples.
            place: number of the step's first sample in the epoch.
        """
        mix = None if self._mixing is None else self._mixing.draw(epoch, place, *self.image_shape[:2])
        if mix is None:
            return None
        images, partners = (flat[: size_of(box)].reshape(shape_of(box)) for flat in (slot.x, slot.partners))
        self._fill(partner_ids[of.group][slice(*box[0])], epoch, box, partners)
        mix.apply(images, partners, (box[1], box[2]))
        own = partner_ids[of.own]
        self.file.take_labels(own, slot.partner_labels[: len(own)])
        return MixedWith(slot.partner_labels[: len(own)], mix.weight)

    def _make_region(self, ids: np.ndarray, epoch: int, box: Box, x: np.ndarray) -> None:
        """Fill `x` with the elements of `box` of the images. Elements outside the images are zero."""
        height, width, channels = self.image_shape
        wanted = (box[1], box[2])
        existing = clip(wanted, (height, width))
        if existing != wanted:
            x[...] = 0
        if not size_of(existing):
            return
        if isinstance(self._images, SampleCache):
            self._images.bring(ids)
        rows, columns = relative(existing, wanted)
        if box[3] == (0, channels):
            self._pipeline.part(self._read, self.file.shape, ids, epoch, existing, x[:, rows, columns])
            return
        all_channels = np.empty((len(ids), *shape_of(existing), channels), x.dtype)
        self._pipeline.part(self._read, self.file.shape, ids, epoch, existing, all_channels)
        x[:, rows, columns] = all_channels[..., slice(*box[3])]

    def _read(self, sample: int, region: Box) -> np.ndarray:
        (top, bottom), (left, right) = region
        pixels: np.ndarray = self._images[sample, top:bottom, left:right]
        return pixels


def _ahead(ring: list[_Slot], steps: range, make: Callable[[_Slot, int], Batch]) -> Iterator[Batch]:
    """Yield batches of `steps`, made by a thread in the slots of `ring`. A slot is reused once its batch is consumed."""
    free: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
    ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
    for slot in ring:
        free.put(slot)

    def work() -> None:
        try:
            for step in steps:
                slot = free.get()
                if slot is None:
                    return
                ready.put(make(slot, step))
        except BaseException as error:  # of any kind, or the consumer would wait forever
            ready.put(error)

    thread = threading.Thread(target=work, name="hpctrain-loader", daemon=True)
    thread.start()
    try:
        for number in range(len(steps)):
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
            free.put(ring[number % len(ring)])
    finally:
        # Slots still in the queue would be filled before the thread receives the stop mark.
        while not free.empty():
            free.get()
        free.put(None)
        thread.join()


# Size of the blocks in which images are examined, and maximum size of all examined blocks; beyond it some are skipped.
_BLOCK_BYTES, _MOST_BYTES = 1 << 22, 1 << 29


@dataclass(frozen=True)
class Samples:
    """Finite images (N, H, W, C) of a floating dtype, and labels (N,) int64, all valid classes."""

    images: np.ndarray
    labels: np.ndarray

    def facts(self) -> dict[str, str]:
        """Return the facts by which ranks compare their arrays: shape, dtype and checksum of images and labels.

        The checksum of the images covers at most 512 MiB, in evenly spaced blocks, so it may miss differences in larger arrays.
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
        images: array-like (N, H, W, C), floating-point.
        labels: array-like (N,), integers in 0 .. classes - 1.
        dtype: floating dtype of the returned images.

    Raises:
        DataError: an argument cannot be converted to an array or has another kind of dtype, an image is not finite in `dtype`, or
            a label is outside its range.
        ShapeError: the arrays have other shapes.
    """
    pixels, numbers = _array("images", images), _array("labels", labels)
    if pixels.dtype.kind != "f":
        raise DataError(
            f"images has dtype {pixels.dtype}, but must be floating-point and normalised; "
            "for pixels of 0 to 255, give (images / 255.0 - mean) / deviation."
        )
    if numbers.dtype.kind not in "iu":
        raise DataError(f"labels has dtype {numbers.dtype}, but must be integers from 0 to {classes - 1}; give class numbers.")
    count = pixels.shape[0] if pixels.ndim else 0
    if pixels.ndim != 4 or numbers.shape != (count,) or not count:
        raise _no_samples(pixels, numbers, "the same N of at least 1")
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
                f"Sample {sample} of images holds a value that is not finite in {pixels.dtype}; correct it, or leave it out."
            )
    return Samples(pixels, numbers.astype(np.int64, copy=False))


def _array(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except Exception as error:  # ragged lists, tensors on a device, anything that __array__ may raise
        reason = " ".join(str(error).split()).rstrip(".")
        raise DataError(f"{name} cannot be converted to an array ({reason}); give a NumPy array.") from error


def _no_samples(images: np.ndarray, labels: np.ndarray, rule: str) -> ShapeError:
    return ShapeError(
        f"images has shape {images.shape} and labels has {labels.shape}, but they must be (N, H, W, C) and (N,) with {rule}."
    )


def _blocks(images: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (number of the first sample, images) of each block, or of evenly spaced blocks if the images exceed 512 MiB."""
    rows = max(1, _BLOCK_BYTES // max(1, images[:1].nbytes))
    begins = np.arange(0, len(images), rows)
    if images.nbytes > _MOST_BYTES:
        begins = begins[np.linspace(0, len(begins) - 1, max(2, _MOST_BYTES // _BLOCK_BYTES)).astype(int)]
    for begin in begins.tolist():
        yield begin, images[begin : begin + rows]


class ArrayLoader(_Batches):
    """Batches of rank `rank` of `ranks` from arrays, divided like the batches of a `Loader`.

    Args:
        images: (N, H, W, C) of the network's dtype, equal on every rank; the loader keeps a reference.
        labels: (N,) integers from 0.
        sampler: sampler of N samples.
        split_size, tiles, shards, mixing, class_weights: see `Loader`.

    Raises:
        ShapeError: the arrays have other shapes, or another number of samples.
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
        class_weights: Sequence[float] = (),
    ) -> None:
        if images.ndim != 4 or labels.shape != images.shape[:1] or len(images) != sampler.samples:
            raise _no_samples(images, labels, f"N = {sampler.samples}")
        super().__init__(sampler, rank, ranks, split_size, tiles, shards, mixing, class_weights)
        self._images, self._labels = images, labels.astype(np.int64, casting="same_kind")
        height, width, channels = images.shape[1:]
        self._image_shape = height, width, channels

    def epoch(self, epoch: CountFromZero, first: CountFromZero = 0) -> Generator[Batch, None, None]:
        check_types(ArrayLoader.epoch, {"epoch": epoch, "first": first})
        for step in range(self.sampler.steps(first)):
            yield self._make(epoch, step, first)

    def _make(self, epoch: int, step: int, begin: int) -> Batch:
        ids = self.sampler.ids(epoch, step, begin)
        division = self._divide(len(ids))
        share, own, shape = division.share, division.own, self._image_shape
        box = None if self._tiles is None else self._tiles(share.counts, shape)[share.split_rank]
        read = own if box is None else division.group
        x, mixed = self._cut(ids[read], box), None
        mix = None if self._mixing is None else self._mixing.draw(epoch, begin + step * self.sampler.batch, *shape[:2])
        if mix is not None:
            partner_ids = ids[::-1]
            mix.apply(x, self._cut(partner_ids[read], box), whole(shape[:2]) if box is None else (box[1], box[2]))
            mixed = MixedWith(self._labels[partner_ids[own]], mix.weight)
        number, labels = -(-begin // self.sampler.batch) + step, self._labels[ids[own]]
        scale = self._class_scale(self._labels[ids])
        return Batch(x, labels, ids[division.group], division.counts, len(ids), epoch, number, share, mixed, shape, scale)

    def _cut(self, ids: np.ndarray, box: Box | None) -> np.ndarray:
        """Return a copy of the images of samples, or of a box of these images."""
        images = self._images[ids]
        return images if box is None else cut(images, box)
