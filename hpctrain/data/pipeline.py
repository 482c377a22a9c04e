"""From stored pixels to the input of a network: augmentations, then normalisation, of whole images or regions.

Threads share the samples of a batch (`BatchThreads`); the result does not depend on the thread that computes it. The last steps
(a resize, windows, normalisation and one filled box) may be left to a kernel set (`Pipeline.unfinished`). The size of images may
change from epoch to epoch (`ImageSizes`), for example from small to large images.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any

import numpy as np

from hpctrain.backend import counter_random
from hpctrain.backend.pixels import WINDOW, PixelBatch, Resampling
from hpctrain.core.errors import ConfigError, ShapeError
from hpctrain.core.intervals import Box, shape_of, size_of, whole
from hpctrain.core.user_code import read_only
from hpctrain.data.augmentations import AUGMENTATIONS
from hpctrain.data.augmentations.base import (
    LEAST_FOR_OPENCV,
    Augmentation,
    FillingAugmentation,
    NormalisedAugmentation,
    ResamplingAugmentation,
    WindowAugmentation,
)
from hpctrain.data.augmentations.flip import Flip
from hpctrain.data.image_file import check_statistics

#: maximum size of a chunk of samples: it fits into a core's cache, and several samples share the fixed costs of a call
CHUNK_BYTES = 1 << 21
#: chunks per thread, unless they would be too small, to balance samples of different costs
_CHUNKS_PER_THREAD = 2
_LEAST_CHUNK_BYTES = 1 << 18
#: maximum default number of threads; more do not help
_MOST_BY_DEFAULT = 8
_CORES_PER_THREAD = 4

#: function (thread number from 0, first sample, end of samples) that processes these samples
Work = Callable[[int, int, int], None]


def default_threads(cores: int) -> int:
    """Return the default number of threads that make batches on a rank with `cores` cores. Most cores are left for computing."""
    return max(1, min(_MOST_BY_DEFAULT, cores // _CORES_PER_THREAD))


class BatchThreads:
    """Threads that process the samples of a batch: the calling thread and `count` - 1 others, which start with the first batch.

    The threads end with the object. Only one call may be in progress.
    """

    def __init__(self, count: int = 1) -> None:
        assert count >= 1, f"{count} threads"
        self.count = count
        self._others: ThreadPoolExecutor | None = None

    def run(self, samples: int, sample_bytes: int, work: Work) -> None:
        """Run `work` on all samples, in chunks. An error is raised after all threads have finished.

        Args:
            sample_bytes: size of one sample, which determines the length of chunks.
        """
        most, least = (max(1, size // max(1, sample_bytes)) for size in (CHUNK_BYTES, _LEAST_CHUNK_BYTES))
        length = most if self.count == 1 else min(most, max(least, samples // (_CHUNKS_PER_THREAD * self.count)))
        chunks = iter(range(0, samples, length))
        helpers = min(self.count, -(-samples // length)) - 1
        begun: list[Future[None]] = []
        if helpers > 0:
            if self._others is None:
                self._others = ThreadPoolExecutor(self.count - 1, "hpctrain-batch")
            begun = [self._others.submit(_make, number, chunks, length, samples, work) for number in range(1, helpers + 1)]
        errors = []
        try:
            _make(0, chunks, length, samples, work)
        except BaseException as error:  # raised below, because the other threads still write to the batch
            errors.append(error)
        errors += [failure for future in begun if (failure := future.exception()) is not None]
        if errors:
            raise errors[0]


def _make(thread: int, chunks: Iterator[int], length: int, samples: int, work: Work) -> None:
    """Process chunks until none is left. The shared range iterator yields each chunk to one thread."""
    for first in chunks:
        work(thread, first, min(samples, first + length))


def first_deferred(steps: Sequence[Augmentation]) -> int:
    """Return the index of the first step that may be deferred, a resize or a window before windows only; len(steps) if none."""
    made = [number for number, step in enumerate(steps, 1) if not isinstance(step, WindowAugmentation)]
    if not made:
        return 0
    return made[-1] - 1 if isinstance(steps[made[-1] - 1], ResamplingAugmentation) else made[-1]


def resampled(step: Augmentation, size: tuple[int, int], u: np.ndarray) -> Resampling | None:
    """Return the resize of images of `size` (H, W) by a step, for random numbers u (count, draws); None if it does not resize."""
    if not isinstance(step, ResamplingAugmentation):
        return None
    height, width, _ = step.output_shape(*size, 0)
    return Resampling(step.source_boxes(size, u).astype(np.int32), (height, width), step.interpolates)


def can_defer(normalised: Sequence[NormalisedAugmentation]) -> bool:
    """Return whether the steps after normalisation at most fill one rectangle with one number."""
    return not normalised or (len(normalised) == 1 and filling(normalised) is not None)


def filling(normalised: Sequence[NormalisedAugmentation]) -> FillingAugmentation | None:
    """Return the first step if it fills a rectangle with one number; otherwise None."""
    first = normalised[0] if normalised else None
    return first if isinstance(first, FillingAugmentation) and first.fill is not None else None


def composed(
    count: int, size: tuple[int, int], steps: Iterable[tuple[Augmentation, np.ndarray]]
) -> tuple[np.ndarray, tuple[int, int]]:
    """Return one window per image of `size` (H, W) that is equivalent to all steps together, and the size of the results.

    Args:
        steps: window augmentations, with their random numbers (count, draws).
    """
    windows = np.zeros(count, WINDOW)
    windows["step"] = 1
    windows["shown"] = [(0, size[0]), (0, size[1])]
    for step, u in steps:
        assert isinstance(step, WindowAugmentation), f"{step} is no window"
        top, left, direction = step.windows(size, u).T
        height, width, _ = step.output_shape(*size, 0)
        size = height, width
        _show(windows, top, left, direction, size)
    return windows, size


def _show(windows: np.ndarray, top: np.ndarray, left: np.ndarray, direction: np.ndarray, size: tuple[int, int]) -> None:
    """Compose windows, in place, with a further window of `size`.

    Pixel (y, x) of the further window is pixel (top + y, left + direction * x) of the present one.
    """
    before, after = windows["shown"][:, 1].T.astype(np.int64)
    mirrored = direction < 0
    across = np.where(mirrored, left - after + 1, before - left), np.where(mirrored, left - before + 1, after - left)
    windows["shown"][:, 0] = np.clip(windows["shown"][:, 0] - top[:, np.newaxis], 0, size[0])
    windows["shown"][:, 1] = np.clip(np.stack(across, axis=1), 0, size[1])
    windows["top"] += top.astype(np.int32)
    windows["left"] += (windows["step"] * left).astype(np.int32)
    windows["step"] *= direction.astype(np.int32)


def mirrored_box(box: Box, width: int) -> Box:
    """Return the place of a box in the mirror image of an image of this width."""
    rows, (left, right) = box
    return rows, (width - right, width - left)


Read = Callable[[int, Box], np.ndarray]  # (sample number, region of its image) -> pixels of the region


class Pipeline:
    """Augmentations in the given order, then (x / 255 - mean) / std in `dtype`, then augmentations of normalised pixels.

    The random numbers of augmentation i are f(seed, epoch, i, its name, sample id); see also `Augmentation.alternates`. The
    pipeline owns scratch memory for each of its threads (one, unless `share_out` sets more), so only one thread at a time may
    call it.

    Args:
        specs: (name, options) pairs of augmentations, see `AUGMENTATIONS`.
        mean: (C,) means in units of 0..1.
        std: (C,) standard deviations in units of 0..1; a channel with std 0 is only centred.
        dtype: "float32" or "float64", dtype of the result. It is always finite: augmentations return uint8, and mean and std are
            checked.

    Raises:
        ConfigError: see `Registry.create`; or another augmentation follows an augmentation of normalised pixels.
        DataError: pixels normalised with mean and std would not be finite.
    """

    def __init__(
        self, specs: Sequence[tuple[str, Mapping[str, Any]]], seed: int, mean: np.ndarray, std: np.ndarray, dtype: str = "float32"
    ) -> None:
        steps = tuple(AUGMENTATIONS.create(name, options) for name, options in specs)
        self.augmentations: tuple[Augmentation, ...] = tuple(x for x in steps if not isinstance(x, NormalisedAugmentation))
        self.normalised = tuple(x for x in steps if isinstance(x, NormalisedAugmentation))
        check_order(steps)
        # The random numbers of a step depend on its place in the list, which a mirrored pipeline must not change.
        self._first_normalised = len(self.augmentations)
        self._mirrored = False
        self.seed = seed
        self.dtype = np.dtype(dtype)
        check_statistics("the normalisation", np.asarray(mean), np.asarray(std))
        # A constant channel has std 0; dividing by it would yield NaN.
        spread = np.where(np.asarray(std) > 0, std, 1.0)
        self._scale = 1 / (255 * spread)
        self._shift = -np.asarray(mean) / spread
        self._table: np.ndarray = (
            np.arange(256, dtype=np.uint8)[:, np.newaxis] * self._scale.astype(self.dtype) + self._shift.astype(self.dtype)
        )[np.newaxis]
        self._of_rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # scale and shift of a whole row, by its width
        self._scratch: dict[tuple[int, int], np.ndarray] = {}
        self._threads, self._reading = BatchThreads(), Lock()

    def output_shape(self, h: int, w: int, c: int) -> tuple[int, int, int]:
        """Return the shape (H, W, C) of the results for images of (h, w, c).

        Raises:
            ShapeError: the images are too small for a crop, or have another number of channels than mean and std.
        """
        if c != len(self._scale):
            raise ShapeError(f"The images have {c} channels, but mean and std have {len(self._scale)}; they must agree.")
        for augmentation in self.augmentations:
            h, w, c = augmentation.output_shape(h, w, c)
        return h, w, c

    def stored_shape(self, h: int, w: int, c: int) -> tuple[int, int, int]:
        """Return the shape (H, W, C) of the pixels of an `unfinished` batch, for images of (h, w, c)."""
        for augmentation in self.augmentations[: first_deferred(self.augmentations)]:
            h, w, c = augmentation.output_shape(h, w, c)
        return h, w, c

    @property
    def can_defer(self) -> bool:
        """Whether a kernel set can do the last steps, so that batches may be `unfinished`."""
        return can_defer(self.normalised)

    @property
    def keeps_pixels(self) -> bool:
        """Whether the pixels of `unfinished` batches are the images themselves."""
        return not first_deferred(self.augmentations)

    def share_out(self, threads: int) -> None:
        """Set the number of threads that make each batch, including the calling one. All of them call augmentations."""
        self._threads = BatchThreads(threads)

    def mirrored(self) -> Pipeline:
        """Return a pipeline that makes the mirror image (left and right exchanged) of each result of this one."""
        other = copy.copy(self)
        other.augmentations = (*self.augmentations, Flip(probability=1.0))
        other._scratch, other._threads, other._reading = {}, BatchThreads(self._threads.count), Lock()
        other._mirrored = not self._mirrored
        return other

    def resized(self, side: int) -> Pipeline:
        """Return the pipeline with results of side x side pixels, by changing the last augmentation that determines a size.

        If there is none, images are resized after all augmentations except those of normalised pixels. The random numbers stay
        the same.
        """
        other = copy.copy(self)
        other.augmentations = _resized(self.augmentations, side)
        other._scratch = {}
        return other

    def source(self, shape: tuple[int, int, int], region: Box) -> Box:
        """Return the part of images of `shape` (H, W, C) that a region of the results may need, for any random numbers."""
        for size, augmentation in reversed(list(zip(self._sizes(shape), self.augmentations, strict=False))):
            region = augmentation.source(size, None, region)
        return region

    def part(
        self, read: Read, shape: tuple[int, int, int], sample_ids: np.ndarray, epoch: int, region: Box, out: np.ndarray
    ) -> np.ndarray:
        """Write a region of the results for images of `shape` (H, W, C) to `out` (N, h, w, C), reading only the pixels it needs.

        Args:
            read: function that returns a region of a sample's image.
            region: region of the results.
        """
        sizes = self._sizes(shape)
        draws = [self._draws(position, one, sample_ids, epoch) for position, one in enumerate(self.augmentations)]

        def made(count: int, number: int, wanted: Box) -> np.ndarray:
            """Return the region `wanted` of image `number` after `count` augmentations."""
            if count == 0:
                with self._reading:  # files are read by one thread at a time
                    return read(int(sample_ids[number]), wanted)
            augmentation, size, u = self.augmentations[count - 1], sizes[count - 1], draws[count - 1][number]
            result = np.zeros((*shape_of(wanted), shape[2]), np.uint8)
            if size_of(wanted):
                source = augmentation.source(size, u, wanted)
                part = read_only(made(count - 1, number, source))
                augmentation.apply_region(part, source, size, read_only(u), wanted, result)
            return result

        def make(thread: int, first: int, last: int) -> None:
            part = slice(first, last)
            images = self._buffer(thread, -1, last - first, (*shape_of(region), shape[2]))
            for number in range(first, last):
                images[number - first] = made(len(self.augmentations), number, region)
            self._changed(self._normalise(images, out[part]), sizes[-1], region, sample_ids[part], epoch)

        self._threads.run(len(sample_ids), size_of(region) * shape[2], make)
        return out

    def _sizes(self, shape: tuple[int, int, int]) -> list[tuple[int, int]]:
        """Return (H, W) before each augmentation, and after the last one."""
        sizes = [shape[:2]]
        for augmentation in self.augmentations:
            shape = augmentation.output_shape(*shape)
            sizes.append(shape[:2])
        return sizes

    def _draws(self, position: int, augmentation: Augmentation, sample_ids: np.ndarray, epoch: int) -> np.ndarray:
        drawn_in = 0 if augmentation.alternates else epoch
        stream = counter_random.key("augment", self.seed, drawn_in, position, augmentation.name)
        u = counter_random.uniform(stream, sample_ids, range(augmentation.draws))
        return (u + 0.5) % 1.0 if augmentation.alternates and epoch % 2 else u

    def _changed(self, out: np.ndarray, size: tuple[int, int], region: Box, sample_ids: np.ndarray, epoch: int) -> np.ndarray:
        """Apply the steps after normalisation to `out` (N, h, w, C), a region of images of `size` (H, W), and return it."""
        pixels = out
        if self._mirrored:  # change the image before it is mirrored
            pixels, region = out[:, :, ::-1], mirrored_box(region, size[1])
        for position, augmentation in enumerate(self.normalised, self._first_normalised):
            draws = self._draws(position, augmentation, sample_ids, epoch)
            stream = counter_random.key("augment", self.seed, epoch, position, augmentation.name, "pixels")
            for sample, u, image in zip(sample_ids.tolist(), draws, pixels, strict=True):
                words = partial(_words, stream, sample)
                augmentation.change(image, size, u, words, region)
        return out

    def __call__(self, images: np.ndarray, sample_ids: np.ndarray, epoch: int, out: np.ndarray) -> np.ndarray:
        """Augment and normalise images (N, H, W, C) uint8 of samples (N,) int64 into `out` (N, *output_shape) of `dtype`."""
        draws = [self._draws(position, one, sample_ids, epoch) for position, one in enumerate(self.augmentations)]

        def make(thread: int, first: int, last: int) -> None:
            part = slice(first, last)
            made = self._augmented(thread, images[part], [u[part] for u in draws])
            size = made.shape[1], made.shape[2]
            self._changed(self._normalise(made, out[part]), size, whole(size), sample_ids[part], epoch)

        self._threads.run(len(images), max(images.nbytes, out.nbytes // out.itemsize) // max(1, len(images)), make)
        return out

    def unfinished(self, images: np.ndarray, sample_ids: np.ndarray, epoch: int, out: np.ndarray) -> PixelBatch:
        """Return the batch of images (N, H, W, C) as pixels, with the last steps left for a kernel set. `can_defer` must be True.

        Args:
            out: uint8 (N, *stored_shape), output for the pixels; `images` itself if the pipeline `keeps_pixels`.
        """
        count, first = len(images), first_deferred(self.augmentations)
        draws = [self._draws(position, one, sample_ids, epoch) for position, one in enumerate(self.augmentations)]

        def make(thread: int, low: int, high: int) -> None:
            part = slice(low, high)
            self._augmented(thread, images[part], [u[part] for u in draws[:first]], out[part])

        if first:
            self._threads.run(count, max(images.nbytes, out.nbytes) // max(1, count), make)
        else:
            assert np.may_share_memory(out, images) or not images.size, "the pixels are the images themselves"
        left, size = list(zip(self.augmentations[first:], draws[first:], strict=True)), out.shape[1:3]
        resampling = resampled(left[0][0], size, left[0][1]) if left else None
        if resampling is not None:
            size = resampling.size
        windows, size = composed(count, size, left if resampling is None else left[1:])
        scale, shift = self._scale.astype(self.dtype), self._shift.astype(self.dtype)
        return PixelBatch(out, windows, size, scale, shift, self._fill(windows, size, sample_ids, epoch), resampling)

    def _fill(self, windows: np.ndarray, size: tuple[int, int], sample_ids: np.ndarray, epoch: int) -> float:
        """Set the filled boxes of `windows` in images of `size` (H, W), and return the number that they are filled with."""
        step = filling(self.normalised)
        if step is None:
            return 0.0
        assert step.fill is not None
        for window, u in zip(windows, self._draws(self._first_normalised, step, sample_ids, epoch), strict=True):
            if (box := step.box(size, u)) is not None:
                window["filled"] = mirrored_box(box, size[1]) if self._mirrored else box
        return step.fill

    def _augmented(
        self, thread: int, images: np.ndarray, draws: Sequence[np.ndarray], out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return images after the first `len(draws)` augmentations, in `out` or in scratch memory of the thread.

        Args:
            draws: random numbers of these images, for each of these augmentations.
        """
        for position, (augmentation, u) in enumerate(zip(self.augmentations, draws, strict=False)):
            result = out if position == len(draws) - 1 else None
            if result is None:
                result = self._buffer(thread, position, len(images), augmentation.output_shape(*images.shape[1:]))
            augmentation.apply(read_only(images), read_only(u), result)
            images = result
        return images

    def _normalise(self, images: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Normalise uint8 images into `out` by a table or by arithmetic, with bitwise equal results, and return it."""
        n, h, w, c = images.shape
        if h * w * c >= LEAST_FOR_OPENCV and 1 < c <= 4:
            from hpctrain.data import opencv

            for image, target in zip(images, out, strict=True):
                opencv.look_up(image, self._table, target)
        else:
            # Whole rows instead of channels as the innermost dim, because a NumPy loop over three elements is slow.
            rows = out.reshape(n, h, w * c)
            if w not in self._of_rows:
                self._of_rows[w] = (np.tile(self._scale, w).astype(self.dtype), np.tile(self._shift, w).astype(self.dtype))
            scale, shift = self._of_rows[w]
            np.multiply(images.reshape(n, h, w * c), scale, out=rows)
            np.add(rows, shift, out=rows)
        return out

    def _buffer(self, thread: int, position: int, count: int, shape: tuple[int, ...]) -> np.ndarray:
        buffer = self._scratch.get((thread, position))
        if buffer is None or len(buffer) < count or buffer.shape[1:] != shape:
            buffer = self._scratch[thread, position] = np.empty((count, *shape), np.uint8)
        return buffer[:count]


def _resized(augmentations: tuple[Augmentation, ...], side: int) -> tuple[Augmentation, ...]:
    for number in reversed(range(len(augmentations))):
        step = augmentations[number].resized(side)
        if step is not None:
            return *augmentations[:number], step, *augmentations[number + 1 :]
    from hpctrain.data.augmentations.resize import Resize  # loads Pillow, which many trainings do not need

    return *augmentations, Resize(side)


def check_order(steps: Sequence[Augmentation]) -> None:
    """Raise an error unless augmentations of normalised pixels come last.

    Raises:
        ConfigError: another augmentation follows one of normalised pixels.
    """
    late: Augmentation | None = None
    for number, step in enumerate(steps, 1):
        if isinstance(step, NormalisedAugmentation):
            late = step
        elif late is not None:
            raise ConfigError(
                f'The augmentation "{step.name}" is number {number} of the list, after "{late.name}", which changes normalised '
                f'pixels; put "{late.name}" at the end of the list.'
            )


def _words(stream: counter_random.Key, sample: int, count: int) -> np.ndarray:
    drawn: np.ndarray = counter_random.words(stream, np.array([sample]), range(count))[0]
    return drawn


@dataclass(frozen=True)
class ImageSizes:
    """Shorter side of the images by epoch.

    Args:
        steps: (first epoch, side in pixels) of each size. The first epochs start at 0 and increase.

    Raises:
        ConfigError: the first epochs do not start at 0 and increase, or a side is not positive.
    """

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise ConfigError("There are no image sizes; give at least one, such as (0, 32).")
        if (fault := first_fault(self.steps)) is not None:
            raise ConfigError(f"Image size {fault[0]}, {self.steps[fault[0]]}, {fault[1]}.")

    def at(self, epoch: int) -> int:
        """Return the side in an epoch. Epochs are counted from 0."""
        return self.steps[bisect_right([first for first, _ in self.steps], epoch) - 1][1]

    def changes_at(self, epoch: int) -> bool:
        """Return whether an epoch, counted from 0, has another size than the previous one; True for the first."""
        return epoch == 0 or self.at(epoch) != self.at(epoch - 1)

    def largest(self, epochs: int) -> int:
        """Return the largest side in a training of `epochs` epochs."""
        return max(side for first, side in self.steps if first < max(1, epochs))

    def shapes(
        self, pipeline: Pipeline, stored: tuple[int, int, int], epochs: int | None = None
    ) -> tuple[tuple[int, int, int], ...]:
        """Return the shapes (H, W, C) of a pipeline's results from stored images, one for each size, the largest first.

        Args:
            epochs: number of epochs of the training; None: all sizes are reached.

        Raises:
            ShapeError: the stored images are too small for one of the sizes.
        """
        sides = {side for first, side in self.steps if epochs is None or first < max(1, epochs)}
        return tuple(_shape_at(pipeline, stored, side) for side in sorted(sides, reverse=True))

    def __str__(self) -> str:
        return ", ".join(f"{side} px from epoch {first + 1}" for first, side in self.steps)


def _shape_at(pipeline: Pipeline, stored: tuple[int, int, int], side: int) -> tuple[int, int, int]:
    try:
        return pipeline.resized(side).output_shape(*stored)
    except ShapeError as error:
        raise ShapeError(f"Images of {side} px are not possible: {error}") from None


def first_fault(steps: tuple[tuple[int, int], ...]) -> tuple[int, str] | None:
    """Return (index of the first faulty step, its fault as the end of a sentence); None if there is none."""
    for number, (before, (epoch, side)) in enumerate(pairwise(((-1, 1), *steps))):
        if number == 0 and epoch != 0:
            return number, f"begins at epoch {epoch}, but the first size must begin at epoch 0"
        if epoch <= before[0]:
            least = before[0] + 1
            fault = f"begins at epoch {epoch}, but the previous size begins at epoch {before[0]}; the smallest value is {least}"
            return number, fault
        if side < 1:
            return number, f"has images of {side} px; the smallest side is 1"
    return None
