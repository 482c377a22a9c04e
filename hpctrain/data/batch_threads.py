"""Threads that share a batch's samples out. What a sample becomes does not depend on which of them makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

#: of samples that a thread takes at once, so that they stay in a core's cache, and a call's fixed costs are those of several
CHUNK_BYTES = 1 << 21
#: for each thread, where chunks are not too small then: some samples take longer than others
_CHUNKS_PER_THREAD = 2
_LEAST_CHUNK_BYTES = 1 << 18
#: of threads, where nobody asks for a number: from so many cores on one more does not help
_MOST_BY_DEFAULT = 8
_CORES_PER_THREAD = 4

#: makes the samples from one number up to another; first comes the number of the thread, from 0
Work = Callable[[int, int, int], None]


def default_threads(cores: int) -> int:
    """Threads that make batches where a rank has so many cores: most of them compute at the same time."""
    return max(1, min(_MOST_BY_DEFAULT, cores // _CORES_PER_THREAD))


class BatchThreads:
    """Runs work over the samples of a batch, in the calling thread and `count` - 1 others, which start with the first batch.

    The threads end with the object. One call at a time.
    """

    def __init__(self, count: int = 1) -> None:
        assert count >= 1, f"{count} threads"
        self.count = count
        self._others: ThreadPoolExecutor | None = None

    def run(self, samples: int, sample_bytes: int, work: Work) -> None:
        """Have `work` make all samples, in chunks; an error of any of them is raised once nobody works any more.

        Args:
            sample_bytes: of one sample, from which the chunks' length follows.
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
        except BaseException as error:  # raised below: the others still write to the batch
            errors.append(error)
        errors += [failure for future in begun if (failure := future.exception()) is not None]
        if errors:
            raise errors[0]


def _make(thread: int, chunks: Iterator[int], length: int, samples: int, work: Work) -> None:
    """Make chunks until none is left; the iterator of a range gives each of them to one thread."""
    for first in chunks:
        work(thread, first, min(samples, first + length))
