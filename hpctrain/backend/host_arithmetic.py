"""Arithmetic service of the CPU kernel sets: NumPy operations, and checksums of arrays in the host's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hpctrain.backend.arithmetic import (
    Arithmetic,
    Array,
    Corrections,
    Descent,
    Fetch,
    MomentDescent,
    MomentRule,
    UpdateRun,
)
from hpctrain.backend.specs import item_bytes
from hpctrain.core.intervals import Box, slices

_WORD = np.dtype(np.uint32)


@dataclass(frozen=True)
class HostFetch:
    """Implementation of `Fetch` for values that are already on the host."""

    values: np.ndarray

    def result(self) -> np.ndarray:
        return self.values


class HostWordSums:
    """Implementation of `WordSums`. Arrays that are adjacent in memory are summed in one call."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._count = len(arrays)
        sized = [number for number, array in enumerate(arrays) if array.size]
        self._runs = [_run([arrays[number] for number in run]) for run in _neighbours(arrays, sized)]
        self._numbers = np.array(sized, np.intp)
        self._changed = np.zeros(len(arrays), bool)
        self._remembered = np.zeros(len(arrays), _WORD)

    def fetch(self) -> HostFetch:
        sums, begin = np.zeros(self._count, _WORD), 0
        for words, starts in self._runs:
            sums[self._numbers[begin : begin + len(starts)]] = np.add.reduceat(words, starts, dtype=_WORD)
            begin += len(starts)
        return HostFetch(sums)

    def remember(self) -> None:
        self._remembered = self.fetch().values

    def compare(self) -> None:
        self._changed |= self.fetch().values != self._remembered

    def fetch_changed(self) -> HostFetch:
        return HostFetch(self._changed.copy())


