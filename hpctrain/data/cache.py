"""Cache of samples in memory that the ranks of a node share: the first rank that needs a sample reads it for all of them.

A byte per sample marks its state. Two ranks that read a sample at the same time write the same pixels to the same place, which is
harmless; the state "being read" makes it rare. Ranks exchange no messages, and every wait is bounded: after a time limit, a
waiting rank reads the sample from the source.

`ReadCounts` counts samples and bytes by source. `FillingPlan` plans how a job fills the memory of all nodes before its first
step: the rank that reads each sample, and the ranks to which it sends the sample.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpctrain.comm.shared_memory import SharedMemory
from hpctrain.data.readers import BlockReader, ImageIndex, ReadImages, replacements

if TYPE_CHECKING:
    from hpctrain.data.local_copy import LocalCopy


class Origin(StrEnum):
    """Source of a sample: the data file, a local copy, memory of the node, or memory of other nodes."""

    FILE = "file"
    LOCAL = "local"
    MEMORY = "memory"
    NODES = "nodes"


class ReadCounts:
    """Thread-safe counts of samples and bytes read, by origin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {origin: [0, 0] for origin in Origin}

    def add(self, origin: Origin, samples: int, n_bytes: int) -> None:
        """Count `samples` samples of `n_bytes` bytes in total that were read from `origin`."""
        with self._lock:
            count = self._counts[origin]
            count[0] += samples
            count[1] += n_bytes

    def values(self) -> dict[str, int]:
        """Return the counts by name, such as `file_samples` and `file_bytes`, as a new dict."""
        with self._lock:
            return {
                f"{origin}_{name}": value
                for origin, count in self._counts.items()
                for name, value in zip(("samples", "bytes"), count, strict=True)
            }


