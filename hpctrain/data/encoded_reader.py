"""Images of a file of picture files, decoded when they are read; an array's to those who read them."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np

from hpctrain.data import decoding
from hpctrain.data.readers import BlockReader
from hpctrain.data.decoding import Fit
from hpctrain.data.extents import Extents
from hpctrain.data.format import sum_of
from hpctrain.core.errors import DataError

#: whose pixels are compared with those that the file was made of: enough to find another decoder, few enough to cost nothing
_COMPARED_SAMPLES = 16


class EncodedReader(BlockReader):
    """Reads images (N, H, W, C) uint8: the very pixels that a file of pixels made from the same pictures holds.

    A picture file that is damaged is a sample that cannot be read. One thread at a time may read; decoding takes several.

    Args:
        path: of the data file, which is held open. block: a map of the picture files, flat. extents: of each of them.
        sums: (N,) crc32 of the picture files, and of the pixels that they decode to. form: (H, W, C) that they are brought to.
        fit: "crop" or "squash", how. threads: that decode at once, without the interpreter's lock for most of the time.
        max_pixels: pixels of the largest picture that is accepted; see `decoder.decode`.
    """

    decodes = True

    def __init__(
        self,
        path: Path,
        block: np.memmap,
        extents: Extents,
        sums: tuple[np.ndarray, np.ndarray],
        form: tuple[int, ...],
        fit: str,
        threads: int = 1,
        max_pixels: int | None = None,
    ) -> None:
        super().__init__(path, block, extents)
        self.shape = (extents.count, *form)
        self.threads = threads
        self._sums, self._pixel_sums = sums
        self._size, self._fit = (form[0], form[1]), cast(Fit, fit)
        self._max_pixels = max_pixels
        self._to_compare = _COMPARED_SAMPLES
        self._pool: ThreadPoolExecutor | None = None
        self._pool_threads = 0

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Whole images of samples (n,), written to `out` (n, H, W, C), which is returned.

        Raises:
            UnreadableError: a sample cannot be read or decoded, and none may stand in for it.
            DataError: this machine's libraries decode pictures to other pixels than those that made the file.
        """
        samples = np.asarray(samples, np.int64)

        def attempt(actual: np.ndarray, places: np.ndarray, patient: bool) -> Mapping[int, str]:
            return self._decode_all(actual, [out[place] for place in places.tolist()], patient)

        self._complete(samples, attempt)
        return out

    def __getitem__(self, index: int | slice | tuple[int | slice, slice, slice]) -> np.ndarray:
        """Pixels of a sample or of several, of whole images or of a region, as of an array; errors as of `take`."""
        wanted, *region = index if isinstance(index, tuple) else (index,)
        rows, columns = region or (slice(None), slice(None))
        numbers = range(self.shape[0])[wanted]
        samples = np.array([numbers] if isinstance(numbers, int) else numbers, np.int64)
        whole = self.take(samples, np.empty((len(samples), *self.shape[1:]), np.uint8))[:, rows, columns]
        return whole[0] if isinstance(numbers, int) else whole

    def decode(self, sample: int, content: bytes, out: np.ndarray) -> str | None:
        """Write the image that the stored bytes of a sample stand for to `out` (H, W, C); None, or why that cannot be done.

        Raises:
            DataError: as `take`.
        """
        if zlib.crc32(content) != self._sums[sample]:
            return "its bytes changed since the file was written"
        try:
            out[...] = decoding.decode(content, self._size, self._fit, self.shape[3], self._max_pixels)
        except DataError as error:
            return str(error).rstrip(".")
        if self._to_compare > 0:
            self._to_compare -= 1
            self._compare(sample, out)
        return None

    def pixel_sums(self, sums: np.ndarray | None) -> np.ndarray | None:
        return self._pixel_sums

    def _pixel_sum(self, sample: int, stored_sum: int) -> int:
        """Return the declared checksum, without decoding; a negative number, so no checksum, if the stored bytes changed."""
        return int(self._pixel_sums[sample]) if stored_sum == self._sums[sample] else -1 - stored_sum

    def _decode_all(self, samples: np.ndarray, outs: list[np.ndarray], patient: bool) -> Mapping[int, str]:
        """Read and decode samples (n,); those of which that cannot be done, by their number, with the reason."""
        sizes = self.extents.sizes(samples)
        ends = np.cumsum(sizes)
        contents = np.empty(int(sizes.sum()), np.uint8)
        starts = self.extents.starts(samples)[:, None]
        failed = dict(self.fetch(samples, starts, (ends - sizes)[:, None], sizes, contents, patient=patient))
        numbers = [number for number in range(len(samples)) if number not in failed]

        def one(number: int) -> str | None:
            content = contents[ends[number] - sizes[number] : ends[number]].tobytes()
            return self.decode(int(samples[number]), content, outs[number])

        for number, why in zip(numbers, self._map_threads(one, numbers), strict=True):
            if why is not None:
                failed[number] = why
        return {number: failed[number] for number in sorted(failed)}

    def _map_threads(self, function: Callable[[int], str | None], numbers: list[int]) -> Iterator[str | None]:
        """Results in the order of the numbers."""
        if self.threads == 1 or len(numbers) < 2:
            return map(function, numbers)
        if self._pool is None or self._pool_threads != self.threads:
            self._pool_threads = self.threads
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="hpctrain-decode")
            weakref.finalize(self, self._pool.shutdown, wait=False)
        return self._pool.map(function, numbers)

    def _compare(self, sample: int, pixels: np.ndarray) -> None:
        if sum_of(pixels) != self._pixel_sums[sample]:
            raise DataError(
                f"Sample {sample} of the data file {self._path} decodes to other pixels here ({decoding.versions()}) than where "
                "the file was made; convert it again on this machine, or install those libraries' versions."
            )