def _neighbours(arrays: Sequence[np.ndarray], numbers: Sequence[int]) -> list[list[int]]:
    """Return `numbers`, indices of `arrays`, in groups whose arrays follow each other in the memory of one owner."""
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
    """Return the memory of adjacent arrays as 32-bit words, and the index of each array's first word."""
    first, last = arrays[0], arrays[-1]
    words = first.reshape(-1).view(_WORD)
    if len(arrays) > 1:
        assert isinstance(first.base, np.ndarray)
        whole = first.base.reshape(-1).view(np.uint8)
        words = whole[_begin(first) - _begin(whole) : _end(last) - _begin(whole)].view(_WORD)
    return words, np.array([(_begin(array) - _begin(first)) // _WORD.itemsize for array in arrays])


def _begin(array: np.ndarray) -> int:
    """Return the address of an array's first byte."""
    return int(array.__array_interface__["data"][0])


def _end(array: np.ndarray) -> int:
    return _begin(array) + array.nbytes


#: number of elements in a chunk of a descent. Data, gradient, momentum and both work buffers then take 640 KiB in float32,
#: which fit a second-level cache. With smaller chunks, the cost of more calls exceeds the gain (measured).
CHUNK = 1 << 15

_SQUARES_BLOCK = 1 << 16  # number of elements that are converted to float64 and whose squares are summed in one call
_FINITE_BLOCK = 1 << 19  # number of elements that are tested by one call of `all_finite`

_BFLOAT16_KIND = "V"  # `dtype.kind` of bfloat16, which `ml_dtypes` adds to NumPy


def to_float32(array: np.ndarray) -> np.ndarray:
    """Return an array of bfloat16 as float32, and any other array itself."""
    return array.astype(np.float32) if array.dtype.kind == _BFLOAT16_KIND else array


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    np.copyto(target, source, casting="same_kind")


def _add(target: np.ndarray, source: np.ndarray) -> None:
    np.add(target, source, out=target)


def all_finite(values: np.ndarray) -> bool:
    """Return whether no element of a contiguous array is NaN or infinite.

    If the array's dot product with itself is finite, so are all elements. Otherwise each element is tested, since the product may
    overflow although all elements are finite.
    """
    flat = values.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(float(np.dot(flat, flat))) or bool(np.isfinite(flat).all())


class HostDescent:
    """Implementation of `Descent` in one pass over chunks that fit a cache. Arguments: see `Arithmetic.descent`."""

    def __init__(self, data: np.ndarray, gradient: np.ndarray, momentum: np.ndarray, factor: float, nesterov: bool) -> None:
        # A NumPy float64 scalar would turn float32 arithmetic into float64.
        self._factor, self._nesterov = float(factor), nesterov
        self._data, self._grad, self._momentum = data, gradient, momentum
        longest = min(CHUNK, data.size)
        self._work = np.empty(longest, data.dtype)
        self._spare = np.empty(longest, data.dtype)

    def update(self, runs: Iterable[UpdateRun], lr: float) -> None:
        # A NumPy float64 scalar would turn float32 arithmetic into float64.
        lr = float(lr)
        for run, low, high in _chunks(runs):
            self._update_chunk(run, low, high, lr)

    def _update_chunk(self, run: UpdateRun, low: int, high: int, lr: float) -> None:
        w, g = self._data[low:high], self._grad[low:high]
        work, spare = self._work[: high - low], self._spare[: high - low]
        if run.gradient_scale != 1.0:
            g = np.multiply(g, run.gradient_scale, out=work)
        if run.decay:
            np.multiply(w, run.decay, out=spare)
            g = np.add(g, spare, out=work)
        if self._factor:
            m = self._momentum[low + run.offset : high + run.offset]
            np.multiply(m, self._factor, out=m)
            np.add(m, g, out=m)
            if self._nesterov:
                np.multiply(m, self._factor, out=spare)
                g = np.add(g, spare, out=work)
            else:
                g = m
        np.multiply(g, lr, out=work)
        np.subtract(w, work, out=w)


class HostMomentDescent:
    """Implementation of `MomentDescent`, in chunks like `HostDescent`. Arguments: see `Arithmetic.moment_descent`."""

    def __init__(self, data: np.ndarray, gradient: np.ndarray, first: np.ndarray, second: np.ndarray, rule: MomentRule) -> None:
        self._beta1, self._beta2, self._epsilon = float(rule.beta1), float(rule.beta2), float(rule.epsilon)
        self._decoupled = rule.decoupled
        self._data, self._grad, self._first, self._second = data, gradient, first, second
        longest = min(CHUNK, data.size)
        self._work = np.empty(longest, data.dtype)
        self._spare = np.empty(longest, data.dtype)

    def update(self, runs: Iterable[UpdateRun], corrections: Corrections, lr: float) -> None:
        lr = float(lr)
        for run, low, high in _chunks(runs):
            direction, w = self._direction(run, low, high, corrections), self._data[low:high]
            np.multiply(direction, lr, out=direction)
            np.subtract(w, direction, out=w)

    def direct(self, runs: Iterable[UpdateRun], corrections: Corrections) -> None:
        for run, low, high in _chunks(runs):
            self._grad[low:high] = self._direction(run, low, high, corrections)

    def _direction(self, run: UpdateRun, low: int, high: int, corrections: Corrections) -> np.ndarray:
        """Return the direction of elements [low, high), in a buffer that the next call overwrites."""
        g, place = self._grad[low:high], slice(low + run.offset, high + run.offset)
        m, v = self._first[place], self._second[place]
        work, spare = self._work[: high - low], self._spare[: high - low]
        if run.gradient_scale != 1.0:
            g = np.multiply(g, run.gradient_scale, out=work)
        if run.decay and not self._decoupled:
            g = np.add(g, np.multiply(self._data[low:high], run.decay, out=spare), out=work)
        np.multiply(m, self._beta1, out=m)
        np.add(m, np.multiply(g, 1.0 - self._beta1, out=spare), out=m)
        np.multiply(v, self._beta2, out=v)
        np.multiply(np.multiply(g, g, out=spare), 1.0 - self._beta2, out=spare)
        np.add(v, spare, out=v)
        np.multiply(np.sqrt(v, out=spare), corrections.root, out=spare)
        np.add(spare, self._epsilon, out=spare)
        np.divide(np.multiply(m, corrections.first, out=work), spare, out=work)
        if run.decay and self._decoupled:
            np.add(work, np.multiply(self._data[low:high], run.decay, out=spare), out=work)
        return work


def _chunks(runs: Iterable[UpdateRun]) -> Iterator[tuple[UpdateRun, int, int]]:
    """Yield (run, low, high) for chunks [low, high) of each run that fit a cache."""
    for run in runs:
        for low in range(run.start, run.stop, CHUNK):
            yield run, low, min(low + CHUNK, run.stop)


def _by_rows(arithmetic: HostArithmetic, work: Callable[..., object], target: Array, *others: Array) -> None:
    """Call work(target, *others) on the same ranges of the first dim of all arrays."""
    if target.ndim:
        arithmetic.share(len(target), lambda start, stop: work(*(array[start:stop] for array in (target, *others))), target.size)
    else:
        work(target, *others)


class HostArithmetic(Arithmetic):
    """Implementation of `Arithmetic` by NumPy. Every call is complete when it returns.

    Args:
        allocate: function that returns a zeroed uint8 buffer of a size in bytes; None: `np.zeros`.
    """

    on_host: ClassVar[bool] = True

    def __init__(self, allocate: Callable[[int], np.ndarray] | None = None) -> None:
        self._allocate = allocate

    def zeros(self, size: int, dtype: str) -> Array:
        if self._allocate is None:
            return np.zeros(size, dtype)
        return self._allocate(size * item_bytes(dtype)).view(dtype)

    def share(self, count: int, work: Callable[[int, int], object], items: int) -> None:
        """Call work(start, stop) on ranges that cover [0, count). This class makes one call.

        A subclass may make several calls at once in different threads. It returns when all of them have returned.

        Args:
            items: number of elements that the calls process in total.
        """
        work(0, count)

    def multiply(self, a: Array, b: Array, out: Array) -> None:
        """Write the product of matrices a (m, k) and b (k, n) to `out` (m, n).

        In `a` and `b` the elements of a row or of a column must be contiguous, in `out` the elements of a row.
        """
        np.matmul(a, b, out=out)

    def copy(self, target: Array, source: Array) -> None:
        _by_rows(self, _copy, target, source.reshape(target.shape))

    def fill(self, target: Array, value: float) -> None:
        _by_rows(self, lambda part: part.fill(value), target)

    def add(self, target: Array, source: Array) -> None:
        _by_rows(self, _add, target, source.reshape(target.shape))

    def subtract(self, target: Array, source: Array) -> None:
        _by_rows(self, lambda part, other: np.subtract(part, other, out=part), target, source.reshape(target.shape))

    def average_into(self, target: Array, source: Array, kept: float) -> None:
        for low in range(0, target.size, CHUNK):
            average, values = target[low : low + CHUNK], source[low : low + CHUNK]
            np.subtract(average, values, out=average)
            np.multiply(average, float(kept), out=average)
            np.add(average, values, out=average)

    def copy_box(self, target: Array, target_box: Box, source: Array, source_box: Box, *, accumulate: bool = False) -> None:
        _by_rows(self, _add if accumulate else _copy, target[slices(target_box)], source[slices(source_box)])

    def sum_pixels(self, target: Array, source: Array, scale: float) -> None:
        if target.dtype.kind == _BFLOAT16_KIND:  # NumPy would add in bfloat16
            np.multiply(source.sum(axis=(1, 2), keepdims=True, dtype=np.float32), scale, out=target, casting="same_kind")
            return
        np.sum(source, axis=(1, 2), keepdims=True, out=target)
        np.multiply(target, scale, out=target)

    def spread_pixels(self, target: Array, source: Array, scale: float) -> None:
        np.multiply(to_float32(source), scale, out=target, casting="same_kind")

    def square_sums(self, arrays: Sequence[Array]) -> np.ndarray:
        blocks = [(number, low) for number, array in enumerate(arrays) for low in range(0, array.size, _SQUARES_BLOCK)]
        sums, totals = np.empty(len(blocks), np.float64), np.zeros(len(arrays), np.float64)

        def work(start: int, stop: int) -> None:
            for place, (number, low) in enumerate(blocks[start:stop], start):
                block = arrays[number][low : low + _SQUARES_BLOCK].astype(np.float64, copy=False)
                sums[place] = np.dot(block, block)

        self.share(len(blocks), work, sum(array.size for array in arrays))
        for (number, _), value in zip(blocks, sums.tolist(), strict=True):
            totals[number] += value
        return totals

    def fetch_finite(self, arrays: Sequence[Array]) -> Fetch:
        flat, finite = [array.reshape(-1) for array in arrays], np.ones(len(arrays), bool)
        blocks = [(number, low) for number, array in enumerate(flat) for low in range(0, array.size, _FINITE_BLOCK)]

        def work(start: int, stop: int) -> None:
            for number, low in blocks[start:stop]:
                if not all_finite(flat[number][low : low + _FINITE_BLOCK]):
                    finite[number] = False

        self.share(len(blocks), work, sum(array.size for array in flat))
        return HostFetch(finite)

    def word_sums(self, arrays: Sequence[Array]) -> HostWordSums:
        return HostWordSums(arrays)

    def fetch(self, array: Array) -> Fetch:
        return HostFetch(to_float32(array))

    def to_host(self, array: Array) -> np.ndarray:
        return to_float32(array)

    def from_host(self, target: Array, source: np.ndarray) -> None:
        _by_rows(self, lambda part, values: np.copyto(part, values, casting="unsafe"), target, source)

    def descent(
        self, data: Array, gradient: Array, momentum: Array, *, factor: float, nesterov: bool, shadow: Array | None = None
    ) -> Descent:
        assert shadow is None, "kernels of the host read the parameters themselves"
        return HostDescent(data, gradient, momentum, factor, nesterov)

    def moment_descent(
        self, data: Array, gradient: Array, first: Array, second: Array, rule: MomentRule, *, shadow: Array | None = None
    ) -> MomentDescent:
        assert shadow is None, "kernels of the host read the parameters themselves"
        return HostMomentDescent(data, gradient, first, second, rule)
