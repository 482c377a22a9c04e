"""Batches of one part of the ranks: gathered, augmented and normalised ahead of time in one thread.

A thread, not a process: a fork after MPI has started is not allowed, and the work (copies, Pillow, NumPy on large arrays)
releases the interpreter's lock. Batches live in a ring of buffers that is made once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import numpy as np

from hpctrain.data.augment import Pipeline
from hpctrain.data.format import ImageFile
from hpctrain.data.sampler import Sampler, counts, part_of

CACHE_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True)
class Share:
    """Samples of the parts that exchange activations (a column of the process grid), and which of them this part is."""

    counts: tuple[int, ...]
    row: int = 0


@dataclass(frozen=True)
class Batch:
    """One part's share of one step. The arrays are views into the loader's ring: valid until the next batch is asked for.

    Attributes:
        x: (N, H, W, C) normalised images: of its own samples, or what it reads of all of its column's.
        y: (N,) int64 labels of its own samples; N may be 0. sample_ids: int64, of all samples of the column, in order.
        counts: samples of every part, this one's included. global_count: their sum, what the loss divides by.
        epoch, step: step counts from 0 within the epoch.
        share: the column's samples; this part's alone where there is one row.
    """

    x: np.ndarray
    y: np.ndarray
    sample_ids: np.ndarray
    counts: tuple[int, ...]
    global_count: int
    epoch: int
    step: int
    share: Share


def cut(images: np.ndarray, box: tuple[tuple[int, int], ...]) -> np.ndarray:
    """The elements of a box of images (N, H, W, C); zeros where it reaches beyond them. A copy."""
    out = np.zeros([stop - start for start, stop in box], images.dtype)
    inside = [(max(start, 0), min(stop, size)) for (start, stop), size in zip(box, images.shape, strict=True)]
    if all(start < stop for start, stop in inside):
        there = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(inside, box, strict=True))
        out[there] = images[tuple(slice(start, stop) for start, stop in inside)]
    return out


@dataclass(frozen=True)
class _Slot:
    """Memory of one batch of the largest size."""

    x: np.ndarray
    y: np.ndarray


class Loader:
    """Batches of part `part` of `parts` (the ranks of a grid column share one part).

    A sampler without shuffling and a pipeline without augmentations make it an evaluation loader: every sample once, in order.

    Args:
        file: the images; the loader keeps a reference to its map.
        prefetch: batches made ahead of the one in use; 0: none, and no thread.
        cache: keep the uint8 images in memory, where they fit into `cache_limit_bytes`; read at the first batch. Otherwise
            the page cache of the memory map serves them.
    """

    def __init__(
        self,
        file: ImageFile,
        sampler: Sampler,
        pipeline: Pipeline,
        *,
        part: int = 0,
        parts: int = 1,
        prefetch: int = 2,
        cache: bool = False,
        cache_limit_bytes: int = CACHE_LIMIT_BYTES,
    ) -> None:
        assert 0 <= part < parts, f"part {part} of {parts}"
        assert sampler.samples <= len(file), f"{sampler.samples} samples of {len(file)}"
        self.file = file
        self.sampler = sampler
        self.part = part
        self.parts = parts
        self.image_shape = pipeline.output_shape(*file.shape)
        self._pipeline = pipeline
        self._prefetch = prefetch
        self._images = file.images
        self._to_read = cache and file.images.nbytes <= cache_limit_bytes
        self._ring: list[_Slot] = []
        self._raw = np.empty((0, *file.shape), np.uint8)
        self._in_use = False

    @property
    def max_count(self) -> int:
        """Samples of the largest batch of this part."""
        return counts(min(self.sampler.batch, self.sampler.samples), self.parts)[self.part]

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    def epoch(self, epoch: int, start_step: int = 0) -> Generator[Batch, None, None]:
        """The batches of one epoch from `start_step` on; every part yields the same number of them.

        An error in the thread is raised here. Closing the generator early ends the thread. One epoch at a time.
        """
        assert not self._in_use, "an epoch of this loader is still being read; close it first"
        self._in_use = True
        try:
            self._allocate()
            steps = range(start_step, len(self))
            if self._prefetch == 0:
                for step in steps:
                    yield self._make(self._ring[0], epoch, step)
            else:
                yield from _ahead(self._ring, steps, lambda slot, step: self._make(slot, epoch, step))
        finally:
            self._in_use = False

    def _allocate(self) -> None:
        if self._ring:
            return
        count = self.max_count
        self._raw = np.empty((count, *self.file.shape), np.uint8)
        self._ring = [
            _Slot(np.empty((count, *self.image_shape), self._pipeline.dtype), np.empty(count, np.int64))
            for _ in range(self._prefetch + 1)
        ]

    def _make(self, slot: _Slot, epoch: int, step: int) -> Batch:
        if self._to_read:
            self._images, self._to_read = np.array(self.file.images), False
        ids = part_of(self.sampler.ids(epoch, step), self.part, self.parts)
        n = len(ids)
        # "clip" because "raise" makes NumPy gather into a copy first; the sampler's ids are in range.
        raw = np.take(self._images, ids, axis=0, out=self._raw[:n], mode="clip")
        np.take(self.file.labels, ids, out=slot.y[:n], mode="clip")
        x = self._pipeline(raw, ids, epoch, slot.x[:n])
        total = self.sampler.global_count(step)
        return Batch(x, slot.y[:n], ids, counts(total, self.parts), total, epoch, step, Share((n,)))


class _Failure:
    """An error on its way from the thread to the consumer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _ahead(ring: list[_Slot], steps: range, make: Callable[[_Slot, int], Batch]) -> Iterator[Batch]:
    """Batches of `steps`, made in a thread into the slots of `ring`; a slot is made anew once its batch was consumed."""
    free: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
    ready: queue.SimpleQueue[Batch | _Failure] = queue.SimpleQueue()
    for slot in ring:
        free.put(slot)

    def work() -> None:
        try:
            for step in steps:
                slot = free.get()
                if slot is None:
                    return
                ready.put(make(slot, step))
        except BaseException as error:  # whatever it is, the consumer must not wait for ever
            ready.put(_Failure(error))

    thread = threading.Thread(target=work, name="hpctrain-loader", daemon=True)
    thread.start()
    try:
        for number in range(len(steps)):
            item = ready.get()
            if isinstance(item, _Failure):
                raise item.error
            yield item
            free.put(ring[number % len(ring)])
    finally:
        # Slots still in the queue would be filled before the stop mark is seen.
        while not free.empty():
            free.get()
        free.put(None)
        thread.join()