def summed(of_ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of the counts of several ranks, by name."""
    total: dict[str, int] = {}
    for counts in of_ranks:
        for name, value in counts.items():
            total[name] = total.get(name, 0) + value
    return total


_ABSENT, _BEING_READ, _PRESENT = range(3)
_ALIGNMENT_BYTES = 64
# Bytes of samples per read; after each, the rank checks for samples that other ranks have read.
_BYTES_AT_ONCE = 4 << 20
#: default time to wait for a sample that another rank is reading: much longer than a disk takes, much shorter than a deadline
PATIENCE_SECONDS = 30.0
_PAUSE_SECONDS = 1e-3


class NodeRank(NamedTuple):
    """Index of a rank among the ranks that share a node's memory, and their number.

    Ranks that read the same batch start at different samples, according to this index.
    """

    rank: int
    ranks: int


#: place of a rank that does not share its memory
ALONE = NodeRank(0, 1)


def bytes_for(held: int, image_bytes: int) -> int:
    """Return the bytes of memory for `held` samples of `image_bytes` bytes, and their states."""
    return _states_bytes(held) + held * image_bytes


def held_in(limit_bytes: int, samples: int, image_bytes: int) -> int:
    """Return how many of `samples` samples of `image_bytes` bytes fit into a memory of `limit_bytes` bytes."""
    most = max(0, (limit_bytes - _ALIGNMENT_BYTES) // (image_bytes + 1))
    return min(samples, most)


def _states_bytes(held: int) -> int:
    return -(-held // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class SampleCache(ReadImages):
    """Images (N, H, W, C) uint8 of a file, some of which are cached in memory that the ranks of a node share.

    Several threads may read. A sample is read from the node's memory, otherwise from the node's local copy, otherwise from the
    file. A sample from the file is then stored in both if they have a place for it. Replacements for samples that this rank
    cannot read are never stored.

    Args:
        source: reader of the file. All ranks of the node read the same images.
        memory: memory shared by the node's ranks, of `bytes_for(held, ...)` bytes, zero at first; None if no sample is held.
        held: number of samples that the memory holds, from sample 0.
        place: number of this rank among the ranks that share the memory.
        copy: local copy of the node; None if there is none.
        patience_seconds: maximum time to wait for a sample that another rank is reading.

    Attributes:
        replaced: replacements of unreadable samples, from the source.
    """

    def __init__(
        self,
        source: ReadImages,
        counts: ReadCounts,
        memory: SharedMemory | None = None,
        held: int = 0,
        place: NodeRank = ALONE,
        *,
        copy: LocalCopy | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.shape: tuple[int, ...] = source.shape
        self.replaced = replacements(source)
        self._source, self._counts, self._copy = source, counts, copy
        self._memory = memory = SharedMemory(np.zeros(0, np.uint8)) if memory is None else memory
        self.held, self._place = held, place
        self._patience_seconds, self._sleep = patience_seconds, sleep
        self._states = memory.array[:held]
        self.image_bytes = int(np.prod(self.shape[1:]))
        begin = _states_bytes(held)
        self._pixels = memory.array[begin : begin + held * self.image_bytes].reshape(held, *self.shape[1:])
        self._kept = self._pixels.view()
        self._kept.flags.writeable = False

    @property
    def is_shared(self) -> bool:
        """Whether the ranks of the node share the memory."""
        return not self._memory.denied

    @property
    def full(self) -> bool:
        """Whether all places of the memory are filled."""
        return bool((self._states == _PRESENT).all())

    def take(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        samples = np.asarray(samples, np.int64)
        there = self._is_present(samples)
        if there.all():
            np.take(self._kept, samples, axis=0, out=out, mode="clip")
            self._counts.add(Origin.MEMORY, len(samples), out.nbytes)
            return out
        self._copy_from_memory(samples, np.flatnonzero(there), out)
        missing = np.flatnonzero(~there)
        kept = self._is_kept(samples[missing])
        others = missing[~kept]
        if len(others) == len(out):
            self._fetch(samples, out)
        elif len(others):
            out[others] = self._read(samples[others])
        self._bring(samples, missing[kept], out)
        return out

    def __getitem__(self, index: ImageIndex) -> np.ndarray:
        wanted, *region = index if isinstance(index, tuple) else (index,)
        if isinstance(wanted, slice):
            return super().__getitem__(index)
        sample = np.array([wanted])
        if self._is_kept(sample)[0]:
            self.bring(sample)
        if self._is_present(sample)[0]:
            pixels: np.ndarray = self._kept[wanted][tuple(region)]
            self._counts.add(Origin.MEMORY, 1, pixels.nbytes)
            return pixels
        if self._copy is not None and self._copy.keeps(wanted):
            image: np.ndarray = self._read(sample)[0]
            return image[tuple(region)]
        pixels = self._source[index]
        self._count_file(sample, pixels)
        return pixels

    def bring(self, samples: np.ndarray) -> None:
        """Load samples (n,) into memory if it has places for them, so that later reads of their regions use the memory.

        Errors of the source are raised.
        """
        samples = np.asarray(samples, np.int64)
        missing = np.flatnonzero(self._is_kept(samples) & ~self._is_present(samples))
        begin = len(missing) * self._place.rank // self._place.ranks
        self._bring(samples, np.roll(missing, -begin), None)

    def read_ahead(self, first: int, images: np.ndarray, kept: np.ndarray) -> None:
        """Read consecutive samples and store them. Errors of the source are raised.

        Args:
            images: (n, H, W, C) uint8, output for the images.
            kept: (n,) uint8, output: 1 for samples that were stored, otherwise 0.
        """
        samples = np.arange(first, first + len(images))
        images[...] = self._load(samples)
        kept[...] = self._is_kept(samples)

    def put(self, first: int, images: np.ndarray, kept: np.ndarray) -> None:
        """Store consecutive samples that another node has read. The arguments are those of `read_ahead`."""
        good = np.flatnonzero(kept)
        self._pixels[first + good] = images[good]
        self._memory.fence()
        self._states[first + good] = _PRESENT
        self._counts.add(Origin.NODES, len(good), len(good) * self.image_bytes)

    def _is_kept(self, samples: np.ndarray) -> np.ndarray:
        """Return whether memory has a place for each sample, (n,) bool."""
        kept: np.ndarray = samples < self.held
        if self.replaced:
            kept &= ~np.isin(samples, list(self.replaced))
        return kept

    def _is_present(self, samples: np.ndarray) -> np.ndarray:
        """Return whether each sample is in memory now, (n,) bool."""
        there = self._is_kept(samples)
        there[there] = self._states[samples[there]] == _PRESENT
        self._memory.fence()
        return there

    def _copy_from_memory(self, samples: np.ndarray, places: np.ndarray, out: np.ndarray | None) -> None:
        """Copy the elements of `samples` at the indices `places` from memory to the same indices of `out`."""
        if out is not None and len(places):
            out[places] = self._kept[samples[places]]
            self._counts.add(Origin.MEMORY, len(places), len(places) * self.image_bytes)

    def _read(self, samples: np.ndarray) -> np.ndarray:
        return self._fetch(samples, np.empty((len(samples), *self.shape[1:]), np.uint8))

    def _fetch(self, samples: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write images to contiguous `out`, from the local copy or the file. Store samples that the copy lacks. Return `out`."""
        copy = self._copy
        if copy is None:
            self._source.take(samples, out)
            self._count_file(samples, out)
            return out
        rows = out.reshape(len(samples), self.image_bytes)
        absent = [
            number
            for number, sample in enumerate(samples.tolist())
            if sample in self.replaced or not copy.read(sample, rows[number].data)
        ]
        found = len(samples) - len(absent)
        if found:
            self._counts.add(Origin.LOCAL, found, found * self.image_bytes)
        if not absent:
            return out
        images = np.empty((len(absent), *self.shape[1:]), np.uint8) if found else out
        self._source.take(samples[absent], images)
        self._count_file(samples[absent], images)
        for sample, image in zip(samples[absent].tolist(), images.reshape(len(absent), self.image_bytes), strict=True):
            if sample not in self.replaced:
                copy.write(sample, image.data)
        if images is not out:
            out[absent] = images
        return out

    def _count_file(self, samples: np.ndarray, pixels: np.ndarray) -> None:
        """Count the samples and the bytes that were read from the file for `pixels`."""
        source, n_bytes = self._source, pixels.nbytes
        if isinstance(source, BlockReader) and source.decodes:
            n_bytes = int(source.extents.sizes(samples).sum())
        self._counts.add(Origin.FILE, len(samples), n_bytes)

    def _bring(self, samples: np.ndarray, places: np.ndarray, out: np.ndarray | None) -> None:
        """Read samples[places] and store them, or wait for ranks that read them; also write them to `out` unless it is None."""
        at_once = max(1, _BYTES_AT_ONCE // max(1, self.image_bytes))
        waited_seconds = 0.0
        while len(places):
            states = self._states[samples[places]]
            self._memory.fence()
            there, free = states == _PRESENT, states == _ABSENT
            self._copy_from_memory(samples, places[there], out)
            if waited_seconds >= self._patience_seconds:
                free = ~there
            mine = places[free][:at_once]
            if len(mine):
                images = self._load(samples[mine])
                if out is not None:
                    out[mine] = images
            elif not there.any():
                self._sleep(_PAUSE_SECONDS)
                waited_seconds += _PAUSE_SECONDS
            places = places[~there & ~np.isin(places, mine)]

    def _load(self, samples: np.ndarray) -> np.ndarray:
        """Read samples from the source, and store those that were not replaced."""
        self._states[samples] = _BEING_READ
        state = np.full(len(samples), _ABSENT, np.uint8)
        try:
            images = self._read(samples)
            good = self._is_kept(samples)
            self._pixels[samples[good]] = images[good]
            state[good] = _PRESENT
        finally:
            self._memory.fence()
            self._states[samples] = state
        return images


@dataclass(frozen=True)
class FillingPlan:
    """Plan of rounds, in each of which every rank reads a chunk of samples and sends it to the other memories.

    The plan is a function of numbers that all ranks have, so it needs no communication.

    Args:
        samples: number of samples that fit into every memory, which are the file's first ones.
        at_once: number of samples of a chunk.
        memory_of: number of each rank's memory, from 0.
    """

    samples: int
    at_once: int
    memory_of: tuple[int, ...]

    @property
    def rounds(self) -> int:
        """Number of rounds until all samples are read."""
        return -(-self.samples // (self.at_once * len(self.memory_of)))

    def done_after(self, rounds: int) -> int:
        """Return the number of samples that every memory holds after `rounds` rounds."""
        return min(self.samples, rounds * self.at_once * len(self.memory_of))

    def chunk(self, turn: int, rank: int) -> tuple[int, int]:
        """Return the interval [first, stop) of samples that a rank reads in round `turn`; empty if it reads none."""
        first = min(self.samples, self._number(turn, rank) * self.at_once)
        return first, min(self.samples, first + self.at_once)

    def receivers(self, turn: int, rank: int) -> tuple[int, ...]:
        """Return the ranks that receive a rank's chunk of a round: one rank of each other memory, chosen in rotation."""
        first, stop = self.chunk(turn, rank)
        if first == stop:
            return ()
        number = self._number(turn, rank)
        others = (ranks for memory, ranks in enumerate(self._ranks_of) if memory != self.memory_of[rank])
        return tuple(ranks[number % len(ranks)] for ranks in others)

    def senders(self, turn: int, rank: int) -> tuple[int, ...]:
        """Return the ranks whose chunks a rank receives in a round."""
        others = (other for other, memory in enumerate(self.memory_of) if memory != self.memory_of[rank])
        return tuple(other for other in others if rank in self.receivers(turn, other))

    @cached_property
    def _ranks_of(self) -> Sequence[Sequence[int]]:
        """Ranks of each memory."""
        ranks_of: list[list[int]] = [[] for _ in range(max(self.memory_of) + 1)]
        for rank, memory in enumerate(self.memory_of):
            ranks_of[memory].append(rank)
        return ranks_of

    def _number(self, turn: int, rank: int) -> int:
        return turn * len(self.memory_of) + rank
