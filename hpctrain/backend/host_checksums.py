"""Checksums of arrays of the host, and a guard of them by sums, which are taken where the memory is in a cache anyway."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_WORD = np.dtype(np.uint32)


@dataclass(frozen=True)
class HostFetch:
    """Implements `Fetch`: values that are on the host already."""

    values: np.ndarray

    def result(self) -> np.ndarray:
        """The values."""
        return self.values


class HostChecksums:
    """Implements `ArrayChecksums`."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = tuple(arrays)

    def fetch(self) -> HostFetch:
        return HostFetch(np.array([zlib.crc32(array.data) for array in self._arrays], np.uint32))


class HostSums:
    """Implements `ArrayChecksums` by sums of words. Sums arrays that are adjacent in memory in one call."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._count = len(arrays)
        sized = [number for number, array in enumerate(arrays) if array.size]
        self._runs = [_run([arrays[number] for number in run]) for run in _neighbours(arrays, sized)]
        self._numbers = np.array(sized, np.intp)

    def fetch(self) -> HostFetch:
        sums, begin = np.zeros(self._count, _WORD), 0
        for words, starts in self._runs:
            sums[self._numbers[begin : begin + len(starts)]] = np.add.reduceat(words, starts, dtype=_WORD)
            begin += len(starts)
        return HostFetch(sums)


class HostGuard:
    """Implements `ArrayGuard`."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._changed = np.zeros(len(arrays), bool)
        self._sums = HostSums(arrays)
        self._remembered = self._sums.fetch().values

    def remember(self) -> None:
        self._remembered = self._sums.fetch().values

    def compare(self) -> None:
        self._changed |= self._sums.fetch().values != self._remembered

    def fetch_changed(self) -> HostFetch:
        return HostFetch(self._changed.copy())


@dataclass(frozen=True)
class HostWatchedArrays:
    """Implements `WatchedArrays`."""

    arrays: tuple[np.ndarray, ...]

    def checksums(self) -> HostChecksums:
        return HostChecksums(self.arrays)

    def sums(self) -> HostSums:
        return HostSums(self.arrays)

    def guard(self) -> HostGuard:
        return HostGuard(self.arrays)


def _neighbours(arrays: Sequence[np.ndarray], numbers: Sequence[int]) -> list[list[int]]:
    """Numbers of arrays in runs that follow each other in memory that one array owns."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and _follows(arrays[number], arrays[runs[-1][-1]]):
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _follows(array: np.ndarray, before: np.ndarray) -> bool:
    same = isinstance(array.base, np.ndarray) and array.base is before.base and array.base.flags.c_contiguous
    return same and _begin(array) == _end(before)


def _run(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The memory of neighbouring arrays as 32-bit words, and where each begins in it."""
    first, last = arrays[0], arrays[-1]
    words = first.reshape(-1).view(_WORD)
    if len(arrays) > 1:
        assert isinstance(first.base, np.ndarray)
        whole = first.base.reshape(-1).view(np.uint8)
        words = whole[_begin(first) - _begin(whole) : _end(last) - _begin(whole)].view(_WORD)
    return words, np.array([(_begin(array) - _begin(first)) // _WORD.itemsize for array in arrays])


def _begin(array: np.ndarray) -> int:
    """Address of an array's first byte."""
    return int(array.__array_interface__["data"][0])


def _end(array: np.ndarray) -> int:
    return _begin(array) + array.nbytes
